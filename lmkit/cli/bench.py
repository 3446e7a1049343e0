"""`lmkit bench throughput | latency | online`: the speed of a model in this process or behind a server."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, TypeVar

import msgspec
import typer

from lmkit.bench.agent_config import AgentConfig
from lmkit.bench.config import OnlineConfig, WorkloadConfig, parse_goodput, parse_list
from lmkit.cli.options import fields_of, struct_of, takes
from lmkit.cli.progress import ProgressBar
from lmkit.cli.usage import Command
from lmkit.config import EngineConfig, parse
from lmkit.errors import JSON_ERRORS, ConfigError

if TYPE_CHECKING:
    from rich.table import Table

    from lmkit.bench.report import RequestRun
    from lmkit.bench.schema import Benchmark, OnlineRun, ThroughputRun
    from lmkit.text import Tokenizer
    from lmkit.turbo.engine.engine import Engine

R = TypeVar("R", "OnlineRun", "ThroughputRun")
app = typer.Typer(
    help="Measure the speed of a model in this process, or behind any OpenAI-compatible server.", no_args_is_help=True
)

Model = Annotated[str, typer.Argument(help='A checkpoint folder, a .gguf file, or "demo".')]
RESULTS = "Results"
Json = Annotated[
    Path | None,
    typer.Option(rich_help_panel=RESULTS, help="Write all figures, configuration and environment here."),
]
Plot = Annotated[
    Path | None,
    typer.Option(rich_help_panel=RESULTS, help="Draw throughput and latency: a .png, .svg or .pdf file."),
]
Requests = Annotated[
    bool,
    typer.Option("--requests", rich_help_panel=RESULTS, help="With --json: also the times of every request."),
]
Goodput = Annotated[
    str | None,
    typer.Option(rich_help_panel=RESULTS, help="Also count requests within limits in ms: ttft:500,tpot:50,e2e:9000."),
]
Price = Annotated[
    float | None,
    typer.Option(
        "--price-per-hour", rich_help_panel=RESULTS, min=0, help="Of the machine: adds the price of a million tokens."
    ),
]


ENGINE = struct_of(EngineConfig, "engine options")
AGENT = struct_of(AgentConfig, "bench agent")
WORKLOAD = struct_of(WorkloadConfig, "bench", group="Prompts")


def _online_config(url: str, rate: str, concurrency: str | None, extra_body: str, load: dict[str, Any]) -> OnlineConfig:
    try:
        body = msgspec.json.decode(extra_body, type=dict[str, Any])
    except JSON_ERRORS as error:
        raise ConfigError(f"--extra-body {extra_body!r}: expected a JSON object ({error})") from None
    rates = [None if math.isinf(r) else r for r in parse_list(rate, float, "--rate")]
    given = {"url": url, "rates": rates, "concurrencies": _limits(concurrency), "extra_body": body, **load}
    return parse(given, OnlineConfig, "bench online")


def _limits(concurrency: str | None) -> list[int | None]:
    return list(parse_list(concurrency, int, "--concurrency")) if concurrency else [None]


@dataclass(frozen=True)
class Output:
    """Where results go. A missing folder or a missing matplotlib is an error before anything is measured."""

    json: Path | None
    plot: Path | None
    requests: bool = False

    def save(self, benchmark: Benchmark, configuration: dict[str, Any], runs: Sequence[Any]) -> None:
        from lmkit.bench import schema

        if self.json is not None:
            schema.save(self.json, schema.document(benchmark, configuration, list(runs), requests=self.requests))


def output_options(json: Json = None, plot: Plot = None) -> Output:
    from lmkit.bench.plot import check_plot
    from lmkit.bench.schema import check_writable

    check_plot(plot)
    check_writable(json)
    check_writable(plot)
    return Output(json, plot)


def requests_output_options(json: Json = None, requests: Requests = False, plot: Plot = None) -> Output:
    if requests and json is None:
        raise ConfigError("--requests goes into the file of --json FILE")
    return replace(output_options(json, plot), requests=requests)


@app.command(cls=Command, short_help="The engine in this process, without a server.")
@takes(workload=WORKLOAD, output=requests_output_options, engine=ENGINE)
def throughput(
    model: Model,
    concurrency: Annotated[str | None, typer.Option(help="Conversations in the engine at once, e.g. 1,8,64.")] = None,
    ignore_eos: Annotated[bool, typer.Option(help="Answers have exactly the given length.")] = True,
    detokenize: Annotated[bool, typer.Option(help="Turn the tokens into text, as a pipeline does.")] = True,
    warmup: Annotated[int, typer.Option(min=0, help="Conversations computed first and not measured.")] = 2,
    goodput: Goodput = None,
    price: Price = None,
    *,
    workload: WorkloadConfig,
    output: Output,
    engine: EngineConfig,
) -> None:
    """Offline throughput: conversations through the engine in this process, without a server."""
    from lmkit.bench import plot
    from lmkit.bench.throughput import ThroughputBench, run_throughput
    from lmkit.bench.workload import make_workload

    limits = _limits(concurrency)
    targets = parse_goodput(goodput) if goodput else None
    path, tokenizer = _open(model)
    needed = msgspec.structs.replace(workload, num_prompts=workload.num_prompts + warmup)
    conversations = make_workload(needed, tokenizer, chat=False)
    loaded = _load(path, engine)
    bench = ThroughputBench(loaded, tokenizer, ignore_eos=ignore_eos, detokenize=detokenize)
    with ProgressBar(quiet=False) as bar:
        runs = run_throughput(bench, conversations, limits, warmup=warmup, targets=targets, progress=bar.update)
    runs = _priced(runs, price)
    _print_runs(f"{model}: throughput, offline", runs)
    configuration = {
        "model": model,
        "workload": workload,
        "concurrency": limits,
        "ignore_eos": ignore_eos,
        "detokenize": detokenize,
        "warmup": warmup,
        "goodput": targets,
        "engine": engine,
        "engine_info": loaded.info,
    }
    output.save("throughput", configuration, runs)
    if output.plot:
        plot.plot_requests(output.plot, f"{model}, offline", runs)


@app.command(cls=Command, short_help="Prefill and decode of static batches.")
@takes(output=output_options, engine=ENGINE)
def latency(
    model: Model,
    batch_size: Annotated[str, typer.Option(help="Sequences in a batch, e.g. 1,8,32.")] = "1,4,16",
    input_len: Annotated[str, typer.Option(help="Tokens of each prompt, e.g. 128,1024.")] = "128",
    output_len: Annotated[str, typer.Option(help="Tokens of each answer, e.g. 32,128.")] = "32",
    repeats: Annotated[int, typer.Option(min=1, help="Measured runs of each shape.")] = 5,
    warmup: Annotated[int, typer.Option(min=0, help="Runs of each shape before the measured ones.")] = 1,
    seed: Annotated[int, typer.Option(min=0, help="Seed of the random prompts.")] = 0,
    profile: Annotated[bool, typer.Option("--profile", help="Also show the parts of a decode step's time.")] = False,
    *,
    output: Output,
    engine: EngineConfig,
) -> None:
    """Static batches: time of the prefill, and of each token after it, for every size with every length."""
    from lmkit.bench import plot, report
    from lmkit.bench.latency import check, run_latency, shapes

    grid = shapes(
        parse_list(batch_size, int, "--batch-size"),
        parse_list(input_len, int, "--input-len"),
        parse_list(output_len, int, "--output-len"),
    )
    path, tokenizer = _open(model)
    loaded = _load(path, engine)
    for shape in grid:
        check(shape, engine, loaded.info)
    with ProgressBar(quiet=False, phases={str(shape): 1.0 for shape in grid}) as bar:
        runs = run_latency(loaded, tokenizer, grid, repeats=repeats, warmup=warmup, seed=seed, progress=bar.update)
    _print(report.latency_table(f"{model}: prefill and decode of static batches, medians (and range)", runs))
    if profile:
        _print(report.profile_table(f"{model}: milliseconds of a decode step, on average", runs))
    configuration = {"model": model, "repeats": repeats, "warmup": warmup, "seed": seed}
    output.save("latency", configuration | {"engine": engine, "engine_info": loaded.info}, runs)
    if output.plot:
        plot.plot_latency(output.plot, f"{model}, static batches", runs)


@app.command(cls=Command, short_help="Load on any OpenAI-compatible server.")
@takes(load=fields_of(OnlineConfig), workload=WORKLOAD, output=requests_output_options)
def online(
    url: Annotated[str, typer.Argument(help="http://HOST:PORT of a server or proxy.")] = "http://127.0.0.1:8000",
    rate: Annotated[str, typer.Option(help="Conversations that arrive per second, e.g. 0.5,2,8 or inf.")] = "inf",
    concurrency: Annotated[
        str | None, typer.Option(help="Conversations at once, e.g. 1,4,16. Default: no limit.")
    ] = None,
    goodput: Goodput = None,
    price: Price = None,
    api_key: Annotated[str | None, typer.Option(help="Default LMKIT_API_KEY.")] = None,
    extra_body: Annotated[str, typer.Option(help="JSON object of more fields for every request.")] = "{}",
    *,
    load: dict[str, Any],
    workload: WorkloadConfig,
    output: Output,
) -> None:
    """Load on any OpenAI-compatible server: a rate of arrivals, a concurrency, and sweeps of both."""
    import asyncio

    from lmkit.bench import plot
    from lmkit.bench.online import measure
    from lmkit.environment import environment

    config = _online_config(url, rate, concurrency, extra_body, load)
    targets = parse_goodput(goodput) if goodput else None
    key = api_key or environment().api_key
    with ProgressBar(quiet=False) as bar:
        found = asyncio.run(measure(config, workload, api_key=key, targets=targets, progress=bar.update))
    title = f"{found.model} at {config.url}, {config.endpoint}"
    runs = _priced(found.runs, price)
    _print_runs(title, runs)
    configuration = {
        "server": config,
        "model": found.model,
        "features": found.features,
        "workload": workload,
        "goodput": targets,
    }
    output.save("online", configuration, runs)
    if output.plot:
        plot.plot_requests(output.plot, title, runs)


@app.command(cls=Command, short_help="Agents on any OpenAI-compatible server.")
@takes(config=AGENT, output=requests_output_options)
def agent(
    trace: Annotated[
        Path | None, typer.Argument(help="A Mooncake, AIPerf or AgentX trace: a file, or a folder of files.")
    ] = None,
    synthetic: Annotated[bool, typer.Option("--synthetic", help="Made-up agents in place of a trace.")] = False,
    api_key: Annotated[str | None, typer.Option(help="Default LMKIT_API_KEY.")] = None,
    *,
    config: AgentConfig,
    output: Output,
) -> None:
    """Agents: conversations that grow by results of tools, with sub-agents, from a trace or made up."""
    import asyncio

    from lmkit.bench import report
    from lmkit.bench.agent import measure_agents
    from lmkit.bench.agent import synthetic as made_up
    from lmkit.bench.agent_trace import read_agent_trace
    from lmkit.environment import environment

    if (trace is None) is not synthetic:
        raise ConfigError("name a TRACE, or say --synthetic for made-up agents")
    if output.plot:
        raise ConfigError("--plot: it draws online, throughput and latency")
    sessions = read_agent_trace(trace) if trace is not None else made_up(config)
    key = api_key or environment().api_key
    with ProgressBar(quiet=False) as bar:
        model, run = asyncio.run(measure_agents(config, sessions, api_key=key, progress=bar.update))
    _print(report.agent_table(f"{model} at {config.url}, agents", run))
    for note in report.agent_notes(run):
        print(note)
    output.save("agent", {"server": config, "model": model, "trace": str(trace) if trace else None}, [run])


def _open(model: str) -> tuple[Path, Tokenizer]:
    from lmkit.formats.hub import resolve_model_path
    from lmkit.text import Tokenizer

    path = resolve_model_path(model)
    return path, Tokenizer.from_pretrained(path)


def _load(path: Path, config: EngineConfig) -> Engine:
    if config.chat_template is not None:
        raise ConfigError("--chat-template: a benchmark's prompts are no chats")
    from lmkit.turbo.engine.engine import Engine

    return Engine(str(path), config)


def _priced(runs: Sequence[R], per_hour: float | None) -> list[R]:
    """`runs` with the price of their tokens, if the machine has one."""
    from lmkit.bench.metrics import priced

    if per_hour is None:
        return list(runs)
    return [msgspec.structs.replace(run, summary=priced(run.summary, per_hour)) for run in runs]


def _print(table: Table) -> None:
    from rich.console import Console

    Console(markup=False).print(table)


def _print_runs(title: str, runs: Sequence[RequestRun]) -> None:
    """Tables of as many runs side by side as the terminal holds, then notes."""
    from rich.console import Console

    from lmkit.bench import report

    console, unlimited = Console(markup=False), Console(width=10_000, markup=False)
    left = list(runs)
    while left:
        widths = (unlimited.measure(report.request_table("", left[:n])).maximum for n in range(1, len(left) + 1))
        count = max(1, sum(width <= console.width for width in widths))
        console.print(report.request_table(title, left[:count]))
        left = left[count:]
    for note in report.notes(runs):
        print(note)
