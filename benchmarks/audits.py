"""Damage in cached KV and the time until audits find it; and what audits and receipts cost.

    python -m benchmarks.audits [--rate 100] [--every 1000] [--tokens 1] [--seconds 60] [--json FILE]
    python -m benchmarks.audits --cost

planted: an engine of the demo, in this process, gets `rate` hits a second, of four prefixes of 200 tokens in turn.
After a second a bit flips in a block of two of them, and blocks of the others, which are two tenants', change places.

cost: the same requests with and without, in turns, so that other work on the machine slows both alike. `ratio` is the
seconds with / without, the mean over pairs in logarithms, with the 95 % interval of a bootstrap. Audits: mean seconds
of a hit that arrives at random, at half of what the engine can do, one of `every` audited. Receipts: seconds of 32
answers of 24 tokens to 8 clients of a server, each answer with a receipt that nobody fetches. `ms_without` is a window
without them, and `cpu_ms` what this process computes for a request: the engine, or the front end of a server with its
clients. `waited` is the engine's count, seconds that hits waited for audits at most / seconds of all hits.
"""

from __future__ import annotations

import argparse
import asyncio
import math
import random
import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import closing
from itertools import count
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks import report
from benchmarks.next_turns import interval, served
from lmkit.config import EngineConfig
from lmkit.formats.hub import DEMO_FOLDER
from lmkit.turbo.engine.engine import Engine
from lmkit.turbo.request import Request, SamplingParams

PREFIX, TENANTS = 200, ("t", "t", "t", "u")  # tokens of a prefix; whose it is
HITS, ANSWERS, CLIENTS, LENGTH = 20, 32, 8, 24  # of a window


def demo(every: int) -> Engine:
    return Engine(str(DEMO_FOLDER), EngineConfig(kv_memory=16 << 20, max_model_len=512, audit=every))


def prefix(number: int) -> list[int]:
    return [int(token) for token in np.random.default_rng(number).integers(100, 4000, PREFIX)]


def hits(tokens: int) -> Iterator[Request]:
    """Requests of the prefixes in turn. The first of each is no hit."""
    for i in count():
        ids, tenant = [*prefix(i % len(TENANTS)), i % 50], TENANTS[i % len(TENANTS)]
        params = SamplingParams(max_tokens=tokens, seed=0, ignore_eos=True)
        yield Request(request_id=f"r{i}", prompt_ids=ids, params=params, tenant=tenant)


def damage(engine: Engine) -> int:
    """Flip bits and swap blocks. Returns how many are wrong."""
    (cache,), memory = engine.scheduler.kv.caches, engine.runner._blocks.parts  # type: ignore[attr-defined]
    a, b, c, d = (
        cache.match((tenant, ""), np.array(prefix(i), np.int32)).blocks[2] for i, tenant in enumerate(TENANTS)
    )
    memory[0][[a, b], 9] ^= 1
    for part in memory:
        part[[c, d]] = part[[d, c]]
    return 4


def planted(rate: float, every: int, tokens: int, seconds: float) -> dict[str, Any]:
    with closing(demo(every)) as engine:
        requests, start, sent, wrong, found = hits(tokens), time.perf_counter(), 0, 0, list[float]()
        while (now := time.perf_counter() - start) < seconds + 1 and not 0 < wrong <= len(found):
            while sent < now * rate:
                engine.add(next(requests))
                sent += 1
            if engine.has_work():
                engine.step()
            if not wrong and now > 1:
                wrong = damage(engine)
            stats = engine.scheduler.stats()
            found += [now - 1] * (stats.audits["differences"] - len(found))
        waiting = stats.num_waiting + stats.num_running
        return {
            "rate": rate, "every": every, "tokens": tokens, "wrong": wrong,
            "found_after": " ".join(f"{at:.0f}" for at in found) or "none",
            "hits": stats.audits["hits"], "left": waiting, "dropped": stats.audits["dropped"],
            "audited_tokens": stats.audits["tokens"], "waited": stats.ahead_waited,
        }  # fmt: skip


def compared(name: str, window: Callable[[bool, int], float], per: int, seconds: float) -> dict[str, Any]:
    """Pairs of windows (is it on, seed) -> seconds; each has `per` requests."""
    ratios, cpu, without = list[float](), {True: 0.0, False: 0.0}, list[float]()
    end = time.perf_counter() + seconds
    while time.perf_counter() < end or len(ratios) < 4:
        order = (True, False) if len(ratios) % 2 else (False, True)
        found = {}
        for is_on in order:
            start = time.process_time()
            found[is_on] = window(is_on, len(ratios))
            cpu[is_on] += time.process_time() - start
        without.append(found[False])
        ratios.append(math.log(found[True] / found[False]))
    mean, low, high = map(math.exp, interval(ratios, random.Random(0)))
    row = {"cost": name, "pairs": len(ratios), "ratio": mean, "low": low, "high": high}
    row["ms_without"] = 1e3 * statistics.fmean(without)
    return row | {
        f"cpu_ms_{name}": 1e3 * cpu[is_on] / len(ratios) / per for name, is_on in (("with", True), ("without", False))
    }


def audit_cost(every: int, seconds: float) -> dict[str, Any]:
    with closing(demo(every)) as engine:
        requests, total, audits = hits(1), 0.0, engine.scheduler._next_turns.audits
        note = audits.note

        def window(is_on: bool, seed: int) -> float:
            nonlocal total
            audits.note = note if is_on else lambda _: None  # type: ignore[method-assign, assignment]
            rng, at, taken = random.Random(seed), time.perf_counter(), list[float]()
            due = [at := at + rng.expovariate(rate) for _ in range(HITS)]
            arrived: dict[str, float] = {}
            while len(taken) < HITS:
                while due and due[0] <= time.perf_counter():
                    arrived[(request := next(requests)).request_id] = due.pop(0)
                    engine.add(request)
                for output in engine.step() if engine.has_work() else ():
                    taken.append(time.perf_counter() - arrived[output.request_id])
            total += sum(taken)
            return statistics.fmean(taken)

        rate = 1e3
        rate = 0.5 / statistics.median(window(False, -i) / HITS * 2 for i in range(1, 9))  # a queue's mean is half
        row = compared(f"audits, 1 of {every}", window, HITS, seconds)
        return row | {"waited": engine.scheduler.stats().ahead_waited / total}


def receipt_cost(seconds: float) -> dict[str, Any]:
    async def measure() -> dict[str, Any]:
        async with served("demo", max_model_len=512, max_batch_size=16) as (client, _):
            loop = asyncio.get_running_loop()

            async def answers(is_on: bool, seed: int) -> float:
                async def of_client(number: int) -> None:
                    for i in range(ANSWERS // CLIENTS):
                        body = {"model": "m", "prompt": f"def f{number}_{i}_{seed}(", "max_tokens": LENGTH, "seed": 1}
                        headers = {"x-lmkit-receipt": str(int(is_on))}
                        answer = await client.post("/v1/completions", json=body | {"ignore_eos": True}, headers=headers)
                        assert answer.status_code == 200, answer.text

                start = time.perf_counter()
                await asyncio.gather(*map(of_client, range(CLIENTS)))
                return time.perf_counter() - start

            def window(is_on: bool, seed: int) -> float:
                return asyncio.run_coroutine_threadsafe(answers(is_on, seed), loop).result()

            await answers(True, -1)
            return await asyncio.to_thread(compared, "receipts", window, ANSWERS, seconds)

    return asyncio.run(measure())


def main() -> None:
    parser = argparse.ArgumentParser(description="Damage that audits find, and what audits and receipts cost.")
    parser.add_argument("--rate", type=float, default=100.0, help="hits a second")
    parser.add_argument("--every", type=int, default=1000, help="of so many hits one is audited")
    parser.add_argument("--tokens", type=int, default=1, help="of an answer")
    parser.add_argument("--seconds", type=float, default=60.0, help="at most, without the start")
    parser.add_argument("--cost", action="store_true", help="measure what they cost")
    parser.add_argument("--json", type=Path, help="also write the figures here")
    given = parser.parse_args()
    if given.cost:
        rows = [audit_cost(given.every, given.seconds / 2), receipt_cost(given.seconds / 2)]
    else:
        rows = [planted(given.rate, given.every, given.tokens, given.seconds)]
    report.show(rows)
    if given.json:
        report.save(given.json, "audits", rows, model="demo")


if __name__ == "__main__":
    main()
