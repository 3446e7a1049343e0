"""Tries settings in the simulation and finds the cheapest that meets the targets."""

from __future__ import annotations

import itertools
import shlex
from collections.abc import Sequence

import msgspec

from lmkit.advise.costs import CostFile
from lmkit.advise.simulate import Asked, Outcome, Setting, Simulation, percentile
from lmkit.advise.trace import Trace
from lmkit.bench.config import Progress


class Targets(msgspec.Struct, frozen=True):
    """Milliseconds that a percentile may reach; None = any."""

    ttft_ms: float | None = None
    itl_ms: float | None = None
    percent: float = 95.0

    def strain(self, outcome: Outcome) -> float:
        """The largest share of its target that a percentile takes: at most 1 if all are met."""
        shares = [
            value / target
            for value, target in (
                (outcome.ttft(self.percent), self.ttft_ms),
                (outcome.itl(self.percent), self.itl_ms),
            )
            if target is not None
        ]
        return max(shares, default=0.0)


class Latencies(msgspec.Struct, frozen=True, kw_only=True):
    """In ms, the median and the targets' percentile."""

    ttft_p50: float
    ttft: float
    itl_p50: float
    itl: float


def measured(trace: Trace, percent: float) -> Latencies | None:
    """What the clients of a trace saw, None if it does not tell. Failed requests are left out."""
    answered = [request for request in trace.requests if not request.failed]
    ttft = [1e3 * request.ttft for request in answered if request.ttft is not None]
    itl = [1e3 * seconds for request in answered for seconds in request.itl]
    if not ttft:
        return None
    return Latencies(
        ttft_p50=percentile(ttft, 50),
        ttft=percentile(ttft, percent),
        itl_p50=percentile(itl, 50),
        itl=percentile(itl, percent),
    )


class Tried(Latencies, frozen=True, kw_only=True):
    """One setting and what clients would see."""

    replicas: int
    kv_dtype: str
    prefix_cache: bool
    max_batch_size: int
    queue: float  # mean, in ms
    refused: int
    tokens_per_s: float
    served_from_cache: float
    strain: float  # largest share of a target; infinity if a request was refused

    @property
    def is_met(self) -> bool:
        return self.strain <= 1 and not self.refused


class Advice(msgspec.Struct, frozen=True):
    targets: Targets
    requests: int
    tried: list[Tried]
    best: Tried | None  # the cheapest that meets the targets; None: none does, or there are none
    command: str | None  # of `best`


def advise(
    requests: Sequence[Asked],
    costs: CostFile,
    targets: Targets,
    *,
    batches: Sequence[int],
    replicas: Sequence[int],
    caches: Sequence[bool] = (True,),
    seed: int = 0,
    progress: Progress = lambda what, done, total: None,
) -> Advice:
    """Try all settings with few replicas before those with more, and stop at the first number that meets the targets.

    Of the settings with equally many replicas the one with the first KV type of `costs` is the cheapest, and then the
    one with the least strain. Without targets all are tried.
    """
    tried = list[Tried]()
    best: Tried | None = None
    types, has_targets = list(costs.types), targets.ttft_ms is not None or targets.itl_ms is not None
    grid = list(itertools.product(sorted(replicas), types, caches, sorted(batches)))
    for count, settings in itertools.groupby(grid, key=lambda row: row[0]):
        for row in settings:
            progress("settings", len(tried), len(grid))
            tried.append(_try(requests, costs, Setting(*row), targets, seed))
        met = [one for one in tried if one.replicas == count and one.is_met]
        if met and has_targets:
            best = min(met, key=lambda one: (types.index(one.kv_dtype), one.strain))
            break
    progress("settings", len(grid), len(grid))
    return Advice(targets, len(requests), tried, best, command(costs, best) if best else None)


def _try(requests: Sequence[Asked], costs: CostFile, setting: Setting, targets: Targets, seed: int) -> Tried:
    outcome = Simulation(requests, costs.types[setting.kv_dtype], setting, seed=seed).run()
    return Tried(
        replicas=setting.replicas,
        kv_dtype=setting.kv_dtype,
        prefix_cache=setting.prefix_cache,
        max_batch_size=setting.max_batch_size,
        ttft_p50=outcome.ttft(50),
        ttft=outcome.ttft(targets.percent),
        itl_p50=outcome.itl(50),
        itl=outcome.itl(targets.percent),
        queue=outcome.queue_ms,
        refused=outcome.refused,
        tokens_per_s=outcome.output_tokens / outcome.seconds if outcome.seconds else 0.0,
        served_from_cache=outcome.served_from_cache,
        strain=targets.strain(outcome),
    )


def command(costs: CostFile, tried: Tried) -> str:
    """The command that serves the model with a setting, on each of its machines."""
    options = costs.options | {"max-batch-size": str(tried.max_batch_size)}
    if tried.kv_dtype != "auto":
        options["kv-dtype"] = tried.kv_dtype
    flags = [part for name, value in options.items() for part in (f"--{name}", value)]
    return shlex.join(["lmkit", "serve", costs.model, *flags, *(["--no-prefix-cache"] * (not tried.prefix_cache))])
