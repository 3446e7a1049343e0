"""Routing policies on simulated nodes.

    python -m benchmarks.routing [--nodes N] [--requests N] [--seed N] [--policies NAME ...] [--json FILE] [--plot FILE]

Three traces from a seed, each with every policy: `four` (four nodes, beside one ideal node of the same size), `calm`
(many nodes) and `storm` (the same with an outage of a third, a partition, a rolling restart and a herd). `smg` is the
policy cache_aware of SMG (SGLang's router), as its documentation describes it.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from random import Random
from typing import Any, get_args

from rich.console import Console
from rich.table import Table

from benchmarks.routing.sim import Disturbance, Machine, Result, Simulation
from benchmarks.routing.trace import Conversation, Shape
from lmkit.config import PolicyName
from lmkit.proxy.policies import Ask, Choice, Policy, least_in_flight
from lmkit.proxy.registry import Node

SMG = {"absolute": 64, "relative": 1.5, "match": 0.3}  # its defaults
PHASES = {"outage": (0.2, 0.3), "partition": (0.4, 0.5), "restarts": (0.55, 0.75), "herd": (0.85, 0.9)}  # of the trace
FOUR_REQUESTS = 20_000
FOUR_RATES = {"light": 0.8, "busy": 1.2, "full": 1.6}  # conversations a second; four nodes are full at about 1.6


def smg(candidates: Sequence[Node], ask: Ask, rng: Random) -> Choice:
    """Imbalanced: the least load. Else the node with the longest match, if it is long; else the least load."""
    loads = [node.in_flight for node in candidates]
    low, high = min(loads), max(loads)
    longest = max(ask.cached.get(node, 0) for node in candidates)
    best = rng.choice([node for node in candidates if ask.cached.get(node, 0) == longest])
    imbalanced = high - low > SMG["absolute"] and high > SMG["relative"] * low
    if imbalanced or longest <= SMG["match"] * ask.tokens:
        return least_in_flight(candidates, ask, rng)
    return Choice(best, "match")


def policy(name: str) -> PolicyName | Policy:
    return smg if name == "smg" else next(known for known in get_args(PolicyName) if known == name)


def machines(count: int) -> list[Machine]:
    """Three of four are plain. The others compute twice as fast and cost three times as much."""
    fast = Machine(prefill=4000, step=0.015, step_each=0.0005, kv_tokens=120_000, dollars=6.0)
    return [fast if i % 4 == 3 else Machine() for i in range(count)]


def ideal(count: int) -> Machine:
    """One node with the speed and the cache of `count` plain ones."""
    one = Machine()
    return Machine(one.prefill * count, one.step / count, one.step_each / count, one.kv_tokens * count)


def storm(seconds: float, count: int, shape: Shape, seed: int) -> list[Disturbance]:
    """What happens to `count` nodes in a trace of about so many seconds."""
    rng, found = Random(seed), list[Disturbance]()

    def each(method: str, indexes: Sequence[int], sim: Simulation) -> None:
        nodes = list(sim.engines)
        for i in indexes:
            getattr(sim, method)(nodes[i])

    def during(phase: str, method: str, indexes: Sequence[int]) -> None:
        start, end = PHASES[phase]
        found.append((start * seconds, partial(each, method, indexes)))
        found.append((end * seconds, partial(each, "restore", indexes)))

    during("outage", "kill", rng.sample(range(count), count // 3))
    during("partition", "cut_off", rng.sample(range(count), count // 5))
    start, end = (at * seconds for at in PHASES["restarts"])
    batches = [range(i, min(i + count // 20 + 1, count)) for i in range(0, count, count // 20 + 1)]
    for i, batch in enumerate(batches):
        at = start + (end - start) * i / len(batches)
        found += [
            (at, partial(each, "kill", batch)),
            (at + (end - start) / len(batches), partial(each, "restore", batch)),
        ]

    def herd(sim: Simulation) -> None:
        """Many conversations with one system prompt that nobody has, all at once."""
        for i in range(2 * count):
            sim.arrive(Conversation(10**7 + i, 10**6, Shape(1, 1.0, turns=1, system=3000), Random(i)))

    found.append((PHASES["herd"][0] * seconds, herd))
    return found


def row(trace: str, name: str, result: Result, reference: float | None = None, seconds: float = 0.0) -> dict[str, Any]:
    return {
        "trace": trace,
        "policy": name,
        "requests": len(result.ttft),
        "hit_rate": result.hit_rate,
        "of_ideal": None if reference is None else result.hit_rate / reference,
        "ttft_p50": result.quantile(0.5),
        "ttft_p99": result.quantile(0.99),
        "imbalance": sum(result.imbalance) / max(1, len(result.imbalance)),
        "dollars_per_1k": 1000 * result.busy_dollars / max(1, len(result.ttft)),
        "retries": result.retries,
        "phases_p99": {
            phase: result.quantile(0.99, start * seconds, end * seconds) for phase, (start, end) in PHASES.items()
        }
        if seconds
        else {},
    }  # fmt: skip


def four(names: Sequence[str], requests: int, seed: int, show: Any) -> None:
    for load, rate in FOUR_RATES.items():
        shape = Shape(requests, rate)
        best = Simulation("prefix", [ideal(4)], shape, seed=seed).run()
        show(row(f"four, {load}", "one ideal node", best, best.hit_rate))
        for name in names:
            result = Simulation(policy(name), [Machine()] * 4, shape, seed=seed).run()
            show(row(f"four, {load}", name, result, best.hit_rate))


def many(names: Sequence[str], count: int, requests: int, seed: int, show: Any) -> None:
    shape = Shape(requests, rate=0.25 * count, groups=max(4, count // 4))
    for name in names:
        calm = Simulation(policy(name), machines(count), shape, seed=seed).run()
        show(row("calm", name, calm))
        seconds = calm.ends
        again = Simulation(
            policy(name), machines(count), shape, seed=seed, disturbances=storm(seconds, count, shape, seed)
        ).run()
        show(row("storm", name, again, seconds=seconds))


def table(rows: list[dict[str, Any]]) -> Table:
    made = Table(box=None)
    for column in ("trace", "policy", "cached", "of ideal", "TTFT p50", "TTFT p99", "imbalance", "$/1000", "retries"):
        made.add_column(column, justify="left" if column in ("trace", "policy") else "right")
    for r in rows:
        of_ideal = "" if r["of_ideal"] is None else f"{r['of_ideal']:.1%}"
        made.add_row(
            r["trace"], r["policy"], f"{r['hit_rate']:.1%}", of_ideal, f"{r['ttft_p50']:.3f} s",
            f"{r['ttft_p99']:.2f} s", f"{r['imbalance']:.2f}", f"{r['dollars_per_1k']:.3f}", str(r["retries"]),
        )  # fmt: skip
    return made


def plot(rows: list[dict[str, Any]], path: Path) -> None:
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    traces = [trace for trace in dict.fromkeys(r["trace"] for r in rows) if trace in ("four, full", "calm", "storm")]
    figure = Figure(figsize=(4 * len(traces), 4.2), layout="constrained")
    FigureCanvasAgg(figure)
    for trace, axes in zip(traces, figure.subplots(1, len(traces), squeeze=False)[0], strict=True):
        of_trace = [r for r in rows if r["trace"] == trace and r["policy"] != "one ideal node"]
        for r in of_trace:
            axes.scatter(r["hit_rate"], r["ttft_p99"], s=30, color="C1" if r["policy"] == "smg" else "C0")
            axes.annotate(r["policy"], (r["hit_rate"], r["ttft_p99"]), (4, 4), textcoords="offset points", fontsize=8)
        axes.set(title=trace, xlabel="cached share of prompt tokens", ylabel="TTFT p99, s", yscale="log")
        axes.margins(0.25)
    figure.savefig(path, dpi=110)


def main(arguments: Sequence[str] | None = None) -> int:
    known = (*get_args(PolicyName), "smg")
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--nodes", type=int, default=1000)
    parser.add_argument("--requests", type=int, default=100_000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--policies", nargs="+", choices=known, default=known)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--plot", type=Path)
    options = parser.parse_args(arguments)
    rows, start = list[dict[str, Any]](), time.monotonic()

    def show(found: dict[str, Any]) -> None:
        rows.append(found)
        if options.json:  # also what a run that is cut short has found
            options.json.write_text(json.dumps(rows, indent=1))
        print(f"{time.monotonic() - start:6.0f} s  {found['trace']}, {found['policy']}", file=sys.stderr, flush=True)

    four(options.policies, min(options.requests, FOUR_REQUESTS), options.seed, show)
    many(options.policies, options.nodes, options.requests, options.seed, show)
    Console(width=120).print(table(rows))
    if options.plot:
        plot(rows, options.plot)
    return 0


if __name__ == "__main__":
    sys.exit(main())
