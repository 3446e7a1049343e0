"""Chooses the node for a request by a policy, and tells a client that asks why."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from random import Random

from lmkit.config import PolicyName
from lmkit.proxy.asked import Asked
from lmkit.proxy.policies import POLICIES, Ask, Choice
from lmkit.proxy.prefixes import BYTES_PER_TOKEN, Cut, cuts
from lmkit.proxy.registry import Node, Registry
from lmkit.web.auth import Headers

USES_PREFIXES: frozenset[PolicyName] = frozenset({"prefix", "min_expected_latency"})
EXPLAIN_HEADER = b"x-lmkit-explain"


@dataclass(frozen=True)
class Routing:
    """How one request is routed."""

    policy: PolicyName
    tokens: int = 0  # of its prompt, about
    session: str = ""
    prompt: Sequence[Cut] = ()
    explained: bool = False  # the client wants to know why


class Router:
    """Chooses among the registry's nodes, and remembers which prompts they got."""

    def __init__(self, registry: Registry, policy: PolicyName, rng: Random | None = None) -> None:
        self._registry = registry
        self._policy = policy
        self._rng = rng or Random()

    def routing(self, asked: Asked, headers: Headers, tenant: str = "") -> Routing:
        """Read a request once. Prompts of two tenants have nothing in common, because their KV has not."""
        secret = (
            self._registry.prefixes.secret
            + hashlib.sha256(f"{asked.model}\0{tenant}\0{asked.cache_salt}".encode()).digest()
        )
        parts = list(asked.parts())
        return Routing(
            self._policy,
            sum(map(len, parts)) // BYTES_PER_TOKEN,
            asked.session(headers),
            cuts(parts, secret) if self._policy in USES_PREFIXES else (),
            any(name == EXPLAIN_HEADER and value == b"1" for name, value in headers),
        )

    def choose(self, candidates: Sequence[Node], routing: Routing) -> Choice:
        """The node for the request, of `candidates`, which are not empty."""
        index = self._registry.prefixes
        ask = Ask(routing.tokens, routing.session, index.cached(routing.prompt), self._registry.clock())
        choice = POLICIES[routing.policy](candidates, ask, self._rng)
        if routing.prompt:
            index.add(choice.node, routing.prompt, choice.node.kv_tokens)
        return choice._replace(missing=ask.missing(choice.node))


def explanation(choice: Choice, routing: Routing, num_candidates: int) -> list[tuple[bytes, bytes]]:
    """Headers that say why this node. They name it by its id, because its address is not for clients."""
    fields = {
        "x-lmkit-node": choice.node.id,
        "x-lmkit-policy": routing.policy,
        "x-lmkit-reason": choice.reason,
        "x-lmkit-candidates": str(num_candidates),
    }
    return [(name.encode(), value.encode()) for name, value in fields.items()]
