"""Nodes that are slow, restart or fail, with and without what the proxy does about it. The same simulation.

    python -m benchmarks.routing.nodes [--nodes N] [--requests N] [--seed N]

`slow`: a tenth of the nodes computes ten times as slowly during a third of the trace; ejection off and on.
`restart`: all nodes restart one after the other, with empty caches; slow start off and on. `cold`: they also compute
ten times as slowly in their first 10 s. `sick`: every node breaks off every request for a fifth of the trace; each is
retried, or a share of them.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from functools import partial
from typing import Any, NamedTuple

from rich.console import Console
from rich.table import Table

from benchmarks.routing.sim import Disturbance, Machine, Result, Simulation
from benchmarks.routing.trace import Shape
from lmkit.config import PolicyName

SPANS = {"slow": (0.3, 0.6), "restart": (0.3, 0.8), "cold": (0.3, 0.8), "sick": (0.4, 0.6)}  # of the trace
COLD_SECONDS = 10.0
_START: dict[str, dict[str, Any]] = {"no slow start": {}, "slow start": {"slow_start_seconds": 10.0}}
VARIANTS: dict[str, dict[str, dict[str, Any]]] = {
    "slow": {"no ejection": {"outlier_factor": None}, "ejection": {}},
    "restart": _START,
    "cold": _START,
    "sick": {"every request retried": {"retry_share": 1.0}, "budget": {"max_in_flight": 100}},
}
POLICIES: tuple[PolicyName, ...] = ("prefix", "least_tokens", "session")


class Row(NamedTuple):
    scenario: str
    policy: str
    variant: str
    p50: float  # seconds to the first token, of requests that came in the span
    p95: float
    p99: float
    hit_rate: float
    failed: int
    attempts: float  # of nodes for each request in the span


def _each(method: str, indexes: Sequence[int], sim: Simulation) -> None:
    nodes = list(sim.engines)
    for i in indexes:
        getattr(sim, method)(nodes[i])


def disturbances(scenario: str, seconds: float, count: int) -> list[Disturbance]:
    start, end = (at * seconds for at in SPANS[scenario])
    if scenario in ("restart", "cold"):
        each, found = (end - start) / count, list[Disturbance]()
        for i in range(count):
            back = start + each * (i + 1)
            found += [(back - each, partial(_each, "kill", [i])), (back, partial(_each, "restore", [i]))]
            if scenario == "cold":
                found.append((back, partial(_each, "slow", [i])))
                found.append((back + COLD_SECONDS, partial(_each, "restore", [i])))
        return found
    method, hit = ("slow", range(0, count, 10)) if scenario == "slow" else ("sicken", range(count))
    return [(start, partial(_each, method, hit)), (end, partial(_each, "restore", hit))]


def run(scenario: str, policy: PolicyName, variant: str, count: int, shape: Shape, seed: int) -> Row:
    seconds = shape.requests / (shape.rate * shape.turns)
    sim = Simulation(
        policy, [Machine()] * count, shape, seed=seed, disturbances=disturbances(scenario, seconds, count),
        **VARIANTS[scenario][variant],
    )  # fmt: skip
    result = sim.run()
    start, end = (at * seconds for at in SPANS[scenario])
    p50, p95, p99 = (result.quantile(q, start, end) for q in (0.5, 0.95, 0.99))
    attempts = _attempts(result, start, end)
    return Row(scenario, policy, variant, p50, p95, p99, result.hit_rate, result.failed, attempts)


def _attempts(result: Result, start: float, end: float) -> float:
    tries = sum(start <= at < end for at in result.attempts)
    return tries / max(1, sum(start <= at < end for at in result.arrivals))


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--nodes", type=int, default=20)
    parser.add_argument("--requests", type=int, default=12_000)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args(arguments)
    shape = Shape(options.requests, rate=0.25 * options.nodes, groups=max(4, options.nodes // 4))
    table = Table(box=None)
    for column in ("scenario", "policy", "", "TTFT p50", "p95", "p99", "cached", "failed", "attempts"):
        table.add_column(column)
    for scenario, variants in VARIANTS.items():
        for policy in POLICIES:
            for variant in variants:
                row = run(scenario, policy, variant, options.nodes, shape, options.seed)
                table.add_row(
                    *row[:3], f"{row.p50:.3f} s", f"{row.p95:.2f} s", f"{row.p99:.2f} s",
                    f"{row.hit_rate:.1%}", str(row.failed), f"{row.attempts:.2f}",
                )  # fmt: skip
                print(*row, file=sys.stderr, flush=True)
    Console(width=120).print(table)
    return 0


if __name__ == "__main__":
    sys.exit(main())
