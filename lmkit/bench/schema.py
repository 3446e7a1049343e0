"""The JSON document of a benchmark; docs/bench.md describes it. No torch here."""

from __future__ import annotations

import datetime
import math
import os
import platform
from importlib import metadata
from pathlib import Path
from typing import Any, Literal

import msgspec

import lmkit
from lmkit.bench.metrics import Distribution, RequestRecord, Summary
from lmkit.environment import default_num_threads
from lmkit.errors import ConfigError

SCHEMA = "lmkit.bench/1"
Benchmark = Literal["throughput", "latency", "online", "agent"]
_PACKAGES = ("torch", "numba", "numpy", "tokenizers")


class ClientHealth(msgspec.Struct, frozen=True):
    """Figures that tell whether the load generator was the bottleneck."""

    cpu_share: float  # of one core, of this process
    loop_lag_ms: Distribution | None  # how late a timer of 5 ms fires; the time of any chunk may be as late
    arrival_lag_ms: Distribution | None  # how late requests were sent that only the clock held back
    is_bottleneck: bool  # cpu_share above 0.9, or 1 % of either lag above 10 ms


class OnlineRun(msgspec.Struct, frozen=True, kw_only=True):
    """One point of the sweep. A rate or a concurrency of null means no limit."""

    rate: float | None
    concurrency: int | None
    summary: Summary
    client: ClientHealth
    token_counts: dict[str, int]  # method of counting -> number of requests
    skipped_turns: int  # never sent, because an earlier turn of their conversation failed
    reused_prompts: int
    requests: list[RequestRecord] = []  # times in seconds from the run's start

    @property
    def label(self) -> str:
        parts = [f"{self.rate:g}/s"] if self.rate is not None else []
        parts += [f"{self.concurrency} at once"] if self.concurrency is not None else []
        return ", ".join(parts) or "all at once"


class ThroughputRun(msgspec.Struct, frozen=True, kw_only=True):
    """One pass over the conversations."""

    concurrency: int | None  # conversations in the engine at once; null = all
    summary: Summary
    steps: int  # of the engine
    preemptions: int
    draft_tokens: int = 0  # drafts of next tokens that were computed
    accepted_tokens: int = 0  # draft tokens among these that were right
    draft_tokens_per_step: float = 0.0  # new tokens of a sequence in a step with drafts of its next ones
    draft_seconds_saved: float = 0.0  # by draft tokens, against steps without; negative: lost
    skipped_turns: int  # never sent, because an earlier turn of their conversation failed
    requests: list[RequestRecord] = []  # times in seconds from the run's start

    @property
    def label(self) -> str:
        return "all at once" if self.concurrency is None else f"{self.concurrency} at once"


class StepProfile(msgspec.Struct, frozen=True, kw_only=True):
    """An average decode step in milliseconds: step = kernels + inputs_and_sampling + idle.

    `schedule` and `update` are the loop's. With overlap they run beside the step; without overlap they are part of
    `idle`. With several stages plans overlap, and `idle` is negative.
    """

    step: float  # from one result to the next
    kernels: float  # in the model
    inputs_and_sampling: float  # beside them, in the thread that executes steps
    idle: float  # no step is executed: the loop works, or hands over
    schedule: float
    update: float
    outside_kernels: float  # share of `step` in which no kernel runs
    # Share of the time of all stages in which they compute nothing. None: there is one, or their times are not known.
    bubble: float | None = None


class LatencyRun(msgspec.Struct, frozen=True, kw_only=True):
    """One shape, over its repeats."""

    batch_size: int
    input_len: int
    output_len: int
    repeats: int
    prefill_ms: Distribution
    prefill_tokens_per_s: float  # at the median
    decode_ms_per_token: Distribution | None  # one value for each repeat; None if answers have one token
    decode_tokens_per_s: float | None  # of the whole batch, at the median
    decode_step_ms: Distribution | None  # one value for each engine step of all repeats
    total_ms: Distribution
    decode_profile: StepProfile | None = None

    @property
    def label(self) -> str:
        return f"{self.batch_size} x {self.input_len} + {self.output_len}"


Run = OnlineRun | ThroughputRun | LatencyRun


def document(benchmark: Benchmark, configuration: dict[str, Any], runs: list[Any], *, requests: bool) -> dict[str, Any]:
    """The document as plain data.

    `runs` are of one kind. Without `requests`, the times of single requests are left out.
    """
    plain = [_finite(msgspec.to_builtins(run)) for run in runs]
    if not requests:
        for run in plain:
            run.pop("requests", None)
    return {
        "schema": SCHEMA,
        "benchmark": benchmark,
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "environment": environment(),
        "configuration": _finite(configuration),
        "runs": plain,
    }


def environment() -> dict[str, Any]:
    """Properties of the machine that ran the benchmark; for an online benchmark, of the client's machine."""
    return {
        "cpu": _cpu_name(),
        "cores": len(os.sched_getaffinity(0)),
        "threads": default_num_threads(),
        "platform": platform.platform(),
        "python": platform.python_version(),
        "packages": {"lmkit": lmkit.__version__} | {name: version for name in _PACKAGES if (version := _version(name))},
    }


def save(path: Path, value: dict[str, Any]) -> None:
    try:
        path.write_bytes(msgspec.json.format(msgspec.json.encode(value), indent=2) + b"\n")
    except OSError as error:
        raise ConfigError(f"{path}: cannot be written: {error.strerror}") from None


def check_writable(path: Path | None) -> None:
    """Check before a long measurement that `path` can be written. Raises ConfigError."""
    if path is not None and (path.is_dir() or not os.access(path.parent, os.W_OK)):
        raise ConfigError(f"{path}: cannot be written: its folder is not there, or not writable, or it is a folder")


def _cpu_name() -> str:
    info = Path("/proc/cpuinfo")
    lines = info.read_text().splitlines() if info.exists() else []
    return next((line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")), platform.machine())


def _version(package: str) -> str | None:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def _finite(value: Any) -> Any:
    """The value, or None for infinity, which JSON does not have."""
    if isinstance(value, dict):
        return {key: _finite(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value
