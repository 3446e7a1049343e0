"""What it is worth to know the nodes' caches: the policy `prefix` on four nodes. The same simulation.

    python -m benchmarks.routing.knowledge [--requests N] [--seed N]

`exact`: the router knows each cache at each moment. `losses told`: nodes tell every 5 s since when they have lost
nothing. `size told`: the router counts what it sent and believes the size of the cache; `x 0.6` and `x 1.8` are the
same if a token has more or fewer bytes than it believes.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from typing import Any

from rich.console import Console
from rich.table import Table

from benchmarks.routing.__main__ import FOUR_RATES, ideal
from benchmarks.routing.sim import Flight, Machine, Simulation
from benchmarks.routing.trace import Shape
from lmkit.proxy.prefixes import Cut, PrefixIndex
from lmkit.proxy.registry import Node

VARIANTS: dict[str, dict[str, Any]] = {
    "losses told": {},
    "size told": {"tells_losses": False},
    "size told, x 0.6": {"tells_losses": False, "believed_kv": 0.6},
    "size told, x 1.8": {"tells_losses": False, "believed_kv": 1.8},
}


class Exact(Simulation):
    """The router sees the caches themselves."""

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self.registry.prefixes = _Seen(self)
        self.asks: Any = None

    def _send(self, flight: Flight) -> None:
        self.asks = flight.ask
        super()._send(flight)


class _Seen(PrefixIndex[Node]):
    def __init__(self, sim: Exact) -> None:
        super().__init__()
        self._sim = sim

    def cached(self, prompt: Sequence[Cut]) -> dict[Node, int]:
        return {node: engine.cached(self._sim.asks) for node, engine in self._sim.engines.items()}


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--requests", type=int, default=8000)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args(argv)
    table = Table("trace", "the router knows", "cached", "of one ideal node", "TTFT p50", "p99", box=None)
    for load, rate in FOUR_RATES.items():
        shape, nodes = Shape(args.requests, rate), [Machine()] * 4
        best = Simulation("prefix", [ideal(4)], shape, seed=args.seed).run()
        runs: dict[str, Simulation] = {"exact": Exact("prefix", nodes, shape, seed=args.seed)}
        runs |= {name: Simulation("prefix", nodes, shape, seed=args.seed, **given) for name, given in VARIANTS.items()}
        for name, run in runs.items():
            result = run.run()
            shares = f"{result.hit_rate:.1%}", f"{result.hit_rate / best.hit_rate:.1%}"
            table.add_row(load, name, *shares, f"{result.quantile(0.5):.2f} s", f"{result.quantile(0.99):.3g} s")
    Console(width=120).print(table)
    return 0


if __name__ == "__main__":
    sys.exit(main())
