"""The known nodes: their models, health and running requests. No I/O; the clock is injected."""

from __future__ import annotations

import hashlib
import math
import time
from collections import Counter, defaultdict, deque
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from random import Random
from typing import Any, NamedTuple

from lmkit.errors import RequestError, unknown_model
from lmkit.proxy.accounts.account import Sizes
from lmkit.proxy.breaker import Breaker
from lmkit.proxy.config import NodeConfig, ProxyConfig, Registration
from lmkit.proxy.outliers import MAX_SAMPLES, MIN_SAMPLES, ramps, worst
from lmkit.proxy.prefixes import Cut, PrefixIndex
from lmkit.whole import whole

ModelEntries = dict[str, dict[str, Any]]  # model id -> its object in a /v1/models list
BROKEN = frozenset({500, 502, 504})  # statuses that count against a node; 503 only says that it is busy
LATENCY_DECAY = 0.2  # share of the newest sample in the moving average
MAX_CONTEXT = 1 << 31  # tokens
MAX_GONE = 10_000  # names of models whose nodes are away
STARTED_SECONDS = 60.0  # in which a proxy without a node expects the first
TOKENS_RUNNING = 64  # of a prompt: what they delay a new request is what a running request delays it


@dataclass(eq=False)
class Node:
    """One node's state. It outlives its removal for as long as a request uses it."""

    config: NodeConfig
    origin: str  # "config", "added" or "registered"
    breaker: Breaker
    lease_until: float | None = None
    models: ModelEntries | None = None  # None = not known yet
    healthy: bool = False
    reason: str | None = "not checked yet"  # why it is unhealthy, or a note about a healthy one
    down_since: float = -math.inf  # by the registry's clock
    up_since: float = -math.inf  # by the registry's clock
    draining: bool = False  # it gets no new requests
    found_key: str | None = None  # of a server of this user here that has no api_key
    checked: bool = False  # a check has ended, well or badly
    failures: int = 0  # consecutive, of checks and connections; only a good check resets it
    successes: int = 0  # consecutive good checks
    in_flight: int = 0
    last_pick: int = 0
    queued: int = 0  # tokens of prompts that have no first byte yet, and that are probably not cached
    # What the node has told of itself:
    owner: str = ""  # the id of the key with which it registered; "" for nodes of an administrator
    instance: str = ""  # of its process
    fingerprints: Mapping[str, str] = field(default_factory=dict)  # of its models' weights
    leaving: bool = False  # it drains
    others: int = 0  # requests of other proxies and clients
    kv_tokens: int | None = None  # the size of its KV cache
    kv_use: float | None = None  # 0 to 1
    tells_losses: bool = False  # it says since when its cache has lost nothing
    latency: float | None = None  # seconds to the first byte, moving average
    latency_at: float = -math.inf  # by the registry's clock
    # Seconds and computed tokens before its last first bytes:
    firsts: deque[tuple[float, int]] = field(default_factory=lambda: deque(maxlen=MAX_SAMPLES))
    work: float = 0.0  # tokens that stood before first bytes, the newest counting most,
    worked: float = 0.0  # and the seconds in which they were computed
    answers: Counter[tuple[str, int]] = field(default_factory=Counter)  # (model, status) -> requests
    ejections: int = 0  # how often it was much worse than the others
    failovers: int = 0  # requests that went on to another node
    breaks: int = 0  # responses that broke off in the middle
    # Requests without a first byte: a function that gives each up -> its model.
    waiting: dict[Callable[[], None], str] = field(default_factory=dict)

    @property
    def url(self) -> str:
        return self.config.url

    @property
    def id(self) -> str:
        """A short name that does not tell the address."""
        return hashlib.sha256(b"lmkit node " + self.url.encode()).hexdigest()[:8]

    @property
    def key(self) -> str | None:
        """Sent to it, as a Bearer token."""
        return self.config.api_key or self.found_key

    @property
    def admits(self) -> bool:
        """Whether it may get new requests."""
        return not self.draining and not self.leaving

    @property
    def load(self) -> int:
        """Tokens that stand before those of a new request, about."""
        return self.queued + TOKENS_RUNNING * (self.in_flight + self.others)

    @property
    def pace(self) -> float | None:
        """Tokens a second, as measured on first bytes. None = not known."""
        return self.work / self.worked if self.worked else None

    @property
    def failed_share(self) -> float:
        """Of its last requests, 0 to 1."""
        return self.breaker.failed_share


class Held(NamedTuple):
    """Requests that wait until a node for their model comes, and the tokens of their prompts, about."""

    requests: int = 0
    tokens: int = 0


class Registry:
    """All nodes by URL."""

    def __init__(
        self, config: ProxyConfig, clock: Callable[[], float] = time.monotonic, rng: Random | None = None
    ) -> None:
        self._config, self._rng = config, rng
        self._unhealthy_after = config.unhealthy_after
        self._healthy_after = config.healthy_after
        self.clock = clock
        self._nodes: dict[str, Node] = {}
        self._picks = 0
        self.prefixes = PrefixIndex[Node]()
        self.on_demand, self.node_wait = config.on_demand, config.node_wait
        self.held: dict[str, Held] = {}  # by model
        self.gone: dict[str, float] = {}  # models whose last node left or lost its lease, and when
        self._start = clock()

    def nodes(self) -> list[Node]:
        return list(self._nodes.values())

    def get(self, url: str) -> Node | None:
        return self._nodes.get(url)

    def add(self, config: NodeConfig, origin: str) -> Node:
        """Add a node, or renew and reconfigure a known one.

        A known node keeps its health and its in-flight requests.
        """
        node = self._nodes.get(config.url)
        if node is None:
            failures, seconds = self._config.breaker_failures, self._config.breaker_seconds
            breaker = Breaker(failures, seconds, lambda: self.clock(), self._rng)
            node = self._nodes[config.url] = Node(config, origin, breaker)
        relisted = config.models is None and node.config.models is not None
        node.config, node.origin = config, origin
        lease = config.lease_seconds if isinstance(config, Registration) else None
        node.lease_until = None if lease is None else self.clock() + lease
        if config.models is not None:
            node.models = {
                name: {"id": name, "object": "model", "created": 0, "owned_by": "lmkit"} for name in config.models
            }
        elif relisted:
            node.models = None
        return node

    def remove(self, url: str, *, may_return: bool = False) -> Node | None:
        """Take a node out. Its models stay known if it `may_return`: it left by itself, or its lease has ended."""
        if node := self._nodes.pop(url, None):
            self.prefixes.forget(node)
            for model in node.models or ():
                self.gone.pop(model, None)
                if may_return:
                    self.gone[model] = self.clock()
            while len(self.gone) > MAX_GONE:
                del self.gone[next(iter(self.gone))]
        return node

    def expired(self) -> list[str]:
        """URLs of the nodes whose lease has ended."""
        now = self.clock()
        return [node.url for node in self.nodes() if node.lease_until is not None and node.lease_until <= now]

    def succeeded(self, node: Node, models: ModelEntries | None = None, *, note: str | None = None) -> bool:
        """Record a good check. `models` is a new list, if the node was asked for one. True if the node came up."""
        first, node.checked = not node.checked, True
        node.failures = 0
        node.successes += 1
        if models is not None:
            node.models = models
        if node.healthy or first or node.successes >= self._healthy_after:
            came_up, node.healthy, node.reason = not node.healthy, True, note
            if came_up:
                node.up_since = self.clock()
                node.breaker.reset()
            return came_up
        node.reason = f"{node.successes} of {self._healthy_after} good checks"
        return False

    def failed(self, node: Node, reason: str) -> bool:
        """Record a failed check or connection. True if the node went down."""
        node.checked = True
        node.successes = 0
        node.failures += 1
        went_down = node.healthy and node.failures >= self._unhealthy_after
        if went_down or not node.healthy:
            node.healthy, node.reason = False, reason
        if went_down:
            node.down_since = self.clock()
            self.prefixes.forget(node)
        if not node.healthy:  # another may have come since it went down
            for give_up, model in list(node.waiting.items()):
                if self.candidates(model, [node]):
                    give_up()
        return went_down

    def candidates(self, model: str, exclude: Collection[Node] = ()) -> list[Node]:
        """The healthy nodes that serve `model`. Open breakers count only if they are not those of all of them.

        Otherwise a client whose requests break nodes could shut all of them for everyone. Nodes that compute prompts
        for others count only if there are no others.
        """
        able = [
            n for n in self._nodes.values()
            if n.healthy and not (n.draining or n.leaving) and n.models and model in n.models and n not in exclude
        ]  # fmt: skip
        able = [n for n in able if n.config.role != "prefill"] or able
        return [n for n in able if n.breaker.admits] or able

    def sizes(self, models: Iterable[str]) -> Sizes:
        """The largest sizes of these models, as their nodes list them. One is known if each node tells it."""
        entries = [entries[m] for m in models for node in self.nodes() if m in (entries := node.models or {})]

        def largest(field: str) -> int | None:
            told = [whole(entry.get(field)) for entry in entries]
            known = [size for size in told if size is not None and 0 < size <= MAX_CONTEXT]
            return max(known) if len(known) == len(told) and known else None

        return Sizes(largest("max_model_len"), largest("template_tokens"))

    def prefill_nodes(self, model: str) -> list[Node]:
        """The healthy nodes that compute prompts for the decode nodes of `model`."""
        nodes = [n for n in self._nodes.values() if n.config.role == "prefill" and n.healthy and n.admits]
        return [n for n in nodes if model in (n.models or ()) and n.breaker.admits]

    def resting(self, model: str) -> int:
        """The number of healthy nodes that serve `model` and get no requests because their breakers are open."""
        return sum(n.healthy and model in (n.models or ()) and not n.breaker.admits for n in self.nodes())

    def ramps(self, nodes: Sequence[Node]) -> dict[Node, float]:
        """The shares of their weights that nodes have that came, or came back, lately. See outliers.ramps."""
        seconds, now = self._config.slow_start_seconds, self.clock()
        return ramps({n: now - max(n.up_since, n.breaker.closed_at) for n in nodes}, seconds) if seconds else {}

    def eject(self) -> dict[Node, str]:
        """Open the breakers of nodes that are much worse than the others of their kind. Returns them, and why.

        Nodes are of one kind if they have the same models, tags and weight.
        """
        if not self._config.outlier_factor:
            return {}
        kinds = defaultdict[object, list[Node]](list)
        for node in self.nodes():
            if node.healthy and node.admits:
                kinds[frozenset(node.models or ()), frozenset(node.config.tags), node.config.weight].append(node)
        found: dict[Node, str] = {}
        for kind in kinds.values():
            closed = [node for node in kind if node.breaker.state == "closed"]
            found |= worst(closed, len(kind) - len(closed), self._config.outlier_factor, self._config.max_ejected)
        for node, why in found.items():
            node.breaker.eject(why, MIN_SAMPLES)
            node.ejections += 1
            node.firsts.clear()  # it is judged anew
        return found

    def may_return(self, model: str, waiting_since: float) -> bool:
        """Whether requests wait for a node for `model`: one is healthy, went down lately, or comes on demand."""
        if self.clock() - waiting_since < self.on_demand.get(model, 0.0):
            return True
        since = self.clock() - self.node_wait
        serving = [n for n in self.nodes() if model in (n.models or ()) and n.admits]
        if any(n.healthy or n.down_since > since for n in serving) or self.gone.get(model, -math.inf) > since:
            return True
        return not self._nodes and self._start > since  # it has just started, and its nodes may not know that yet

    def absence(self, model: str) -> RequestError:
        """The error that says why no node can serve `model`."""
        shown = repr(model[:100])
        if model in self.on_demand:
            seconds = self.on_demand[model]
            return RequestError(
                "engine_unavailable", f"no node for {shown} came within {seconds:g} s; try again", "model"
            )
        if model in self.gone or any(model in (node.models or ()) for node in self.nodes()):
            return RequestError("engine_unavailable", f"no node that serves {shown} is healthy; try again", "model")
        started = not self._nodes and self.clock() - self._start < STARTED_SECONDS and self._config.node_wait > 0
        if started or any(node.models is None for node in self.nodes()):
            return RequestError(
                "engine_unavailable", f"{shown} is not known, and a node could not be asked yet; try again", "model"
            )
        return unknown_model(model)

    def models(self, aliases: Mapping[str, str]) -> list[dict[str, Any]]:
        """The union of the healthy nodes' models, those on demand, and their aliases, each once, by name."""
        union: ModelEntries = {}
        for node in self.nodes():
            if node.healthy:
                union = {**(node.models or {}), **union}
        absent = self.on_demand.keys() - union.keys()
        union |= {name: {"id": name, "object": "model", "created": 0, "owned_by": "lmkit"} for name in absent}
        union |= {alias: union[model] | {"id": alias} for alias, model in aliases.items() if model in union}
        return [union[name] for name in sorted(union)]

    def names(self, aliases: Mapping[str, str]) -> set[str]:
        """All names that requests may give."""
        return {*aliases, *self.on_demand}.union(*(node.models or () for node in self.nodes()))

    @contextmanager
    def holding(self, model: str, tokens: int) -> Iterator[None]:
        """Count one request that waits for a node while the block runs."""

        def change(sign: int) -> None:
            requests, before = self.held.get(model, Held())
            self.held[model] = Held(requests + sign, before + sign * tokens)
            if not self.held[model].requests:
                del self.held[model]

        change(1)
        try:
            yield
        finally:
            change(-1)

    @contextmanager
    def using(self, node: Node, prompt: Sequence[Cut] = ()) -> Iterator[None]:
        """Count one request on a node while the block runs, however it ends. The node uses its prompt until then."""
        self._picks += 1
        node.last_pick = self._picks
        node.in_flight += 1
        node.breaker.begin()
        try:
            yield
        finally:
            node.breaker.end()
            node.in_flight -= 1
            self.prefixes.touch(node, prompt, self.clock())

    def keeps(self, node: Node, seconds: float | None) -> None:
        """The node still has what it used in the last so many seconds, and has lost the rest. None: it does not say."""
        node.tells_losses = seconds is not None
        if seconds is not None:
            self.prefixes.expire(node, self.clock() - seconds)

    @contextmanager
    def prefilling(self, node: Node, tokens: int) -> Iterator[None]:
        """Count a prompt's tokens on a node until its first byte has come, which measures the node's pace."""
        ahead, computed, start = node.load + tokens, node.queued + tokens, self.clock()
        node.queued += tokens
        try:
            yield
            node.work += LATENCY_DECAY * (ahead - node.work)
            node.worked += LATENCY_DECAY * (self.clock() - start - node.worked)
            node.firsts.append((self.clock() - start, computed))
        finally:
            node.queued -= tokens

    def answered(self, node: Node, model: str, status: int, seconds: float) -> None:
        """Record a response whose first byte came after `seconds`."""
        node.answers[model, status] += 1
        node.latency_at = self.clock()
        node.latency = seconds if node.latency is None else node.latency + LATENCY_DECAY * (seconds - node.latency)

    def status(self) -> list[dict[str, Any]]:
        """The admin API's view of each node. It never contains a key."""
        now, ramping = self.clock(), self.ramps([node for node in self.nodes() if node.healthy])
        return [
            {
                "url": node.url,
                "id": node.id,
                "origin": node.origin,
                "healthy": node.healthy,
                "draining": not node.admits,
                "tags": node.config.tags,
                "role": node.config.role,
                "reason": node.reason,
                "models": sorted(node.models or ()),
                "in_flight": node.in_flight,
                "queued_tokens": node.queued,
                "other_requests": node.others,
                "kv_use": node.kv_use,
                "requests": sum(node.answers.values()),
                "failovers": node.failovers,
                "breaks": node.breaks,
                "breaker": node.breaker.state,
                "breaker_opened": node.breaker.opened,
                "breaker_reason": node.breaker.why,
                "ejections": node.ejections,
                "latency_seconds": node.latency,
                "weight": node.config.weight,
                "ramp": ramping.get(node, 1.0),
                "lease_seconds_left": None if node.lease_until is None else max(0.0, node.lease_until - now),
            }
            for node in self.nodes()
        ]
