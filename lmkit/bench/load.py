"""Sends conversations at their times with a limit of concurrency, and measures whether the client keeps up."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import math
import time
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace

import numpy as np

from lmkit.bench.arrivals import arrival_times
from lmkit.bench.client import Client, StreamedResponse
from lmkit.bench.metrics import distribution
from lmkit.bench.schema import ClientHealth
from lmkit.bench.workload import Conversation, Dialogue, Turn

TICK_SECONDS = 0.005
MAX_CPU_SHARE = 0.9  # above these limits the client's own work affects the figures
MAX_LAG_MS = 10.0


@dataclass(frozen=True)
class LoadPoint:
    """One load: the arrival of requests, and its duration."""

    rate: float = math.inf  # conversations per second; inf = as soon as the limit allows
    concurrency: int | None = None  # conversations at once; None = no limit
    burstiness: float = 1.0
    duration: float | None = None  # seconds in which requests are sent; None = until all conversations are
    ramp_seconds: float = 0.0  # the rate or concurrency rises; requests sent meanwhile are not measured
    think_seconds: float = 0.0  # between an answer and the next turn
    seed: int = 0


@dataclass(frozen=True)
class Sent:
    """One request and its answer."""

    conversation: int
    turn_idx: int
    turn: Turn
    prompt: Dialogue  # as it was when it was sent
    scheduled: float
    answer: StreamedResponse


@dataclass
class LoadResult:
    origin: float  # the run's time 0, on time.perf_counter
    sent: list[Sent] = field(default_factory=list)
    skipped_turns: int = 0  # of conversations in which a turn failed
    reused: int = 0  # conversations sent again in a run by duration
    health: ClientHealth | None = None


class Load:
    """One run of one load."""

    def __init__(
        self,
        client: Client,
        conversations: Sequence[Conversation],
        point: LoadPoint,
        on_done: Callable[[], None] = lambda: None,
    ) -> None:
        """`on_done` is called after each conversation."""
        self._client, self._conversations, self._point = client, conversations, point
        self._on_done = on_done
        self._limit = asyncio.Semaphore(1 if self._ramps_concurrency else point.concurrency or 1 << 30)
        self._late: list[float] = []
        self._num_started = 0
        self._result = LoadResult(0.0)

    async def run(self) -> LoadResult:
        async with _watched() as watch:
            self._result.origin = time.perf_counter()
            async with asyncio.TaskGroup() as group:
                ramp = group.create_task(self._raise_limit())
                async for idx, scheduled in self._starts():
                    group.create_task(self._converse(idx, scheduled))
                ramp.cancel()
        self._result.health = watch.health(self._late)
        self._result.reused = max(0, self._num_started - len(self._conversations))
        return self._result

    @property
    def _ramps_concurrency(self) -> bool:
        point = self._point
        return math.isinf(point.rate) and point.concurrency is not None and point.ramp_seconds > 0

    async def _raise_limit(self) -> None:
        if self._ramps_concurrency:
            steps = self._point.concurrency or 1
            for _ in range(steps - 1):
                await asyncio.sleep(self._point.ramp_seconds / steps)
                self._limit.release()

    async def _starts(self) -> AsyncIterator[tuple[int, float]]:
        """(number of the conversation, its scheduled time), each when it may start.

        It then holds one unit of the limit.
        """
        free = origin = self._result.origin
        for idx, offset in self._arrivals():
            ready = max(origin + offset, free)
            await asyncio.sleep(max(0.0, ready - time.perf_counter()))
            if not math.isinf(self._point.rate):
                self._late.append(time.perf_counter() - ready)
            held_back = self._limit.locked()
            await self._limit.acquire()
            free = time.perf_counter() if held_back else free
            if self._is_over():
                return
            self._num_started += 1
            yield idx, time.perf_counter() if math.isinf(self._point.rate) else origin + offset

    def _arrivals(self) -> Iterator[tuple[int, float]]:
        point, count = self._point, len(self._conversations)
        rng = np.random.default_rng(point.seed)
        times = arrival_times(point.rate, burstiness=point.burstiness, ramp_seconds=point.ramp_seconds, rng=rng)
        if point.duration is None:
            return zip(range(count), times, strict=False)
        duration = point.duration
        return zip(itertools.cycle(range(count)), itertools.takewhile(lambda t: t < duration, times), strict=False)

    def _is_over(self) -> bool:
        duration = self._point.duration
        return duration is not None and time.perf_counter() - self._result.origin >= duration

    async def _converse(self, idx: int, scheduled: float) -> None:
        conversation = self._conversations[idx]
        dialogue = Dialogue(conversation.is_chat)
        try:
            for turn_idx, turn in enumerate(conversation.turns):
                if turn_idx:
                    await asyncio.sleep(self._point.think_seconds)
                    scheduled = time.perf_counter()
                    if self._is_over():
                        return
                dialogue.ask(turn)
                answer = await self._client.send(dialogue, turn.max_tokens)
                self._result.sent.append(Sent(idx, turn_idx, turn, replace(dialogue), scheduled, answer))
                if answer.error is not None:
                    self._result.skipped_turns += len(conversation.turns) - turn_idx - 1
                    return
                dialogue.answer(answer.text)
        finally:
            self._limit.release()
            self._on_done()


class _Watch:
    """Measures the client's own process while it generates load."""

    def __init__(self) -> None:
        self._lags: list[float] = []
        self._wall, self._cpu = time.perf_counter(), time.process_time()

    async def tick(self) -> None:
        while True:
            due = time.perf_counter() + TICK_SECONDS
            await asyncio.sleep(TICK_SECONDS)
            self._lags.append(time.perf_counter() - due)

    def stop(self) -> None:
        self._wall, self._cpu = time.perf_counter() - self._wall, time.process_time() - self._cpu

    def health(self, late: Sequence[float]) -> ClientHealth:
        lag = distribution(1e3 * seconds for seconds in self._lags)
        arrival = distribution(1e3 * seconds for seconds in late)
        share = self._cpu / self._wall
        behind = any(d is not None and d.p99 > MAX_LAG_MS for d in (lag, arrival))
        return ClientHealth(share, lag, arrival, share > MAX_CPU_SHARE or behind)


@asynccontextmanager
async def _watched() -> AsyncIterator[_Watch]:
    watch = _Watch()
    ticking = asyncio.create_task(watch.tick())
    try:
        yield watch
    finally:
        watch.stop()
        ticking.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await ticking
