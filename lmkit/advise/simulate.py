"""Requests through simulated replicas: the engine's own scheduler and blocks, the proxy's own router, a virtual clock.

A replica takes new requests between two steps, and plans a step while the one before it runs, as the engine does. A
step takes what its StepCosts say. Nothing else takes time.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from random import Random

import msgspec
import numpy as np

from lmkit.advise.costs import StepCosts, TypeCosts, work_of
from lmkit.advise.trace import VOCAB
from lmkit.errors import RequestError
from lmkit.proxy.config import NodeConfig, ProxyConfig
from lmkit.proxy.prefixes import cuts
from lmkit.proxy.registry import Node, Registry
from lmkit.proxy.router import Router, Routing
from lmkit.turbo.plan import Sampled, SampledToken, StepPlan
from lmkit.turbo.request import Request, SamplingParams, StepOutput
from lmkit.turbo.scheduling.limits import SchedulerLimits
from lmkit.turbo.scheduling.scheduler import Scheduler

_TOKEN = Sampled([SampledToken(0)])
_MODEL = "model"


@dataclass(frozen=True)
class Asked:
    """A request of the simulation."""

    at: float  # seconds
    prompt: np.ndarray  # int32 [n]
    num_output: int


@dataclass(frozen=True, order=True)
class Setting:
    """What to choose."""

    replicas: int
    kv_dtype: str
    prefix_cache: bool
    max_batch_size: int


class Outcome(msgspec.Struct, frozen=True, kw_only=True):
    """What clients would see. Percentiles are of all answered requests and of all their tokens but the first."""

    ttft_ms: list[float]  # one for each answered request, in the order of first tokens
    itl_ms: list[float]
    queue_ms: float  # mean time until a request is admitted
    refused: int
    seconds: float  # from the first arrival to the last token
    output_tokens: int
    served_from_cache: float  # share of prompt tokens

    def ttft(self, percent: float) -> float:
        """Milliseconds; infinity if a request was refused."""
        return math.inf if self.refused else percentile(self.ttft_ms, percent)

    def itl(self, percent: float) -> float:
        return percentile(self.itl_ms, percent)


def percentile(values: Sequence[float], percent: float) -> float:
    """With linear interpolation; 0 of no values."""
    return float(np.percentile(values, percent)) if values else 0.0


@dataclass
class _Flight:
    """A request under way."""

    asked: Asked
    prefilling: ExitStack = field(default_factory=ExitStack)
    counted: ExitStack = field(default_factory=ExitStack)
    added: float = 0.0  # when its replica took it in
    last: float | None = None  # time of its last token


class _Replica:
    """One engine. `ends` is when its oldest step under way ends, None without one."""

    def __init__(self, limits: SchedulerLimits, costs: StepCosts, clock: Callable[[], float]) -> None:
        self._scheduler = Scheduler(limits, (), clock=clock)
        self._costs, self._clock = costs, clock
        self._depth = 2 if limits.overlaps else 1
        self._plans: deque[StepPlan] = deque()
        self._seconds = 0.0  # of the oldest
        self.inbox: list[Request] = []
        self.ends: float | None = None

    def begin(self) -> list[str]:
        """Take in new requests and plan, if the moment is between two steps. Returns the ids of refused requests."""
        refused = []
        for request in self.inbox:
            try:
                self._scheduler.add(request)
            except RequestError:
                refused.append(request.request_id)
        self.inbox.clear()
        while len(self._plans) < self._depth and (plan := self._scheduler.schedule()) is not None:
            self._plans.append(plan)
        if self._plans:
            self._seconds = self._costs.seconds(work_of(self._plans[0]))
            self.ends = self._clock() + self._seconds
        return refused

    def end(self) -> list[StepOutput]:
        """Take in the step that ends now."""
        plan, self.ends = self._plans.popleft(), None
        return self._scheduler.update(
            plan, [_TOKEN if c.num_sampled else Sampled() for c in plan.chunks], self._seconds
        )


class Simulation:
    """One run of `requests`, which are in the order of arrival, with one setting."""

    def __init__(self, requests: Sequence[Asked], model: TypeCosts, setting: Setting, *, seed: int = 0) -> None:
        self._now = 0.0
        self._waiting = deque(enumerate(requests))
        limits = limits_of(model.limits, setting)
        self._replicas = [_Replica(limits, model.costs, lambda: self._now) for _ in range(setting.replicas)]
        config = ProxyConfig(max_nodes=setting.replicas, policy="prefix")
        self._registry = Registry(config, lambda: self._now, Random(seed))
        self._router = Router(self._registry, config, Random(seed))
        self._by_node: dict[Node, _Replica] = {}
        for i, replica in enumerate(self._replicas):
            node = self._registry.add(NodeConfig(url=f"http://replica-{i}", models=(_MODEL,)), "config")
            node.kv_tokens = limits.kv.capacity(limits.max_model_len)
            self._registry.succeeded(node)
            self._by_node[node] = replica
        self._flights: dict[str, _Flight] = {}
        self._ttft: list[float] = []
        self._itl: list[float] = []
        self._queued: list[float] = []
        self._refused = self._cached = self._prompt_tokens = 0

    def run(self) -> Outcome:
        start = self._waiting[0][1].at if self._waiting else 0.0
        while True:
            busy = [replica for replica in self._replicas if replica.ends is not None]
            first = min(busy, key=lambda replica: replica.ends or 0.0, default=None)
            if self._waiting and (first is None or self._waiting[0][1].at <= (first.ends or 0.0)):
                self._arrive(*self._waiting.popleft())
            elif first is not None:
                self._now = first.ends or 0.0
                for output in first.end():
                    self._take(output)
                self._begin(first)
            else:
                break
        return Outcome(
            ttft_ms=self._ttft,
            itl_ms=self._itl,
            queue_ms=float(np.mean(self._queued)) if self._queued else 0.0,
            refused=self._refused,
            seconds=self._now - start,
            output_tokens=len(self._ttft) + len(self._itl),
            served_from_cache=self._cached / max(1, self._prompt_tokens),
        )

    def _arrive(self, number: int, asked: Asked) -> None:
        self._now = asked.at
        flight = self._flights[str(number)] = _Flight(asked)
        replica = self._replicas[0] if len(self._replicas) == 1 else self._route(flight)
        params = SamplingParams(max_tokens=asked.num_output, ignore_eos=True)
        replica.inbox.append(Request(request_id=str(number), prompt_ids=asked.prompt.tolist(), params=params))
        if replica.ends is None:
            self._begin(replica)

    def _route(self, flight: _Flight) -> _Replica:
        prompt = flight.asked.prompt
        found = cuts([prompt.tobytes()])  # as many bytes a token as the proxy counts of JSON
        routing = Routing(_MODEL, "prefix", tokens=len(prompt), prompt=found)
        choice = self._router.choose(self._registry.candidates(_MODEL), routing)
        flight.counted.enter_context(self._registry.using(choice.node, found))
        flight.prefilling.enter_context(self._registry.prefilling(choice.node, choice.missing))
        return self._by_node[choice.node]

    def _begin(self, replica: _Replica) -> None:
        for request in replica.inbox:
            self._flights[request.request_id].added = self._now
        for request_id in replica.begin():
            self._refused += 1
            self._close(self._flights.pop(request_id))

    def _take(self, output: StepOutput) -> None:
        flight = self._flights[output.request_id]
        if output.token_ids and flight.last is None:
            self._ttft.append(1e3 * (self._now - flight.asked.at))
            self._queued.append(1e3 * (flight.added - flight.asked.at + output.queue_seconds))
            self._cached += output.cached_tokens
            self._prompt_tokens += len(flight.asked.prompt)
            flight.prefilling.close()
        elif output.token_ids and flight.last is not None:
            self._itl.append(1e3 * (self._now - flight.last))
        flight.last = self._now
        if output.finish_reason is not None:
            self._close(self._flights.pop(output.request_id))

    def _close(self, flight: _Flight) -> None:
        flight.prefilling.close()
        flight.counted.close()


def limits_of(measured: SchedulerLimits, setting: Setting) -> SchedulerLimits:
    """The limits of an engine with the setting. Its blocks are those that fit, at most those of its batch."""
    of_batch = measured.kv.blocks_for(measured.max_model_len) * setting.max_batch_size
    kv = replace(measured.kv, num_blocks=min(measured.kv.num_blocks, of_batch), prefix_cache=setting.prefix_cache)
    return replace(measured, kv=kv, max_batch_size=setting.max_batch_size, vocab_size=VOCAB)
