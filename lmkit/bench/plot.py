"""Plots of the runs. matplotlib is optional: `pip install 'lmkit[bench]'`."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from lmkit.bench.metrics import Distribution
from lmkit.bench.schema import LatencyRun, OnlineRun, ThroughputRun
from lmkit.errors import ConfigError
from lmkit.extras import needed_for

FORMATS = (".png", ".svg", ".pdf")


def check_plot(path: Path | None) -> None:
    """Check the format before a measurement.

    Raises ConfigError for another format, UnsupportedError without matplotlib.
    """
    if path is None:
        return
    if path.suffix not in FORMATS:
        raise ConfigError(f"{path}: a plot is a file of {', '.join(FORMATS)}")
    with needed_for("--plot"):
        import matplotlib  # noqa: F401


def plot_requests(path: Path, title: str, runs: Sequence[OnlineRun] | Sequence[ThroughputRun]) -> None:
    """Throughput and latency over the sweep, and the distributions of TTFT and inter-token times of each run."""
    figure, ((rate, latency), (ttft, itl)) = _figure(title)
    labels = [run.label for run in runs]
    rate.plot(labels, [run.summary.output_tokens_per_s for run in runs], "o-")
    rate.set(title="throughput", xlabel="run", ylabel="output tokens/s")
    throughputs = [run.summary.output_tokens_per_s for run in runs]
    for name, pick in (("p50", lambda d: d.p50), ("p90", lambda d: d.p90), ("p99", lambda d: d.p99)):
        latency.plot(throughputs, [_of(run.summary.tpot_ms, pick) for run in runs], "o-", label=name)
    latency.set(title="latency against throughput", xlabel="output tokens/s", ylabel="TPOT, ms")
    for run in runs:
        done = [record for record in run.requests if record.measured and record.error is None]
        _cdf(ttft, run.label, (1e3 * record.ttft for record in done))
        _cdf(itl, run.label, (1e3 * seconds for record in done for seconds in record.intervals()))
    ttft.set(title="time to first token", xlabel="ms", ylabel="share of requests")
    itl.set(title="inter-token time", xlabel="ms", ylabel="share of tokens")
    for axes in (latency, ttft, itl):
        axes.set_xlim(left=0)
    _save(figure, path)


def plot_latency(path: Path, title: str, runs: Sequence[LatencyRun]) -> None:
    """Prefill and decode over the batch size, a line for each pair of lengths."""
    figure, ((prefill, decode), (prefill_rate, decode_rate)) = _figure(title)
    for lengths in dict.fromkeys((run.input_len, run.output_len) for run in runs):
        chosen = [run for run in runs if (run.input_len, run.output_len) == lengths]
        sizes, label = [run.batch_size for run in chosen], f"{lengths[0]} + {lengths[1]}"
        prefill.plot(sizes, [run.prefill_ms.p50 for run in chosen], "o-", label=label)
        decode.plot(sizes, [_of(run.decode_ms_per_token, lambda d: d.p50) for run in chosen], "o-", label=label)
        prefill_rate.plot(sizes, [run.prefill_tokens_per_s for run in chosen], "o-", label=label)
        decode_rate.plot(sizes, [run.decode_tokens_per_s or np.nan for run in chosen], "o-", label=label)
    for axes, name, unit in (
        (prefill, "prefill", "ms"),
        (decode, "decode", "ms per token"),
        (prefill_rate, "prefill", "tokens/s"),
        (decode_rate, "decode", "tokens/s"),
    ):
        axes.set(title=name, xlabel="batch size", ylabel=unit, xlim=(0, None))
    _save(figure, path)


def _figure(title: str) -> tuple[Any, Any]:
    from matplotlib.figure import Figure  # without pyplot: it has global state and needs a window system

    figure = Figure(figsize=(13, 8), layout="constrained")
    figure.suptitle(title)
    return figure, figure.subplots(2, 2)


def _cdf(axes: Any, label: str, values: Iterable[float]) -> None:
    data = np.sort(np.fromiter(values, dtype=np.float64))
    if data.size:
        axes.step(data, np.arange(1, len(data) + 1) / len(data), where="post", label=label)


def _of(values: Distribution | None, pick: Callable[[Distribution], float]) -> float:
    return float("nan") if values is None else pick(values)


def _save(figure: Any, path: Path) -> None:
    for axes in figure.axes:
        axes.grid(alpha=0.3)
        axes.set_ylim(bottom=0)
        if axes.get_legend_handles_labels()[0]:
            axes.legend(fontsize="small", loc="upper left", bbox_to_anchor=(1, 1))  # beside the data
    try:
        figure.savefig(path, dpi=120)
    except OSError as error:
        raise ConfigError(f"{path}: cannot be written: {error.strerror}") from None
