"""`lmkit eval A --against B`: perplexity, and the distance from a reference model."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from lmkit.cli.options import fields_of, takes
from lmkit.cli.progress import ProgressBar
from lmkit.config import EngineConfig

if TYPE_CHECKING:
    from lmkit.quant.report.evaluate import EvalResult


SHOWN = 3  # examples of answers that changed
# Of the model that is measured. The reference is whole and exact.
ENGINE = "kv_dtype", "activations", "lm_head", "tp", "ep"


@takes(engine=fields_of(EngineConfig, *ENGINE, group="Engine"))
def evaluate(
    model: Annotated[str, typer.Argument(help='A checkpoint folder, a .gguf file, or "demo".')],
    against: Annotated[str | None, typer.Option(help="The reference, usually the original checkpoint.")] = None,
    text: Annotated[Path | None, typer.Option(help="A text file; default the held-out text of the demo model.")] = None,
    dataset: Annotated[
        str | None, typer.Option(help="In place of --text: a calibration preset, file, folder or hub:ORG/NAME.")
    ] = None,
    packed_cache: Annotated[
        bool, typer.Option(help="Keep packed weights in a file, MODEL/.lmkit, as serve does; never the reference's.")
    ] = False,
    seq_len: Annotated[int, typer.Option(min=2, help="Tokens of a window.")] = 512,
    limit: Annotated[int, typer.Option(min=2, help="Tokens of the text to use.")] = 32768,
    json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
    *,
    engine: dict[str, Any],
) -> None:
    """Measure perplexity on a text, and the distance between two models."""
    import msgspec

    from lmkit.environment import default_num_threads
    from lmkit.errors import ConfigError
    from lmkit.kernels.cpu import threads
    from lmkit.quant.report import evaluate as evaluation

    threads.configure(default_num_threads())
    if dataset is not None and text is not None:
        raise ConfigError("--text and --dataset: give one of them")
    if dataset is None:
        token_ids = evaluation.encode_text(model, text, against)
    else:
        token_ids = evaluation.encode_documents(model, dataset, limit, against)
    with ProgressBar(quiet=json) as bar:
        result = evaluation.evaluate(
            model,
            token_ids,
            against=against,
            packed_cache=packed_cache,
            prefix=evaluation.window_prefix(model),
            decode=evaluation.text_of_tokens(model),
            seq_len=seq_len,
            limit=limit,
            progress=bar.update,
            **engine,
        )
    if json:
        print(msgspec.json.format(msgspec.json.encode(result), indent=2).decode())
    else:
        print_result(result)


def print_result(result: EvalResult) -> None:
    from rich.console import Console
    from rich.table import Table

    title = f"{result.model}: {result.num_tokens:,} tokens in windows of {result.seq_len}"
    table = Table(title=title, title_justify="left", show_header=False)
    head = "" if result.lm_head == "auto" else f", {result.lm_head} head"
    table.add_row("KV cache, activations", f"{result.kv_dtype}, {result.activations}{head}")
    table.add_row("perplexity", f"{result.perplexity:.4f} ± {result.perplexity_stderr:.4f}")
    if (far := result.divergence) is not None:
        change = result.perplexity / far.reference_perplexity - 1
        table.add_row("reference", far.reference)
        table.add_row(
            "its perplexity",
            f"{far.reference_perplexity:.4f} (change {change:+.2%} ± {far.log_ratio_stderr:.2%})",
        )
        table.add_row("KL, mean", f"{far.kl_mean:.5f} ± {far.kl_stderr:.5f} nats")
        table.add_row("KL, median / 99 % / 99.9 %", f"{far.kl_median:.5f} / {far.kl_p99:.4f} / {far.kl_p999:.4f}")
        table.add_row("same most likely token", f"{far.same_top:.2%} ± {far.same_top_stderr:.2%}")
        table.add_row("same five most likely", f"{far.same_top5:.2%} ± {far.same_top5_stderr:.2%}")
        table.add_row("reference's most likely among five", f"{far.top_in_top5:.2%}")
        if far.answers is not None:
            what = f"answers unchanged, of {far.answers.count:,} with {far.answers.length} tokens"
            table.add_row(what, f"{far.answers.unchanged:.1%}")
            for each in far.answers.examples[:SHOWN]:
                table.add_row(f"{each.before[-40:]!r}", f"{each.reference!r} became {each.model!r}")
    Console(markup=False).print(table)
