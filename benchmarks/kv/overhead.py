"""The cost of the prefix cache when nothing is shared, and the time to look up a long history."""

from __future__ import annotations

import random
import statistics
import time
from collections.abc import Callable
from typing import Any

import numpy as np

from benchmarks.kv.common import Client, Row, Setting, checkpoint, random_tokens
from benchmarks.kv.hit_rate import BLOCK_SIZE, TraceRunner, limits, request
from benchmarks.kv.trace import VOCAB, Item
from benchmarks.random_llama import Shape
from lmkit.turbo.kv.block_pool import BlockPool
from lmkit.turbo.kv.radix_cache import RadixCache
from lmkit.turbo.scheduling.scheduler import Scheduler

SHAPE = Shape(512, 2048, 4, 8, 2, 64, 8192, 16384)  # 24M parameters: a larger model makes the share smaller
REQUESTS, PROMPT, ANSWER, ROUNDS = 8, 512, 64, 8  # requests at once; tokens; rounds of each engine
MOST_SHARE = 0.01
HISTORY, MOST_LOOKUP = 200_000, 1e-3  # tokens, seconds


class Stopwatch:
    """Time inside some methods of some objects. Nested calls among them count once."""

    def __init__(self) -> None:
        self.seconds = 0.0
        self._depth = 0

    def watch(self, owner: Any, *names: str) -> None:
        for name in names:
            setattr(owner, name, self._timed(getattr(owner, name)))

    def _timed(self, function: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            self._depth += 1
            begin = time.perf_counter()
            try:
                return function(*args, **kwargs)
            finally:
                self._depth -= 1
                if self._depth == 0:
                    self.seconds += time.perf_counter() - begin

        return call


def cases(setting: Setting) -> list[Row]:
    """The share of an engine's time that its cache takes, with prompts that have nothing in common.

    The pool is small, so that blocks are evicted all the time. The same load runs in turns without a cache and is shown
    beside it. The difference is smaller than the variation of a shared machine.
    """
    rounds, generator = (1 if setting.quick else ROUNDS), random.Random(0)
    path, stopwatch = checkpoint(setting, SHAPE), Stopwatch()
    blocks = 2 * REQUESTS * -(-(PROMPT + ANSWER) // BLOCK_SIZE)
    kv_memory = blocks * BLOCK_SIZE * SHAPE.kv_token_values * 2
    clients = {
        cached: Client(
            path, prefix_cache=cached, kv_memory=kv_memory, max_batch_size=REQUESTS, num_threads=setting.threads,
            max_model_len=2 * (PROMPT + ANSWER),
        )
        for cached in (False, True)
    }  # fmt: skip
    for client in clients.values():
        run_round(client, generator)
    manager = clients[True].engine.scheduler.kv
    stopwatch.watch(manager, "find", "find_below", "acquire", "publish", "release")
    stopwatch.watch(manager.caches[0], "evict")
    seconds: dict[bool, list[float]] = {False: [], True: []}
    for turn in range(rounds):
        for cached in sorted(clients, reverse=turn % 2 == 1):
            seconds[cached].append(run_round(clients[cached], generator))
    return [row(stopwatch.seconds, seconds, clients[True].engine.stats().evicted_blocks)]


def row(inside: float, seconds: dict[bool, list[float]], evicted: int) -> Row:
    """The row of the overhead. `inside` are the seconds spent in the cache, out of all rounds with a cache."""
    share = inside / sum(seconds[True])
    tokens = len(seconds[True]) * REQUESTS * (PROMPT + ANSWER)
    facts = {
        "share": share,
        "us_per_token": 1e6 * inside / tokens,
        "time_with_by_without": statistics.median(seconds[True]) / statistics.median(seconds[False]),
        "evicted_blocks": evicted,
    }
    return Row("cost of the cache where nothing is shared, at most 1 %", MOST_SHARE / share, 1.0, facts)


def run_round(client: Client, generator: random.Random) -> float:
    """Seconds to answer new prompts that are queued all at once."""
    prompts = [random_tokens(generator, PROMPT, SHAPE.vocab) for _ in range(REQUESTS)]
    begin = time.perf_counter()
    for prompt in prompts:
        client.add(prompt, ANSWER)
    for _ in client.steps():
        pass
    return time.perf_counter() - begin


def lookups(setting: Setting) -> list[Row]:
    """The case "lookup of a 200k-token history within a millisecond"."""
    match, admission = match_seconds(HISTORY), admission_seconds(HISTORY)
    facts = {"us_match": 1e6 * match, "us_admission": 1e6 * admission}
    return [Row("lookup of a 200k-token history within 1 ms", MOST_LOOKUP / match, 1.0, facts)]


def match_seconds(num_tokens: int, rounds: int = 51) -> float:
    """The median time of RadixCache.match."""
    num_blocks = -(-num_tokens // BLOCK_SIZE)
    pool = BlockPool(num_blocks)
    cache = RadixCache(pool, BLOCK_SIZE)
    tokens = np.random.default_rng(0).integers(2, VOCAB, num_tokens, dtype=np.int32)
    cache.insert(("", ""), tokens, pool.allocate(num_blocks))

    def look() -> None:
        assert cache.match(("", ""), tokens).num_tokens == num_tokens

    return _median(look, rounds)


def admission_seconds(num_tokens: int, rounds: int = 11) -> float:
    """The time of a whole Scheduler.schedule that admits such a request."""
    tokens = np.random.default_rng(0).integers(2, VOCAB, num_tokens + 1, dtype=np.int32)
    item = Item(tokens[:-1], tokens[-1:])
    scheduler, runner = Scheduler(limits([item], num_tokens // BLOCK_SIZE + 8, 1), ()), TraceRunner([item])
    times = []
    for _ in range(1 + rounds):
        scheduler.add(request(0, item))
        begin = time.perf_counter()
        plan = scheduler.schedule()
        times.append(time.perf_counter() - begin)
        while plan is not None:
            scheduler.update(plan, runner.execute(plan))
            plan = scheduler.schedule()
        scheduler.take_outputs()
    return statistics.median(times[1:])


def _median(function: Callable[[], None], rounds: int) -> float:
    times = []
    for _ in range(rounds):
        begin = time.perf_counter()
        function()
        times.append(time.perf_counter() - begin)
    return statistics.median(times)
