"""Runs as a table: a column for each run, a row for each figure, and notes for the reader."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from rich.box import SIMPLE_HEAD
from rich.table import Table
from rich.text import Text

from lmkit.bench.agent import AgentRun
from lmkit.bench.metrics import Distribution, Summary
from lmkit.bench.schema import LatencyRun, OnlineRun, ThroughputRun

RequestRun = OnlineRun | ThroughputRun
Rows = Sequence[tuple[str, Callable[[Summary], str]]]


def spread(values: Distribution | None) -> str:
    return "-" if values is None else " / ".join(map(_short, (values.p50, values.p90, values.p99)))


def _short(value: float) -> str:
    return f"{value:,.1f}" if value < 100 else f"{value:,.0f}"


def _ratio(value: float | None) -> str:
    return "-" if value is None else f"{value:,.2f}"


def _money(value: float | None) -> str:
    return "-" if value is None else f"{value:,.3g}" if value < 1000 else f"{value:,.0f}"


def _goodput(summary: Summary) -> str:
    good = summary.goodput
    return "-" if good is None else f"{good.requests_per_s:,.2f} ({good.share:.0%})"


_FIGURES: Rows = (
    ("answered", lambda s: f"{s.num_completed:,}"),
    ("failed", lambda s: f"{s.num_requests - s.num_completed:,}"),
    ("run, s", lambda s: f"{s.seconds:,.1f}"),
    ("requests/s", lambda s: f"{s.requests_per_s:,.2f}"),
    ("prompt tokens/s", lambda s: f"{s.prompt_tokens_per_s:,.0f}" if s.prompt_tokens else "unknown"),
    ("output tokens/s", lambda s: f"{s.output_tokens_per_s:,.0f}"),
    ("total tokens/s", lambda s: f"{s.total_tokens_per_s:,.0f}"),
    ("mean in flight", lambda s: f"{s.mean_concurrency:,.1f}"),
)
_PRICES: Rows = (
    ("price of 1M output tokens", lambda s: _money(s.price.per_million_output if s.price else None)),
    ("price of 1M tokens, prompts too", lambda s: _money(s.price.per_million_total if s.price else None)),
)
_LATENCIES: Rows = (
    ("TTFT", lambda s: spread(s.ttft_ms)),
    ("TPOT", lambda s: spread(s.tpot_ms)),
    ("inter-token", lambda s: spread(s.itl_ms)),
    ("burst gap", lambda s: spread(s.burst_gap_ms)),
    ("end to end", lambda s: spread(s.e2e_ms)),
)


def request_table(title: str, runs: Sequence[RequestRun]) -> Table:
    """The table of throughput and online runs."""
    table = Table(title=title, title_justify="left")
    table.add_column("")
    for run in runs:
        table.add_column(run.label, justify="right")
    summaries = [run.summary for run in runs]

    def add(rows: Rows) -> None:
        for name, figure in rows:
            table.add_row(name, *map(figure, summaries))

    add(_FIGURES)
    if any(summary.goodput for summary in summaries):
        add([("good req/s", _goodput)])
    if any(summary.price for summary in summaries):
        add(_PRICES)
    add([("tokens/burst", lambda s: _ratio(s.tokens_per_burst))])
    table.add_section()
    table.add_row(*(Text(text, "dim") for text in ["milliseconds", *["p50 / p90 / p99"] * len(runs)]))
    add(_LATENCIES)
    if any(isinstance(run, OnlineRun) for run in runs):
        add([("wait to send", lambda s: spread(s.wait_ms))])
    return table


def agent_table(title: str, run: AgentRun) -> Table:
    """A row for the turns at each depth of the conversations, and one for all."""
    table = _narrow(title)
    for name in ("turns", "requests", "prompt tokens", "cached", "TTFT, ms: p50 / p90 / p99"):
        table.add_column(name, justify="right")
    for row in run.turns:
        depth = f"{row.first}" if row.first == row.last else f"{row.first}-{row.last}"
        prompt, cached = f"{row.prompt_tokens:,.0f}", _share(row.cached_share)
        table.add_row(depth, f"{row.requests:,}", prompt, cached, spread(row.ttft_ms))
    return table


def agent_notes(run: AgentRun) -> list[str]:
    """Of all turns together."""
    done = sum(row.requests for row in run.turns)
    seconds = max(run.seconds, 1e-9)
    pace = f"{run.output_tokens / seconds:,.0f} output and {run.prompt_tokens / seconds:,.0f} prompt tokens/s"
    agents = f"{run.agents} agents and {run.subagents} sub-agents"
    failed = [request.error for request in run.requests if request.error]
    lines = [f"{agents}, {done} turns in {run.seconds:,.1f} s: {pace}; cached: {_share(run.cached_share)}"]
    return lines + ([f"{run.failed} turns failed, and ended their agents; the first: {failed[0]}"] if failed else [])


def _share(value: float | None) -> str:
    return "unknown" if value is None else f"{value:.1%}"


def latency_table(title: str, runs: Sequence[LatencyRun]) -> Table:
    """A row for each shape: medians, and in brackets the spread of the repeats."""
    table = _narrow(title)
    for column in ("batch", "in", "out", "prefill ms", "tok/s", "ms/token", "tok/s", "total ms"):
        table.add_column(column, justify="right", no_wrap=True)
    for run in runs:
        rates = (
            f"{run.prefill_tokens_per_s:,.0f}",
            f"{run.decode_tokens_per_s:,.0f}" if run.decode_tokens_per_s else "-",
        )
        table.add_row(
            str(run.batch_size),
            str(run.input_len),
            str(run.output_len),
            _median(run.prefill_ms),
            rates[0],
            _median(run.decode_ms_per_token),
            rates[1],
            _median(run.total_ms),
        )
    return table


def profile_table(title: str, runs: Sequence[LatencyRun]) -> Table:
    """A row for each shape: the parts of an average decode step in milliseconds. Several stages have a bubble."""
    table = _narrow(title)
    stages = any(run.decode_profile is not None and run.decode_profile.bubble is not None for run in runs)
    parts = ("kernels", "inputs,\nsampling", "idle", "schedule", "update")
    for column in ("batch", "in", "step", *parts, "bubble" if stages else "outside\nkernels"):
        table.add_column(column, justify="right", no_wrap=True)
    for run in runs:
        if (profile := run.decode_profile) is not None:
            thread = (profile.kernels, profile.inputs_and_sampling, profile.idle)  # these add up to the step
            loop = (profile.schedule, profile.update)
            shown = (f"{milliseconds:.3f}" for milliseconds in (profile.step, *thread, *loop))
            share = profile.outside_kernels if profile.bubble is None else profile.bubble
            table.add_row(str(run.batch_size), str(run.input_len), *shown, f"{share:.1%}")
    return table


def _narrow(title: str) -> Table:
    """A table without lines between its columns, so that eight of them fit 80 characters."""
    return Table(title=title, title_justify="left", box=SIMPLE_HEAD, pad_edge=False, padding=(0, 1, 0, 0))


def _median(values: Distribution | None) -> str:
    """Three digits or more, and the spread of the repeats."""
    if values is None:
        return "-"
    digits = 2 if values.p50 < 10 else 1 if values.p50 < 100 else 0
    return f"{values.p50:,.{digits}f} ({(values.max - values.min) / values.p50:.0%})"


def notes(runs: Sequence[RequestRun]) -> list[str]:
    """Notes that explain the figures, one line each."""
    by_run = [_notes(run) for run in runs]
    common = [line for line in by_run[0] if all(line in lines for lines in by_run)]
    own = [
        f"{run.label}: {line}" for run, lines in zip(runs, by_run, strict=True) for line in lines if line not in common
    ]
    return [*common, *own]


def _notes(run: RequestRun) -> list[str]:
    summary, lines = run.summary, []
    if summary.errors:
        kinds = ", ".join(f"{count} {kind}" for kind, count in summary.errors.items())
        first = next(r for r in run.requests if r.measured and r.error is not None)
        lines.append(f"failed: {kinds}; the first: {first.message or first.error}")
    if run.skipped_turns:
        lines.append(f"{run.skipped_turns} turns were not sent: an earlier turn of their conversation failed")
    if summary.num_off_length:
        lines.append(f"{summary.num_off_length} answers have another length than was asked for")
    return lines + (_online_notes(run) if isinstance(run, OnlineRun) else _offline_notes(run))


def _online_notes(run: OnlineRun) -> list[str]:
    lines = []
    if run.token_counts.keys() & {"tokenizer", "chunks"}:
        how = "by splitting the text" if "tokenizer" in run.token_counts else "as if all chunks had the same number"
        lines.append(f"tokens of a chunk are estimates: the server does not tell, so they were counted {how}")
    if run.reused_prompts:
        lines.append(f"{run.reused_prompts} conversations were sent again; a server's prefix cache may have known them")
    client = run.client
    lag = f"{client.loop_lag_ms.p99:.1f} ms" if client.loop_lag_ms else "unknown"
    state = "TOO BUSY, the figures include its own delays" if client.is_bottleneck else "kept up"
    lines.append(f"client: {state} (lag p99 {lag}, {client.cpu_share:.0%} of a core)")
    return lines


def _offline_notes(run: ThroughputRun) -> list[str]:
    lines = [f"{run.preemptions} preemptions: the KV cache was too small for the batch"] if run.preemptions else []
    if run.draft_tokens:
        right = f"{run.accepted_tokens} of {run.draft_tokens} drafts of next tokens were right"
        saved = f"{'saved' if run.draft_seconds_saved >= 0 else 'lost'} {abs(run.draft_seconds_saved):.2f} s"
        lines.append(f"{right}: {run.draft_tokens_per_step:.2f} tokens of a sequence in a step with drafts, {saved}")
    return lines
