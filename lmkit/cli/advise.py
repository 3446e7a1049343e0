"""`lmkit advise TRACE|URL`: what requests contain, and which settings meet a latency target."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, get_args

import typer

from lmkit.errors import ConfigError

if TYPE_CHECKING:
    from lmkit.advise.costs import CostFile
    from lmkit.advise.describe import Description
    from lmkit.advise.settings import Advice, Latencies
    from lmkit.advise.trace import Trace

KINDS = {
    "benchmark": "a benchmark's requests",
    "log": "an access log",
    "agents": "turns of agents",
    "batch": "a batch's requests",
    "dataset": "a data set",
    "server": "drawn from a server's histograms",
}
TARGETS, COSTS, TRIED = "Targets", "Step costs", "Settings to try"
NUM_REQUESTS = 500
URL = ("http://", "https://")
# Options that have a use with step costs alone, and of these those that also draw a server's requests.
WITH_COSTS = ("ttft", "itl", "percentile", "kv_dtype", "max_batch_size", "replicas", "rate", "num_requests", "seed")
OF_URL = ("num_requests", "seed")
WITH_MODEL = ("num_threads", "seconds")


def advise(
    context: typer.Context,
    trace: Annotated[
        str,
        typer.Argument(
            metavar="TRACE|URL",
            help="Figures of lmkit bench, an access log in JSON, a trace of agents, a batch, a data set, "
            "or http://HOST:PORT of a server.",
        ),
    ],
    tokenizer: Annotated[
        str | None, typer.Option(help="For a batch or a data set: the model's folder or Hub name.")
    ] = None,
    kv_tokens: Annotated[
        str | None, typer.Option(help="Sizes of a prefix cache in tokens, for example 20000,100000.")
    ] = None,
    served_model: Annotated[str | None, typer.Option(help="For a URL: the name of one of several models.")] = None,
    json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
    ttft: Annotated[
        float | None, typer.Option(min=0.001, rich_help_panel=TARGETS, help="Milliseconds to the first token.")
    ] = None,
    itl: Annotated[
        float | None, typer.Option(min=0.001, rich_help_panel=TARGETS, help="Milliseconds between two tokens.")
    ] = None,
    percentile: Annotated[
        float, typer.Option(min=1, max=100, rich_help_panel=TARGETS, help="Which must meet them.")
    ] = 95.0,
    model: Annotated[
        str | None,
        typer.Option(rich_help_panel=COSTS, help='Measure the steps of this checkpoint here, or of "demo".'),
    ] = None,
    costs: Annotated[
        Path | None, typer.Option(rich_help_panel=COSTS, help="The file of step costs; --model writes it.")
    ] = None,
    num_threads: Annotated[
        int | None, typer.Option(min=1, rich_help_panel=COSTS, help="With --model: threads of the engine.")
    ] = None,
    seconds: Annotated[
        float, typer.Option(min=1, rich_help_panel=COSTS, help="With --model: for each KV type, about.")
    ] = 30.0,
    kv_dtype: Annotated[
        str | None, typer.Option(rich_help_panel=TRIED, help="KV types. Default: auto with --model, else the file's.")
    ] = None,
    max_batch_size: Annotated[str, typer.Option(rich_help_panel=TRIED, help="Sequences in one step.")] = "4,16,64",
    replicas: Annotated[str, typer.Option(rich_help_panel=TRIED, help="Machines, each with the model.")] = "1,2,4",
    rate: Annotated[
        float | None, typer.Option(rich_help_panel=TRIED, help="Requests a second. Default: as in the trace.")
    ] = None,
    num_requests: Annotated[
        int, typer.Option(min=1, rich_help_panel=TRIED, help="The first so many requests are simulated.")
    ] = NUM_REQUESTS,
    seed: Annotated[int, typer.Option(min=0, rich_help_panel=TRIED, help="Of drawn prompts and arrivals.")] = 0,
) -> None:
    """Show what requests contain, and with step costs which settings meet a latency target."""
    import msgspec

    from lmkit.advise.describe import describe
    from lmkit.bench.config import parse_list
    from lmkit.devices import CPU

    if rate is not None and rate <= 0:
        raise ConfigError(f"--rate {rate:g}: must be above zero")
    sizes = sorted(set(parse_list(kv_tokens, int, "--kv-tokens"))) if kv_tokens is not None else []
    tried = {
        "batches": sorted(set(parse_list(max_batch_size, int, "--max-batch-size"))),
        "replicas": sorted(set(parse_list(replicas, int, "--replicas"))),
    }
    _check_use(context, is_url=trace.startswith(URL))
    read = _read(trace, tokenizer, served_model, num_requests, seed)
    if sizes and not any(request.prompt is not None for request in read.requests):
        raise ConfigError(f"{trace}: has no prompts, so --kv-tokens has no use")
    description = describe(read, kv_tokens=sizes, block_size=CPU.block_size)
    advice = None
    if model is not None or costs is not None:
        from lmkit.advise.settings import Targets
        from lmkit.advise.settings import measured as measured_by
        from lmkit.advise.workload import requests_of

        requests = requests_of(read, rate=rate, limit=num_requests, seed=seed)
        types = kv_dtype.split(",") if kv_dtype is not None else None
        step_costs = _costs(model, costs, types, max(tried["batches"]), num_threads, seconds, seed)
        advice = _advise(requests, read, step_costs, Targets(ttft, itl, percentile), tried, seed)
    if json:
        found = msgspec.to_builtins(description) | ({} if advice is None else {"advice": msgspec.to_builtins(advice)})
        print(msgspec.json.format(msgspec.json.encode(found)).decode())
        return
    _print(description)
    if advice is not None:
        _print_advice(advice, step_costs, measured_by(read, percentile))


def _check_use(context: typer.Context, *, is_url: bool) -> None:
    """Raise ConfigError for an option that nothing would read."""

    def is_given(name: str) -> bool:
        source = context.get_parameter_source(name)
        return source is not None and source.name != "DEFAULT"

    if not (is_given("model") or is_given("costs")):
        for name in WITH_COSTS:
            if is_given(name) and not (is_url and name in OF_URL):
                option = "--" + name.replace("_", "-")
                raise ConfigError(f"{option} needs step costs: measure them with --model MODEL, or name --costs FILE")
    if not is_given("model"):
        for name in WITH_MODEL:
            if is_given(name):
                raise ConfigError(f"--{name.replace('_', '-')} is for a measurement, with --model MODEL")


def _read(trace: str, tokenizer: str | None, served_model: str | None, num_requests: int, seed: int) -> Trace:
    from lmkit.advise.server import read_server
    from lmkit.advise.trace import read_trace
    from lmkit.formats.hub import resolve_model_path
    from lmkit.text import Tokenizer

    if trace.startswith(URL):
        if tokenizer is not None:
            raise ConfigError("--tokenizer: a server tells lengths, not prompts")
        return read_server(trace, num_requests=num_requests, model=served_model, seed=seed)
    if served_model is not None:
        raise ConfigError("--served-model is for the URL of a server")
    found = Tokenizer.from_pretrained(resolve_model_path(tokenizer, weights=False)) if tokenizer else None
    return read_trace(Path(trace), found)


def _costs(
    model: str | None,
    file: Path | None,
    kv_dtypes: list[str] | None,
    batch: int,
    num_threads: int | None,
    seconds: float,
    seed: int,
) -> CostFile:
    """The costs of the file, or with `model` those that are measured now."""
    import msgspec

    from lmkit.advise.costs import read_costs, write_costs

    if model is None:
        assert file is not None
        found = read_costs(file)
        if missing := [name for name in kv_dtypes or () if name not in found.types]:
            raise ConfigError(f"{file}: has no costs of KV type {missing[0]}; measure it with --model MODEL --kv-dtype")
        chosen = {name: found.types[name] for name in kv_dtypes or found.types}
        return msgspec.structs.replace(found, types=chosen)

    from lmkit.bench.schema import check_writable
    from lmkit.cli.progress import ProgressBar
    from lmkit.config import EngineConfig, KVStorageName, parse

    check_writable(file)
    if wrong := [name for name in kv_dtypes or () if name not in get_args(KVStorageName)]:
        raise ConfigError(f"--kv-dtype {wrong[0]!r}: choose from {', '.join(get_args(KVStorageName))}")
    given = {"max_batch_size": batch, "num_threads": num_threads}
    configs = {name: parse(given | {"kv_dtype": name}, EngineConfig, "lmkit advise") for name in kv_dtypes or ["auto"]}

    from lmkit.advise.measure import measure_all

    options = {} if num_threads is None else {"num-threads": str(num_threads)}
    with ProgressBar(quiet=False) as bar:
        found = measure_all(model, configs, options, seconds=seconds, seed=seed, progress=bar.update)
    if file is not None:
        write_costs(file, found)
    return found


def _advise(
    requests: Sequence[Any], trace: Trace, costs: CostFile, targets: Any, tried: dict[str, Any], seed: int
) -> Advice:
    from lmkit.advise.settings import advise as advise_settings
    from lmkit.advise.workload import has_shared_prefixes
    from lmkit.cli.progress import ProgressBar

    caches = (True, False) if has_shared_prefixes(trace) else (True,)
    with ProgressBar(quiet=False) as bar:
        return advise_settings(requests, costs, targets, caches=caches, seed=seed, progress=bar.update, **tried)


def _print(description: Description) -> None:
    from lmkit.cli.table import print_table

    d = description
    rows = [("trace", KINDS[d.kind]), ("requests", f"{d.requests:,}"), ("failed", f"{d.failed:,}")]
    rows += [("left out", f"{d.left_out:,}")] * bool(d.left_out)
    if (a := d.arrivals) is not None:
        rows += [
            ("arrivals, s", f"{a.seconds:,.1f}"),
            ("requests/s", _number(a.requests_per_s)),
            ("burstiness", "-" if a.interval_cv is None else f"CV {a.interval_cv:.2f} of intervals (Poisson 1)"),
        ]
        if a.max_concurrency is not None:
            rows.append(("in flight", f"mean {_number(a.mean_concurrency)}, most {a.max_concurrency:,}"))
    if d.served_from_cache is not None:
        rows.append(("from the cache", f"{d.served_from_cache:.1%} of prompt tokens"))
    for row in d.prefix_cache:
        size = "unlimited" if row.kv_tokens is None else f"{row.kv_tokens:,} tokens"
        rows.append(("a prefix cache", f"would serve {row.share:.1%} of prompt tokens ({size})"))
    width = max(len(name) for name, _ in rows)
    for name, value in rows:
        print(f"{name.ljust(width)}  {value}")
    lengths = [("prompts", d.prompt_tokens), ("answers", d.output_tokens), ("their limits", d.max_tokens)]
    shown = [
        (name, *(f"{value:,.0f}" for value in (spread.mean, spread.p50, spread.p90, spread.p99, spread.max)))
        for name, spread in lengths
        if spread is not None
    ]
    if shown:
        print()
        figures = ("mean", "p50", "p90", "p99", "most")
        print_table(("tokens", *figures), shown, right=figures)


def _print_advice(advice: Advice, costs: CostFile, seen: Latencies | None) -> None:
    """`seen`: what the clients of the trace saw."""
    from lmkit.cli.table import print_table

    targets, percent = advice.targets, f"p{advice.targets.percent:g}"
    has_targets = targets.ttft_ms is not None or targets.itl_ms is not None
    errors = ", ".join(f"{name} {entry.error:.0%}" for name, entry in costs.types.items())
    print(f"\n{costs.model}: {advice.requests:,} requests simulated, times in ms; median error of a step: {errors}\n")
    rows = [] if seen is None else [("measured", "", "", "", *_latencies(seen), "", "", "", "")]
    for one in advice.tried:
        setting = (str(one.replicas), one.kv_dtype, "on" if one.prefix_cache else "off", str(one.max_batch_size))
        rest = (f"{one.queue:,.1f}", f"{one.tokens_per_s:,.0f}", str(one.refused or ""))
        rows.append((*setting, *_latencies(one), *rest, ("yes" if one.is_met else "no") if has_targets else ""))
    times = ("TTFT p50", percent, "ITL p50", percent, "queue", "tokens/s", "refused")
    print_table(("replicas", "KV", "cache", "batch", *times, "met"), rows, right=("replicas", "batch", *times))
    print()
    if max(one.max_batch_size for one in advice.tried) > costs.largest_batch:
        print(f"Costs were measured up to {costs.largest_batch} sequences; those of larger batches are extended.")
    if not has_targets:
        return
    wanted = [f"{name} {value:g} ms" for name, value in (("TTFT", targets.ttft_ms), ("ITL", targets.itl_ms)) if value]
    if advice.best is None or advice.command is None:
        nearest = min(advice.tried, key=lambda one: one.strain)
        print(
            f"No setting meets {' and '.join(wanted)} at {percent}: the nearest ({nearest.replicas} replicas, batch "
            f"{nearest.max_batch_size}) has {nearest.ttft:,.1f} and {nearest.itl:,.1f} ms."
        )
    elif advice.best.replicas == 1:
        print(f"Meets {' and '.join(wanted)} at {percent}:\n  {advice.command}")
    else:
        count = advice.best.replicas
        print(f"Meets {' and '.join(wanted)} at {percent}, on each of {count} machines:\n  {advice.command}")
        nodes = " ".join(f"--node http://MACHINE{i + 1}:8000" for i in range(count))
        print(f"and in front of them:\n  lmkit proxy {nodes}")


def _latencies(latencies: Latencies) -> list[str]:
    return [f"{value:,.1f}" for value in (latencies.ttft_p50, latencies.ttft, latencies.itl_p50, latencies.itl)]


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:,.2f}"
