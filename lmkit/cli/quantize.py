"""`lmkit quantize MODEL -o OUT`: quantized weights and a KV cache configuration by a recipe."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from lmkit.cli.eval import ProgressBar, print_result
from lmkit.errors import UnsupportedError

if TYPE_CHECKING:
    from lmkit.quant.recipe import Recipe
    from lmkit.quant.report.report import MixedPrecisionReport, QuantReport
    from lmkit.quant.run import Quantizer
    from lmkit.quant.sections import CalibrationRecipe


def quantize(
    model: Annotated[str, typer.Argument(help='A checkpoint folder, or "demo".')],
    output: Annotated[Path, typer.Option("--output", "-o", help="Folder to write; it must not exist or be empty.")],
    recipe: Annotated[str, typer.Option(help="A recipe's name in recipes/, or a .yaml file.")] = "awq_w4a16_g128",
    calibration: Annotated[
        list[str] | None,
        typer.Option(
            metavar="SOURCE[:WEIGHT]",
            help="A preset, a .txt, .jsonl or .parquet file, a folder or hub:ORG/NAME; may be repeated, with weights.",
        ),
    ] = None,
    num_samples: Annotated[int | None, typer.Option(help="Rows of calibration text.")] = None,
    seq_len: Annotated[int | None, typer.Option(help="Tokens of a row.")] = None,
    weight_format: Annotated[
        str | None, typer.Option("--format", help="awq, gptq, gptq_v2, compressed-tensors or fp8.")
    ] = None,
    bits: Annotated[
        float | None,
        typer.Option(help="Average bits of a weight: each linear gets a scheme by its effect."),
    ] = None,
    group_size: Annotated[
        str | None, typer.Option(help="32, 64 or 128 inputs share a scale, or channel, tensor or block.")
    ] = None,
    kv_bits: Annotated[int | None, typer.Option(help="Bits of the KV cache: 16, 8 or 4.")] = None,
    seed: Annotated[int | None, typer.Option(help="Seed of the choice of calibration text.")] = None,
    max_memory: Annotated[
        str | None, typer.Option(help="Limit of the memory peak, for example 2GiB. Default: none.")
    ] = None,
    device: Annotated[str, typer.Option(help="Device that computes: cpu.")] = "cpu",
    restart: Annotated[bool, typer.Option(help="Discard the finished layers of an interrupted run.")] = False,
    evaluate: Annotated[
        bool, typer.Option("--eval/--no-eval", help="Compare the result with the source on held-out text.")
    ] = True,
    json: Annotated[bool, typer.Option("--json", help="Print the report as JSON.")] = False,
) -> None:
    """Quantize a checkpoint. Options override the recipe."""
    from lmkit.config import default_num_threads, parse_bytes
    from lmkit.kernels.cpu import threads
    from lmkit.quant.data.calibration import parse_source
    from lmkit.quant.data.comm import Comm
    from lmkit.quant.recipe import load_recipe
    from lmkit.quant.report.evaluate import encode_text
    from lmkit.quant.run import prepare

    loaded = load_recipe(
        recipe,
        {
            "format": weight_format,
            "bits": bits,
            "scheme": {"group_size": int(group_size) if group_size and group_size.isdigit() else group_size},
            "kv": {"bits": kv_bits},
            "calibration": {
                "dataset": [parse_source(item) for item in calibration] if calibration else None,
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
    steps = ", ".join(step.name() for step in recipe.steps)
    print(f"{model}: {steps}; {_scheme(recipe)}; KV {recipe.kv.bits} bits")
    print(f"calibration: {calibration.num_samples} rows of {calibration.seq_len} tokens from {_sources(calibration)}")
    print(
        f"estimate: {budget.memory_bytes / 2**30:.2f} GiB of memory, {budget.disk_bytes / 2**30:.2f} GiB of disk, "
        f"{_duration(plan.seconds)} without evaluation; batches of {budget.batch_tokens} tokens"
    )
    for module, reason in plan.dense.items():
        print(f"stays dense: {module}: {reason}")


def _scheme(recipe: Recipe) -> str:
    """`4 bits, groups of 128`, `8 bits, float, per block, activations float8`."""
    from lmkit.quant.sections import WIDE_GROUPS

    scheme, grouped = recipe.scheme, recipe.scheme.group_size not in WIDE_GROUPS
    parts = [f"{scheme.bits} bits"]
    parts += [] if scheme.type == "int" else [scheme.type]
    parts.append(f"groups of {scheme.group_size}" if grouped else f"per {scheme.group_size}")
    parts += [] if recipe.activations == "none" else [f"activations {recipe.activations}"]
    parts += [] if recipe.bits is None else [f"or finer: {recipe.bits:g} bits on average"]
    return ", ".join(parts)


def _sources(calibration: CalibrationRecipe) -> str:
    entries = [calibration.dataset] if isinstance(calibration.dataset, str) else calibration.dataset
    return ", ".join(entry if isinstance(entry, str) else f"{entry.source}:{entry.weight:g}" for entry in entries)


def _duration(seconds: float) -> str:
    return f"{seconds:.0f} s" if seconds < 120 else f"{seconds / 60:.0f} min"


def _bits_line(mixed: MixedPrecisionReport) -> str:
    counts = Counter(group.chosen for group in mixed.groups for _ in group.modules)
    chosen = ", ".join(f"{count} {name}" for name, count in sorted(counts.items()))
    return f"{mixed.reached:.3f} bits a weight of {mixed.bits:g}: {chosen}"


def _print_report(report: QuantReport, output: Path) -> None:
    from rich.console import Console
    from rich.table import Table

    from lmkit.quant.report.html import FILE_NAME, mean

    table = Table(title="relative squared error of each layer", title_justify="left")
    for column in ("layer", "RTN, mean of linears", "stored, mean of linears", "whole layer", "bits", "seconds"):
        table.add_column(column, justify="right")
    for layer in report.layers:
        errors = (mean(x.rtn_error for x in layer.linears), mean(x.error for x in layer.linears))
        bits = mean(x.bits for x in layer.linears)
        table.add_row(
            str(layer.index),
            *("dense" if error is None else f"{error:.5f}" for error in errors),
            f"{layer.error:.5f}",
            "-" if bits is None else f"{bits:.2f}",
            f"{layer.seconds:.1f}",
        )
    Console().print(table)
    if report.mixed_precision is not None:
        print(_bits_line(report.mixed_precision))
    for source in report.calibration.get("sources", ()):
        weight = "" if source["weight"] is None else f", weight {source['weight']:g}"
        digest = f"sha256 {source['sha256'][:12]}"
        print(f"calibration: {source['source']}{weight}: {source['documents']:,} documents, {digest}")
    saved = report.bytes_after / report.bytes_before
    memory = "" if report.peak_bytes is None else f", {report.peak_bytes / 2**30:.2f} GiB at the peak"
    print(f"{output}: {report.bytes_after:,} bytes of weights, {saved:.0%} of the source")
    print(f"{report.seconds:.1f} s{memory}; report: {output / FILE_NAME}")
    if report.evaluation is not None:
        print_result(report.evaluation)
