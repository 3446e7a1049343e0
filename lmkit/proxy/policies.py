"""Routing policies. A policy is a function from the candidates (never empty) to the node for the next request.

It reads what the registry knows of the nodes, and has neither I/O nor a clock. A simulation can therefore drive it.
"""

from __future__ import annotations

import hashlib
import math
import operator
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from random import Random
from typing import NamedTuple

from lmkit.config import PolicyName
from lmkit.proxy.registry import Node

STAY = 16.0
GUARD = 3.0
GUARD_TOKENS = 1024
LATENCY_HALF_LIFE = 30.0  # seconds after which an observed latency says half as much


@dataclass(frozen=True)
class Ask:
    """What a policy knows of a request."""

    tokens: int = 0  # of its prompt, about
    session: str = ""  # requests with the same text belong together
    cached: Mapping[Node, int] = field(default_factory=dict)  # tokens of its prompt that a node probably has
    now: float = 0.0  # by the registry's clock
    ramps: Mapping[Node, float] = field(default_factory=dict)  # shares of their weights, of nodes that came lately

    def missing(self, node: Node) -> int:
        """Tokens that the node would compute."""
        return self.tokens - self.cached.get(node, 0)

    def weight(self, node: Node) -> float:
        return node.config.weight * self.ramp(node)

    def ramp(self, node: Node) -> float:
        return self.ramps.get(node, 1.0)

    def load(self, node: Node) -> float:
        """Tokens that stand before those of the request, for the node's weight."""
        return node.load / self.weight(node)


class Choice(NamedTuple):
    node: Node
    reason: str
    missing: int = 0  # tokens that the node has to compute, about


Policy = Callable[[Sequence[Node], Ask, Random], Choice]


def prefix(candidates: Sequence[Node], ask: Ask, rng: Random) -> Choice:
    """The node with the fewest tokens to compute: those that wait there, and those of this prompt that it lacks.

    A token that a node lacks counts `STAY` times, because computing it also evicts KV that others would find. If that
    leads to a node with more than `GUARD` times the mean load, the prompt goes where it is computed soonest. So a
    beginning that many prompts share comes to lie at several nodes. benchmarks.routing shows what both are worth.
    """
    loads = list(map(ask.load, candidates))
    missing = [ask.missing(node) / ask.weight(node) for node in candidates]
    node, _ = _least(candidates, [load + STAY * more for load, more in zip(loads, missing, strict=True)], ask, rng)
    if moved := ask.load(node) > GUARD * math.fsum(loads) / len(loads) + GUARD_TOKENS:
        node, _ = _least(candidates, list(map(operator.add, loads, missing)), ask, rng)
    reason = f"{ask.cached.get(node, 0)} of {ask.tokens} tokens cached, {node.load} before it"
    return Choice(node, reason + (", its own node is overloaded" if moved else ""))


def least_tokens(candidates: Sequence[Node], ask: Ask, rng: Random) -> Choice:
    """The node with the fewest tokens that wait or run, for its weight."""
    node, cost = _least(candidates, list(map(ask.load, candidates)), ask, rng)
    return Choice(node, f"{cost:.0f} tokens before it")


def least_in_flight(candidates: Sequence[Node], ask: Ask, rng: Random) -> Choice:
    """The node with the fewest requests for its weight.

    A node without history counts as any other.
    """
    node, cost = _least(candidates, [(n.in_flight + n.others) / ask.weight(n) for n in candidates], ask, rng)
    return Choice(node, f"{cost:g} requests before it")


def power_of_two(candidates: Sequence[Node], ask: Ask, rng: Random) -> Choice:
    """The better of two nodes that are drawn by weight. Several proxies with old figures do not all choose the same."""
    first = _drawn(candidates, ask, rng)
    others = [node for node in candidates if node is not first]
    second = _drawn(others, ask, rng) if others else first
    node, cost = _least((first, second), (ask.load(first), ask.load(second)), ask, rng)
    return Choice(node, f"{cost:.0f} tokens before it, the better of two")


def session(candidates: Sequence[Node], ask: Ask, rng: Random) -> Choice:
    """Always the same node for a session (rendezvous hashing by weight); without one, the node with the least load.

    A node that comes or goes moves only the sessions that it gets or had.
    """
    if not ask.session:
        return least_tokens(candidates, ask, rng)
    node, _ = _least(candidates, [-math.log(uniform(ask.session, n.url)) / ask.weight(n) for n in candidates], ask, rng)
    return Choice(node, "its session")


def min_expected_latency(candidates: Sequence[Node], ask: Ask, rng: Random) -> Choice:
    """The node that computes what waits there and this prompt soonest, at the pace that it has shown.

    A node without a pace counts with the mean of the others.
    """
    known = [node.pace for node in candidates if node.pace]
    mean = math.fsum(known) / len(known) if known else 1.0
    costs = [(n.load + ask.missing(n)) / (n.pace or mean) / ask.ramp(n) for n in candidates]
    node, cost = _least(candidates, costs, ask, rng)
    return Choice(node, f"{cost:.3g} s expected" if known else "no pace is known yet")


def min_observed_latency(candidates: Sequence[Node], ask: Ask, rng: Random) -> Choice:
    """The node with the least latency times requests. A latency fades with time, so that no node is left out for ever.

    A node without a latency counts with the mean of the others.
    """

    def faded(node: Node) -> float:
        return (node.latency or 0.0) * math.exp2(-(ask.now - node.latency_at) / LATENCY_HALF_LIFE)

    known = [faded(node) for node in candidates if node.latency is not None]
    mean = math.fsum(known) / len(known) if known else 1.0

    def cost(node: Node) -> float:
        seconds = mean if node.latency is None else faded(node)
        return seconds * (1 + node.in_flight + node.others) / ask.ramp(node)

    node, least = _least(candidates, list(map(cost, candidates)), ask, rng)
    return Choice(node, f"{least:.3g} s observed, times requests")


def round_robin(candidates: Sequence[Node], ask: Ask, rng: Random) -> Choice:
    """The node that was picked longest ago. Weights have no effect."""
    return Choice(min(candidates, key=lambda node: node.last_pick), "its turn")


def random(candidates: Sequence[Node], ask: Ask, rng: Random) -> Choice:
    """A node drawn by weight."""
    return Choice(_drawn(candidates, ask, rng), "drawn by weight")


POLICIES: dict[PolicyName, Policy] = {
    "prefix": prefix,
    "least_tokens": least_tokens,
    "least_in_flight": least_in_flight,
    "power_of_two": power_of_two,
    "session": session,
    "min_expected_latency": min_expected_latency,
    "min_observed_latency": min_observed_latency,
    "round_robin": round_robin,
    "random": random,
}


def _least(candidates: Sequence[Node], costs: Sequence[float], ask: Ask, rng: Random) -> tuple[Node, float]:
    """The node of the least cost, and the cost. Ties are drawn by weight."""
    least = min(costs)
    return _drawn([node for node, value in zip(candidates, costs, strict=True) if value == least], ask, rng), least


def _drawn(candidates: Sequence[Node], ask: Ask, rng: Random) -> Node:
    return rng.choices(candidates, weights=list(map(ask.weight, candidates)))[0]


def uniform(session: str, name: str) -> float:
    """A number between 0 and 1, always the same for a session and a node (or another name)."""
    digest = hashlib.blake2b(f"{session}\0{name}".encode("utf-8", "surrogatepass"), digest_size=8).digest()
    return (int.from_bytes(digest) + 0.5) / 2**64
