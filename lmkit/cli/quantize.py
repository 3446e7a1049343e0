"""`lmkit quantize MODEL -o OUT`: 4-bit weights and a KV cache configuration by a recipe."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from lmkit.cli.eval import ProgressBar, print_result
from lmkit.errors import UnsupportedError

if TYPE_CHECKING:
    from lmkit.quant.report import QuantReport
    from lmkit.quant.run import Quantizer


def quantize(
    model: Annotated[str, typer.Argument(help='A checkpoint folder, or "demo".')],
    output: Annotated[Path, typer.Option("--output", "-o", help="Folder to write; it must not exist or be empty.")],
    recipe: Annotated[str, typer.Option(help="A recipe's name in recipes/, or a .yaml file.")] = "awq_w4a16_g128",
    calibration: Annotated[
        list[str] | None, typer.Option(help="A preset, a .txt, .jsonl or .parquet file or a folder; may be repeated.")
    ] = None,
    num_samples: Annotated[int | None, typer.Option(help="Rows of calibration text.")] = None,
    seq_len: Annotated[int | None, typer.Option(help="Tokens of a row.")] = None,
    group_size: Annotated[int | None, typer.Option(help="32, 64 or 128 inputs share a scale.")] = None,
    kv_bits: Annotated[int | None, typer.Option(help="Bits of the KV cache: 16, 8 or 4.")] = None,
    seed: Annotated[int | None, typer.Option(help="Of the choice of calibration text.")] = None,
    max_memory: Annotated[
        str | None, typer.Option(help="Memory to stay below, for example 2GiB; without it, the fastest way.")
    ] = None,
    device: Annotated[str, typer.Option(help="Where it is computed: cpu.")] = "cpu",
    restart: Annotated[bool, typer.Option(help="Drop what an interrupted run of this output has finished.")] = False,
    evaluate: Annotated[
        bool, typer.Option("--eval/--no-eval", help="Compare the result with the source on held-out text.")
    ] = True,
    json: Annotated[bool, typer.Option("--json", help="Print the report as JSON.")] = False,
) -> None:
    """Quantize a checkpoint. Options replace what the recipe says."""
    from lmkit.config import default_num_threads, parse_bytes
    from lmkit.kernels.cpu import threads
    from lmkit.quant.comm import Comm
    from lmkit.quant.evaluate import encode_text
    from lmkit.quant.recipe import load_recipe
    from lmkit.quant.run import prepare

    loaded = load_recipe(
        recipe,
        {
            "scheme": {"group_size": group_size},
            "kv": {"bits": kv_bits},
            "calibration": {
                "dataset": tuple(calibration) if calibration else None,
                "num_samples": num_samples, "seq_len": seq_len, "seed": seed,
            },
        },
    )  # fmt: skip
    if device != "cpu":
        raise UnsupportedError(f"--device {device}: quantization runs on the CPU, there are no kernels for others yet")
    budget = None if max_memory is None else parse_bytes(max_memory, "--max-memory")
    comm = Comm.launched()
    threads.configure(default_num_threads())
    quantizer = prepare(model, loaded, max_memory=budget, comm=comm)
    quiet = json or not comm.is_first
    eval_ids = encode_text(quantizer.source.reader.path) if evaluate else None
    if not quiet:
        _print_plan(model, quantizer)
    with ProgressBar(quiet=quiet) as bar:
        report = quantizer.run(output, eval_ids=eval_ids, restart=restart, progress=bar.update)
    comm.close()
    if not comm.is_first:
        return
    if json:
        import msgspec

        print(msgspec.json.format(msgspec.json.encode(report), indent=2).decode())
    else:
        _print_report(report, output)


def _print_plan(model: str, quantizer: Quantizer) -> None:
    recipe, plan, budget = quantizer.recipe, quantizer.plan, quantizer.budget
    calibration = recipe.calibration
    steps = ", ".join(type(step).__struct_config__.tag for step in recipe.steps)  # type: ignore[misc]
    print(
        f"{model}: {steps}; {recipe.scheme.bits} bits, groups of {recipe.scheme.group_size}; KV {recipe.kv.bits} bits"
    )
    print(f"calibration: {calibration.num_samples} rows of {calibration.seq_len} tokens from {calibration.dataset}")
    print(
        f"estimate: {budget.memory_bytes / 2**30:.2f} GiB of memory, {budget.disk_bytes / 2**30:.2f} GiB of disk, "
        f"{_duration(plan.seconds)} without evaluation; batches of {budget.batch_tokens} tokens"
    )
    for module, reason in plan.dense.items():
        print(f"stays dense: {module}: {reason}")


def _duration(seconds: float) -> str:
    return f"{seconds:.0f} s" if seconds < 120 else f"{seconds / 60:.0f} min"


def _print_report(report: QuantReport, output: Path) -> None:
    from rich.console import Console
    from rich.table import Table

    from lmkit.quant.budget import peak_bytes

    table = Table(title="relative squared error of each layer", title_justify="left")
    for column in ("layer", "RTN, mean of linears", "stored, mean of linears", "whole layer"):
        table.add_column(column, justify="right")
    for layer in report.layers:
        before = [linear.rtn_error for linear in layer.linears if linear.rtn_error is not None]
        after = [linear.error for linear in layer.linears if linear.error is not None]
        means = [f"{sum(errors) / len(errors):.5f}" if errors else "dense" for errors in (before, after)]
        table.add_row(str(layer.index), *means, f"{layer.error:.5f}")
    Console().print(table)
    saved = report.bytes_after / report.bytes_before
    print(
        f"{output}: {report.bytes_after:,} bytes of weights, {saved:.0%} of the source; {report.seconds:.1f} s; "
        f"{peak_bytes() / 2**30:.2f} GiB of memory at the peak"
    )
    if report.evaluation is not None:
        print_result(report.evaluation)
