"""`lmkit quantize MODEL -o OUT`: quantized weights and a KV cache configuration by a recipe."""

from __future__ import annotations

import functools
from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from lmkit.cli.eval import print_result
from lmkit.cli.options import fields_of, sections_of, struct_of, takes
from lmkit.cli.progress import ProgressBar, duration
from lmkit.errors import ConfigError
from lmkit.quant.sections import BUNDLED_TEXT, CalibrationRecipe, KVRecipe, RunConfig, SchemeRecipe, WeightsRecipe

if TYPE_CHECKING:
    from lmkit.quant.recipe import Recipe
    from lmkit.quant.report.report import MixedPrecisionReport, QuantReport
    from lmkit.quant.run import Quantizer


OVERRIDES = functools.partial(fields_of, is_partial=True, shows_defaults=False)  # the recipe has the defaults


@takes(
    asked=sections_of(
        OVERRIDES(WeightsRecipe),
        scheme=OVERRIDES(SchemeRecipe),
        kv=OVERRIDES(KVRecipe),
        calibration=OVERRIDES(CalibrationRecipe),
    ),
    run=struct_of(RunConfig, "quantize"),
)
def quantize(
    model: Annotated[str, typer.Argument(help='A checkpoint folder, a .gguf file, or "demo".')],
    output: Annotated[Path, typer.Option("--output", "-o", help="Folder to write; it must not exist or be empty.")],
    recipe: Annotated[
        str | None,
        typer.Option(
            show_default="loss_w4a16_g128", help="A recipe's name, or a .yaml file. The other options override it."
        ),
    ] = None,
    weights: Annotated[
        Literal["none"] | None,
        typer.Option(
            rich_help_panel="Weights and KV cache",
            help="none: leave the weights as they are, and calibrate the KV cache alone.",
        ),
    ] = None,
    calibration: Annotated[
        list[str] | None,
        typer.Option(
            metavar="SOURCE[:WEIGHT]",
            rich_help_panel="Calibration",
            help="A preset, a .txt, .json(l) or .parquet file, a folder or hub:ORG/NAME; repeat it for more.",
        ),
    ] = None,
    json: Annotated[bool, typer.Option("--json", rich_help_panel="Run", help="Print the report as JSON.")] = False,
    *,
    asked: dict[str, Any],
    run: RunConfig,
) -> None:
    """Quantize a checkpoint by a recipe: its weights, and a configuration of its KV cache."""
    from lmkit.environment import default_num_threads, environment
    from lmkit.formats.atomic import refuse_occupied
    from lmkit.formats.known import remember
    from lmkit.kernels.cpu import threads
    from lmkit.models.merge import merged_beside
    from lmkit.quant.data.calibration import parse_source
    from lmkit.quant.data.comm import Comm
    from lmkit.quant.device import fits, resolve_device
    from lmkit.quant.report.evaluate import encode_text
    from lmkit.quant.run import prepare

    if calibration:
        asked["calibration"]["dataset"] = [parse_source(item) for item in calibration]
    chosen, loaded = _recipe(recipe, asked, keeps_weights=weights is not None)
    if run.time_budget is not None and "num_samples" in asked["calibration"]:
        raise ConfigError("--time-budget chooses the number of rows; leave out --num-samples")
    refuse_occupied(output)
    comm = Comm.launched()
    place = resolve_device(run.device, comm.rank % environment().local_world_size)
    threads.configure(default_num_threads())
    if run.merge_adapter is not None and comm.world_size > 1:
        raise ConfigError("--merge-adapter goes with one process; merge first: lmkit convert --merge-adapter")
    adapter = None if run.merge_adapter is None else Path(run.merge_adapter)
    with merged_beside(output, model, adapter) as source:
        quantizer = prepare(
            source, loaded, max_memory=run.max_memory, time_budget=run.time_budget, comm=comm, device=place
        )
        if calibration is None:
            _refuse_bundled_text(model, loaded)
        if not run.ignore_estimate:
            _check_machine(quantizer, output, evaluates=run.eval)
        quiet = json or not comm.is_first
        eval_ids = encode_text(quantizer.source.reader.path) if run.eval else None
        phases = {name: seconds for name, seconds in quantizer.plan.seconds.items() if run.eval or name != "evaluation"}
        if not quiet:
            _print_plan(model, chosen, quantizer, sum(phases.values()))
        with ProgressBar(quiet=quiet, phases=phases) as bar, fits(place):
            report = quantizer.run(output, eval_ids=eval_ids, restart=run.restart, progress=bar.update)
    comm.close()
    if not comm.is_first:
        return
    remember(output)
    if json:
        import msgspec

        print(msgspec.json.format(msgspec.json.encode(report), indent=2).decode())
    else:
        _print_report(report, output)


def _recipe(name: str | None, asked: dict[str, Any], *, keeps_weights: bool) -> tuple[str, Recipe]:
    """The recipe's name, and the recipe with what the options asked for. Raises ConfigError."""
    from lmkit.quant.recipe import EVERYTHING, KV_RECIPE, load_recipe, recipe_for

    scheme = asked["scheme"]
    given = [f"--{key.replace('_', '-')}" for key in (*asked, *scheme) if not isinstance(asked.get(key), dict)]
    if keeps_weights and given:
        raise ConfigError(f"--weights none leaves the weights as they are; leave out {', '.join(given)}")
    if "group_size" in scheme:
        asked["scheme"] = scheme | {"smaller_groups": False}  # exactly what was asked for
    if keeps_weights:
        asked["ignore"] = [EVERYTHING]
    chosen = name or (
        KV_RECIPE if keeps_weights else recipe_for(asked.get("format"), scheme.get("bits"), asked.get("average_bits"))
    )
    return chosen, load_recipe(chosen, asked)


def _refuse_bundled_text(model: str, recipe: Recipe) -> None:
    """Refuse the bundled text for any model but the one that it is like, unless the user names it."""
    from lmkit.formats.hub import DEMO, DEMO_FOLDER

    is_demo = model == DEMO or Path(model).resolve() == DEMO_FOLDER.resolve()
    if recipe.calibration.dataset == BUNDLED_TEXT and not is_demo:
        raise ConfigError(
            f"{model} needs --calibration: text like that it will see, from a .jsonl or .txt file, hub:ORG/NAME or a "
            f"preset (ultrachat, wikitext2, ...); --calibration {BUNDLED_TEXT} takes the demo model's"
        )


def _check_machine(quantizer: Quantizer, output: Path, *, evaluates: bool) -> None:
    """Refuse a run that this machine cannot hold by the estimate. An interrupted run has a part of its disk already."""
    import shutil

    from lmkit.environment import environment
    from lmkit.quant.budget import check_device, check_machine
    from lmkit.quant.data.workdir import WorkFolder
    from lmkit.turbo.host_memory import available_memory

    work = WorkFolder.beside(output).path
    there = next(folder for folder in work.parents if folder.exists())
    taken = sum(file.stat().st_size for file in work.rglob("*") if file.is_file())
    check_machine(
        quantizer.source,
        quantizer.budget,
        memory=available_memory() // environment().local_world_size,
        disk=shutil.disk_usage(there).free + taken,
        evaluates=evaluates,
    )
    check_device(quantizer.source, quantizer.budget, quantizer.device)


def _print_plan(model: str, chosen: str, quantizer: Quantizer, seconds: float) -> None:
    from lmkit.turbo.host_memory import gib

    recipe, plan, budget = quantizer.recipe, quantizer.plan, quantizer.budget
    calibration = recipe.calibration
    steps = ", ".join(step.name() for step in recipe.steps)
    print(f"{model}: recipe {chosen}: {steps}")
    grid = "as they are" if recipe.keeps_weights else f"{_scheme(recipe, plan.groups)}, format {recipe.format}"
    print(f"weights: {grid}; KV cache: {recipe.kv.bits} bits")
    rows = f"{calibration.num_samples} rows of {calibration.seq_len} tokens from {_sources(calibration)}"
    print(f"calibration: {rows if calibration.has_text else 'none, rounding to nearest needs no text'}")
    print(
        f"estimate: {gib(budget.memory_bytes)} of memory, {gib(budget.disk_bytes)} of disk, {duration(seconds)}; "
        f"batches of {budget.batch_tokens} tokens"
    )
    by_reason: dict[str, list[str]] = {}
    for module, reason in () if recipe.keeps_weights else plan.dense.items():
        by_reason.setdefault(reason, []).append(module)
    for reason, modules in by_reason.items():
        more = f" and {len(modules) - 1} more" if len(modules) > 1 else ""
        print(f"stays dense: {modules[0]}{more}: {reason}")


def _scheme(recipe: Recipe, groups: str) -> str:
    """`4 bits, groups of 128`, `8 bits, float, per block, activations float8`."""
    scheme = recipe.scheme
    parts = [f"{scheme.bits} bits", *([] if scheme.type == "int" else [scheme.type]), groups]
    parts += [] if recipe.activations == "none" else [f"activations {recipe.activations}"]
    parts += [] if recipe.average_bits is None else [f"or finer: {recipe.average_bits:g} bits on average"]
    return ", ".join(parts)


def _sources(calibration: CalibrationRecipe) -> str:
    entries = [calibration.dataset] if isinstance(calibration.dataset, str) else calibration.dataset
    return ", ".join(entry if isinstance(entry, str) else f"{entry.source}:{entry.weight:g}" for entry in entries)


def _bits_line(mixed: MixedPrecisionReport) -> str:
    counts = Counter(group.chosen for group in mixed.groups for _ in group.modules)
    chosen = ", ".join(f"{count} {name}" for name, count in sorted(counts.items()))
    return f"{mixed.reached:.3f} bits a weight of {mixed.bits:g}: {chosen}"


def _print_report(report: QuantReport, output: Path) -> None:
    from rich.console import Console
    from rich.table import Table

    from lmkit.quant.report.head_storage import head_line
    from lmkit.quant.report.html import FILE_NAME, mean

    title = "relative squared error of each layer: mean of its linears, rounded to nearest and as stored"
    table = Table(title=title, title_justify="left")
    for column in ("layer", "RTN", "stored", "whole layer", "bits", "seconds"):
        table.add_column(column, justify="right")
    for layer in report.layers:
        errors = (mean(x.rtn_error for x in layer.linears), mean(x.error for x in layer.linears))
        table.add_row(
            str(layer.index),
            *("dense" if error is None else f"{error:.5f}" for error in errors),
            "-" if layer.error is None else f"{layer.error:.5f}",
            "-" if layer.bits is None else f"{layer.bits:.2f}",
            f"{layer.seconds:.1f}",
        )
    Console(markup=False).print(table)
    if report.mixed_precision is not None:
        print(_bits_line(report.mixed_precision))
    for source in report.calibration.get("sources", ()):
        weight = "" if source["weight"] is None else f", weight {source['weight']:g}"
        digest = f"sha256 {source['sha256'][:12]}"
        print(f"calibration: {source['source']}{weight}: {source['documents']:,} documents, {digest}")
    if report.head is not None:
        print(head_line(report.head))
    saved = report.bytes_after / report.bytes_before
    memory = "" if report.peak_bytes is None else f", {report.peak_bytes / 2**30:.2f} GiB at the peak"
    bits = "" if report.bits is None else f"{report.bits:.2f} bits a weight in linears, "
    print(f"{output}: {bits}{report.bytes_after:,} bytes in all, {saved:.0%} of the source")
    print(f"{duration(report.seconds)}{memory}; report: {output / FILE_NAME}")
    if report.evaluation is not None:
        print_result(report.evaluation)
