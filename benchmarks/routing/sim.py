"""Nodes as numbers, and the proxy's own registry and router in front of them, under a virtual clock.

A node computes one prompt after the other, without the tokens that its cache has, and decodes all requests beside each
other. The router sees what it sees in the proxy: requests that it sent, first bytes, and checks every five seconds.
"""

from __future__ import annotations

import heapq
import itertools
from collections import OrderedDict
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from random import Random
from typing import Any

from benchmarks.routing.trace import Ask, Conversation, Shape, conversations
from lmkit.config import PolicyName
from lmkit.proxy.config import NodeConfig, ProxyConfig
from lmkit.proxy.moves import MAX_RESENDS
from lmkit.proxy.policies import POLICIES, Policy
from lmkit.proxy.registry import Node, Registry
from lmkit.proxy.retries import RetryBudget
from lmkit.proxy.router import Router, Routing

CHECK_SECONDS = 5.0
SLOWER = 10
BREAK_SECONDS = 0.05  # until a sick node breaks off
RETRY_SECONDS = 0.5  # until a request without any node is tried again


@dataclass(frozen=True)
class Machine:
    """What a node can do, and what it costs."""

    prefill: float = 2000.0  # tokens a second
    step: float = 0.03  # seconds of a decode step of one sequence,
    step_each: float = 0.001  # and of each further one
    kv_tokens: int = 60_000
    dollars: float = 2.0  # an hour


class Engine:
    """A node's other side: its queue, batch and cache."""

    def __init__(self, machine: Machine) -> None:
        self.machine = self.whole = machine
        self.alive = True
        self.reachable = True
        self.sick = False  # it takes requests, and breaks off each
        self.running = dict[int, Flight]()
        self.free_at = 0.0  # when its prompts are computed
        self.busy = 0.0  # seconds of computing
        self._cache: OrderedDict[tuple[str, int], int] = OrderedDict()  # a text -> its tokens; used longest ago first
        self._used = 0
        self._used_at = dict[tuple[str, int], float]()
        self.kept_since = 0.0  # it has all that it used since then

    def start(self, ask: Ask, now: float) -> tuple[float, float, int]:
        """(time of the first token, time of the last one, cached tokens)."""
        m = self.machine
        cached = min(self.cached(ask), ask.tokens - 1)
        prefill = (ask.tokens - cached) / m.prefill * (1 + len(self.running) / 64)
        first = max(now, self.free_at) + prefill
        self.free_at = first
        step = m.step + m.step_each * len(self.running)
        self.busy += prefill + ask.output * step / (1 + len(self.running))
        self._keep(("group", ask.group), ask.group_tokens, now)
        self._keep(("own", ask.conversation), ask.tokens + ask.output - ask.group_tokens, now)
        return first, first + ask.output * step, cached

    def lose(self) -> None:
        """Its process ends."""
        self._cache.clear()
        self._used, self.free_at = 0, 0.0
        self._used_at.clear()

    def cached(self, ask: Ask) -> int:
        """Tokens of its prompt."""
        group = self._cache.get(("group", ask.group), 0)
        if group < ask.group_tokens:
            return group
        return group + min(self._cache.get(("own", ask.conversation), 0), ask.tokens - group)

    def _keep(self, text: tuple[str, int], tokens: int, now: float) -> None:
        self._used_at[text] = now
        self._used += tokens - self._cache.get(text, 0)
        self._cache[text] = tokens
        self._cache.move_to_end(text)
        while self._used > self.machine.kv_tokens and len(self._cache) > 1:
            oldest = next(iter(self._cache))
            over = self._used - self.machine.kv_tokens
            self.kept_since = max(self.kept_since, self._used_at[oldest])
            if self._cache[oldest] > over:  # the end of a text leaves before its beginning
                self._cache[oldest] -= over
                self._used -= over
            else:
                self._used -= self._cache.pop(oldest)


@dataclass(eq=False)
class Flight:
    """A request under way."""

    ask: Ask
    conversation: Conversation
    arrived: float
    number: int
    counted: ExitStack = field(default_factory=ExitStack)
    prefilling: ExitStack = field(default_factory=ExitStack)
    tried: list[Node] = field(default_factory=list)
    resends: int = 0
    has_first: bool = False


@dataclass
class Result:
    """What a run has shown."""

    ttft: list[tuple[float, float]] = field(default_factory=list)  # (arrival, seconds)
    ends: float = 0.0
    prompt_tokens: int = 0
    cached_tokens: int = 0
    retries: int = 0
    failed: int = 0
    arrivals: list[float] = field(default_factory=list)  # of requests
    attempts: list[float] = field(default_factory=list)  # when a node got a request
    busy_dollars: float = 0.0
    imbalance: list[float] = field(default_factory=list)  # the fullest node beside the mean, at each check

    def quantile(self, q: float, start: float = 0.0, end: float = float("inf")) -> float:
        values = sorted(seconds for at, seconds in self.ttft if start <= at < end)
        return values[min(len(values) - 1, int(q * len(values)))] if values else float("nan")

    @property
    def hit_rate(self) -> float:
        return self.cached_tokens / self.prompt_tokens


Disturbance = tuple[float, Callable[["Simulation"], None]]


class Simulation:
    """One run of a trace with one policy."""

    def __init__(
        self, policy: PolicyName | Policy, machines: list[Machine], shape: Shape, *, seed: int = 0,
        disturbances: list[Disturbance] | None = None, believed_kv: float = 1.0, tells_losses: bool = True,
        **options: Any,
    ) -> None:  # fmt: skip
        """A policy that is not the proxy's own is a function. `believed_kv`: the size of caches that nodes tell,
        beside the real one. `tells_losses`: they also tell since when they have lost nothing.

        `options` are fields of the proxy's configuration.
        """
        self.now, self.result, self._shape = 0.0, Result(), shape
        self._tells_losses = tells_losses
        self._own = None if isinstance(policy, str) else policy
        self._policy: PolicyName = policy if isinstance(policy, str) else "prefix"
        config = ProxyConfig(max_nodes=len(machines), policy=self._policy, **options)
        self.registry = Registry(config, lambda: self.now, Random(seed))
        self._budget = RetryBudget(config.retry_share, config.max_in_flight, lambda: self.now, Random(seed))
        self.registry.prefixes._max_entries = 1 << 22
        self._router = Router(self.registry, config, Random(seed))
        self.engines = dict[Node, Engine]()
        for i, machine in enumerate(machines):
            node = self.registry.add(NodeConfig(url=f"http://node-{i}", models=("m",)), "config")
            node.kv_tokens = round(machine.kv_tokens * believed_kv)
            self.registry.succeeded(node)
            self.engines[node] = Engine(machine)
        self._events: list[tuple[float, int, Callable[..., None], tuple[Any, ...]]] = []
        self._numbers, self._open, self.started = itertools.count(), 0, 0
        self._feed = conversations(shape, Random(seed + 1))
        self.at(CHECK_SECONDS, self._check)
        for when, disturb in disturbances or ():
            self.at(when, disturb, self)

    def at(self, when: float, call: Callable[..., None], *arguments: Any) -> None:
        heapq.heappush(self._events, (when, next(self._numbers), call, arguments))

    def run(self) -> Result:
        self._next_conversation()
        previous = POLICIES[self._policy]
        try:
            POLICIES[self._policy] = self._own or previous
            while self._events and (self._open or self.started < self._shape.requests):
                self.now, _, call, arguments = heapq.heappop(self._events)
                call(*arguments)
        finally:
            POLICIES[self._policy] = previous
        self.result.ends = self.now
        self.result.busy_dollars = sum(e.busy * e.machine.dollars / 3600 for e in self.engines.values())
        return self.result

    def kill(self, node: Node) -> None:
        """Its process ends; its requests go to other nodes."""
        engine = self.engines[node]
        engine.alive = False
        engine.lose()
        self._cut(engine)

    def cut_off(self, node: Node) -> None:
        """The network to it ends. It keeps its cache."""
        self.engines[node].reachable = False
        self._cut(self.engines[node])

    def slow(self, node: Node) -> None:
        """It computes ten times as slowly, and its checks are good."""
        m = self.engines[node].machine
        slower = replace(m, prefill=m.prefill / SLOWER, step=m.step * SLOWER, step_each=m.step_each * SLOWER)
        self.engines[node].machine = slower

    def sicken(self, node: Node) -> None:
        """It breaks off each request, and its checks are good."""
        self.engines[node].sick = True

    def restore(self, node: Node) -> None:
        engine = self.engines[node]
        engine.alive, engine.reachable, engine.sick, engine.machine = True, True, False, engine.whole

    def arrive(self, conversation: Conversation) -> None:
        self.started += 1
        self._open += 1
        self._budget.earn()
        self.result.arrivals.append(self.now)
        self._send(Flight(conversation.next(), conversation, self.now, next(self._numbers)))

    # ---- events

    def _next_conversation(self) -> None:
        if self.started < self._shape.requests:
            when, conversation = next(self._feed)
            self.at(when, self._begin, conversation)

    def _begin(self, conversation: Conversation) -> None:
        self.arrive(conversation)
        self._next_conversation()

    def _send(self, flight: Flight) -> None:
        ask, registry = flight.ask, self.registry
        routing = Routing("m", self._policy, tokens=ask.tokens, session=str(ask.conversation), prompt=ask.cuts())
        while candidates := registry.candidates("m", flight.tried):
            choice = self._router.choose(candidates, routing)
            node, engine = choice.node, self.engines[choice.node]
            flight.tried.append(node)
            if not (engine.alive and engine.reachable):  # the connection fails
                registry.failed(node, "cut")
                self.result.retries += 1
                continue
            flight.counted.enter_context(registry.using(node))
            self.result.attempts.append(self.now)
            if engine.sick:
                self.at(self.now + BREAK_SECONDS, self._break, flight, node)
                return
            flight.prefilling.enter_context(registry.prefilling(node, choice.missing))
            first, last, cached = engine.start(ask, self.now)
            engine.running[flight.number] = flight
            self.result.prompt_tokens += ask.tokens
            self.result.cached_tokens += cached
            self.at(first, self._first, flight, node, flight.number)
            self.at(last, self._last, flight, node, flight.number)
            return
        flight.tried.clear()
        self.at(self.now + RETRY_SECONDS, self._send, flight)

    def _break(self, flight: Flight, node: Node) -> None:
        flight.counted.close()
        node.breaker.record(good=False)
        flight.resends += 1
        others = self.registry.candidates("m", flight.tried)
        if flight.resends <= MAX_RESENDS and others and self._budget.spend():
            self.at(self.now + self._budget.pause(flight.resends), self._send, flight)
        else:
            self.result.failed += 1
            self._open -= 1

    def _first(self, flight: Flight, node: Node, number: int) -> None:
        if self.engines[node].running.get(number) is flight:
            flight.prefilling.close()
            self.registry.answered(node, "m", 200, self.now - flight.arrived)
            if not flight.has_first:
                flight.has_first = True
                self.result.ttft.append((flight.arrived, self.now - flight.arrived))

    def _last(self, flight: Flight, node: Node, number: int) -> None:
        if self.engines[node].running.pop(number, None) is flight:
            flight.counted.close()
            node.breaker.record(good=True)
            self._open -= 1
            if flight.conversation.left and self.started < self._shape.requests:
                self.at(self.now + flight.conversation.pause(), self.arrive, flight.conversation)

    def _cut(self, engine: Engine) -> None:
        flights = list(engine.running.values())
        engine.running.clear()
        for flight in flights:
            flight.prefilling.close()
            flight.counted.close()
            flight.number = next(self._numbers)
            flight.tried.clear()
            self.result.retries += 1
            self._send(flight)

    def _check(self) -> None:
        """The proxy's round of checks."""
        for node, engine in self.engines.items():
            if engine.alive and engine.reachable:
                self.registry.succeeded(node)
                if self._tells_losses:
                    self.registry.keeps(node, self.now - engine.kept_since)
            else:
                self.registry.failed(node, "cut")
        self.registry.eject()
        counts = [len(e.running) for e in self.engines.values() if e.alive and e.reachable]
        if sum(counts):
            self.result.imbalance.append(max(counts) * len(counts) / sum(counts))
        self.at(self.now + CHECK_SECONDS, self._check)
