"""Chooses the node for a request by a policy, and tells a client that asks why."""

from __future__ import annotations

import hashlib
import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from random import Random
from typing import NamedTuple

from lmkit.config import PolicyName
from lmkit.errors import RequestError
from lmkit.proxy.asked import Asked
from lmkit.proxy.config import ProxyConfig
from lmkit.proxy.policies import POLICIES, Ask, Choice, uniform
from lmkit.proxy.prefixes import BYTES_PER_TOKEN, Cut, cuts
from lmkit.proxy.registry import Node, Registry
from lmkit.proxy.rules import Request, Rule, drawn, first_match
from lmkit.web.auth import Headers, key_id

USES_PREFIXES: frozenset[PolicyName] = frozenset({"prefix", "min_expected_latency"})
EXPLAIN_HEADER = b"x-lmkit-explain"
RECENT = 50  # decisions that are kept for the dashboard
_NO_RULE = Rule(name="-")


@dataclass(frozen=True)
class Routing:
    """How one request is routed."""

    model: str
    policy: PolicyName
    fallback: tuple[str, ...] = ()  # models for a request that no node can answer now
    shadow: str = ""  # a model that gets a copy
    tags: frozenset[str] = frozenset()  # of the nodes that may get it; empty = all may
    rule: str = ""  # the name of the rule that says so
    tokens: int = 0  # of its prompt, about
    session: str = ""
    prompt: Sequence[Cut] = ()
    explained: bool = False  # the client wants to know why
    has_session: bool = False  # its body names one, whose node keeps the tokens of its answers
    keeper: Node | None = None  # the only node that may get it: it keeps the response that the request continues


class Decision(NamedTuple):
    """A choice that was made."""

    at: float  # seconds since 1970
    model: str
    node: str
    policy: str
    reason: str
    rule: str
    tokens: int
    candidates: int


class Router:
    """Chooses among the registry's nodes, and remembers which prompts they got."""

    def __init__(self, registry: Registry, config: ProxyConfig, rng: Random | None = None) -> None:
        self._registry = registry
        self._rng = rng or Random()
        self.recent = deque[Decision](maxlen=RECENT)
        self.configure(config)

    def configure(self, config: ProxyConfig) -> None:
        self.policy, self._aliases, self._rules = config.policy, config.aliases, config.rules

    def model(self, name: str) -> str:
        """The model that an alias stands for."""
        return self._aliases.get(name, name)

    def aliases(self) -> dict[str, str]:
        return dict(self._aliases)

    def routing(self, asked: Asked, headers: Headers, tenant: str = "") -> Routing:
        """Read a request once. Prompts of two tenants have nothing in common, because their KV has not."""
        secret = (
            self._registry.prefixes.secret
            + hashlib.sha256(f"{asked.model}\0{tenant}\0{asked.cache_salt}".encode()).digest()
        )
        parts, session, model = list(asked.parts()), asked.session(headers), self.model(asked.model)
        tokens = sum(map(len, parts)) // BYTES_PER_TOKEN
        rule = self._rule(asked, model, tokens, headers)
        policy = rule.policy or self.policy
        point = uniform(session, rule.name) if session else self._rng.random()  # a session stays with one model
        shadow = rule.shadow if rule.shadow and self._rng.random() < rule.shadow.share else None
        return Routing(
            drawn(rule.to, point) if rule.to else model,
            policy,
            rule.fallback,
            shadow.model if shadow else "",
            frozenset(rule.nodes),
            rule.name if rule is not _NO_RULE else "",
            tokens,
            session,
            cuts(parts, secret) if policy in USES_PREFIXES else (),
            any(name == EXPLAIN_HEADER and value == b"1" for name, value in headers),
            asked.session_id is not None,
        )

    def _rule(self, asked: Asked, model: str, tokens: int, headers: Headers) -> Rule:
        """The first rule for the request, or one that says nothing."""
        if not self._rules:
            return _NO_RULE
        texts = {name.decode("latin-1"): value.decode("latin-1") for name, value in headers}
        request = Request(model, texts, key_id(headers), tokens, asked.level)
        return first_match(self._rules, request) or _NO_RULE

    def choose(self, candidates: Sequence[Node], routing: Routing) -> Choice:
        """The node for the request, of `candidates`, which are not empty.

        Raises RequestError if none has a tag that the request's rule names, or keeps what it continues.
        """
        if routing.keeper is not None:
            candidates = [node for node in candidates if node is routing.keeper]
            if not candidates:
                message = "the node that keeps this response takes no requests for the model now; try again"
                raise RequestError("engine_unavailable", message, "previous_response_id")
        if routing.tags:
            candidates = [node for node in candidates if not routing.tags.isdisjoint(node.config.tags)]
            if not candidates:
                raise RequestError("engine_unavailable", "no node that this request may use is healthy; try again")
        index = self._registry.prefixes
        cached, ramps = index.cached(routing.prompt), self._registry.ramps(candidates)
        ask = Ask(routing.tokens, routing.session, cached, self._registry.clock(), ramps)
        choice = POLICIES[routing.policy](candidates, ask, self._rng)
        if choice.node in ramps:
            choice = choice._replace(reason=f"{choice.reason}, with {ramps[choice.node]:.0%} of its weight yet")
        if routing.prompt:
            capacity = None if choice.node.tells_losses else choice.node.kv_tokens
            index.add(choice.node, routing.prompt, capacity, ask.now)
        self.recent.append(
            Decision(
                time.time(),
                routing.model,
                choice.node.url,
                routing.policy,
                choice.reason,
                routing.rule,
                routing.tokens,
                len(candidates),
            )
        )
        return choice._replace(missing=ask.missing(choice.node))


def explanation(choice: Choice, routing: Routing, num_candidates: int, resting: int) -> list[tuple[bytes, bytes]]:
    """Headers that say why this node. They name it by its id, because its address is not for clients.

    `resting` is the number of nodes of the model that get no requests for now.
    """
    fields = {
        "x-lmkit-node": choice.node.id,
        "x-lmkit-policy": routing.policy,
        "x-lmkit-reason": choice.reason,
        "x-lmkit-candidates": str(num_candidates),
        "x-lmkit-resting": str(resting),
    } | ({"x-lmkit-rule": routing.rule} if routing.rule else {})
    return [(name.encode(), value.encode()) for name, value in fields.items()]
