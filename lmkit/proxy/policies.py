"""Routing policies. A policy is a function from the candidates (never empty) to the node for the next request."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from random import Random

from lmkit.proxy.registry import Node

Policy = Callable[[Sequence[Node], Random], Node]


def least_in_flight(candidates: Sequence[Node], rng: Random) -> Node:
    """The node with the fewest requests for its weight. Ties are drawn by weight.

    A node without history, or one that just came back, therefore gets its share at once.
    """
    load = [node.in_flight / node.config.weight for node in candidates]
    least = min(load)
    return random([node for node, value in zip(candidates, load, strict=True) if value == least], rng)


def round_robin(candidates: Sequence[Node], rng: Random) -> Node:
    """The node that was picked longest ago. Weights have no effect."""
    return min(candidates, key=lambda node: node.last_pick)


def random(candidates: Sequence[Node], rng: Random) -> Node:
    """A node drawn by weight."""
    return rng.choices(candidates, weights=[node.config.weight for node in candidates])[0]


POLICIES: dict[str, Policy] = {"least_in_flight": least_in_flight, "round_robin": round_robin, "random": random}
