"""Damage in cached KV, wherever blocks lie, and the time until it is found. `audit_cost` has what audits cost.

    python -m benchmarks.audits [PLACE ...] [--rate 100] [--every 1000] [--tokens 1] [--seconds 60] [--json FILE]

For each place an engine of the demo, in this process, gets `rate` hits a second, of four prefixes of 200 tokens in
turn. Seconds are of a processor that has nothing else to do: time in which this process waits for other programs does
not count, nor is it slept between hits. After a second a block is wrong:

memory        a bit flips in a block of two prefixes
tenants       blocks of two prefixes, which are two tenants', change places
host, disk    a bit of one block flipped before its checksum was made, on its way to the tier that others then load from
peer          a bit flips in a block of another engine, after the checks of the connection
host_rots, disk_rots    a bit of one block flips in the tier: the checksum tells, as it is loaded

The tiers' blocks are loaded because the device loses its own. `after` are the seconds until it was found, for each
prefix, by an audit or by a checksum. `waited` is what hits lost to audits by the engine's count, seconds at most.
"""

from __future__ import annotations

import argparse
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing
from itertools import count
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np

from benchmarks import report
from lmkit.config import EngineConfig
from lmkit.formats.hub import resolve_model_path
from lmkit.turbo.engine.engine import Engine
from lmkit.turbo.kv.tiers import files
from lmkit.turbo.request import Request, SamplingParams

PREFIX, TENANTS = 200, ("t", "t", "t", "u")  # tokens of a prefix; whose it is
START = 1.0  # seconds until a block is wrong
HOST = {"kv_host_memory": 64 << 20}
Plant = Callable[[Engine], int]  # returns how many prefixes have a wrong block


def engine_of(model: str, every: int, **options: Any) -> Engine:
    path = str(resolve_model_path(model))
    return Engine(path, EngineConfig(kv_memory=64 << 20, max_model_len=512, num_threads=1, audit=every, **options))


def prefix(number: int) -> list[int]:
    return [int(token) for token in np.random.default_rng(number).integers(100, 4000, PREFIX)]


def hits(tokens: int) -> Iterator[Request]:
    """Requests of the prefixes in turn. The first of each is no hit."""
    for i in count():
        ids, tenant = [*prefix(i % len(TENANTS)), i % 50], TENANTS[i % len(TENANTS)]
        params = SamplingParams(max_tokens=tokens, seed=0, ignore_eos=True)
        yield Request(request_id=f"r{i}", prompt_ids=ids, params=params, tenant=tenant)


def _third(engine: Engine) -> tuple[list[int], list[Any]]:
    """The third block of each prefix, and the memory of all blocks."""
    (cache,), memory = engine.scheduler.kv.caches, engine.runner._blocks.parts  # type: ignore[attr-defined]
    matches = [cache.match((name, ""), np.array(prefix(i), np.int32)) for i, name in enumerate(TENANTS)]
    return [match.blocks[2] for match in matches], memory


def flip(engine: Engine) -> int:
    (a, b, *_), memory = _third(engine)
    memory[0][[a, b], 9] ^= 1
    return 2


def swap(engine: Engine) -> int:
    (*_, a, b), memory = _third(engine)
    for part in memory:
        part[[a, b]] = part[[b, a]]
    return 2


def flips(blocks: Any, name: str) -> None:
    """Flip a bit of the third block that is read from the device's memory, or written to it."""
    method, numbers = getattr(blocks, name), count()

    def flipped(block: int, data: memoryview) -> None:
        if name == "write":
            data = memoryview(bytearray(data))
        else:
            method(block, data)
        data[99] ^= next(numbers) == 2
        if name == "write":
            method(block, data)

    setattr(blocks, name, flipped)


def lose(engine: Engine) -> int:
    """The device's blocks are gone, and come from below."""
    for cache in engine.scheduler.kv.caches:
        cache.clear()
    return 1


def arrive_wrong(engine: Engine) -> int:
    assert engine._tiers is not None
    flips(engine._tiers.blocks, "write")
    return lose(engine)


def rot(engine: Engine) -> int:
    tiers = engine._tiers
    assert tiers is not None
    if tiers._host is not None:
        list(tiers._host._blocks.values())[2].data[99] ^= 1
    elif tiers._disk is not None:
        path = Path(files.file_of(tiers._disk.folder, list(tiers._disk._index)[2]))
        data = bytearray(path.read_bytes())
        data[99] ^= 1
        path.write_bytes(data)
    return lose(engine)


def sender(folder: Path, stack: ExitStack) -> dict[str, Any]:
    """An engine that has the prefixes. Returns the options of one that loads them from it."""
    key = folder / "kv.key"
    key.touch(0o600)
    key.write_text("0123456789abcdef" * 2)
    options: dict[str, Any] = {"kv_key_file": str(key)}
    engine = stack.enter_context(closing(engine_of("demo", 0, **HOST, **options, kv_listen="127.0.0.1:0")))
    requests = hits(1)
    for _ in TENANTS:
        engine.add(next(requests))
    while engine.has_work():
        engine.step()
    assert engine._block_server is not None
    return options | {"kv_peer": f"127.0.0.1:{engine._block_server.address[1]}"}


def at(place: str, every: int, stack: ExitStack) -> tuple[Engine, Plant]:
    """An engine, and what makes blocks wrong there."""
    folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
    options: dict[str, Any] = sender(folder, stack) if place == "peer" else {}
    if place.startswith("host"):
        options = HOST
    elif place.startswith("disk"):
        options = {"kv_disk_path": str(folder)}
    engine = stack.enter_context(closing(engine_of("demo", every, **options)))
    tiers = engine._tiers
    if tiers is None:
        return engine, swap if place == "tenants" else flip
    tiers.load_seconds = lambda keys: -1.0  # type: ignore[method-assign]  # however long it takes
    if place.endswith("rots"):
        return engine, rot
    if place != "peer":
        flips(tiers.blocks, "read")
    return engine, arrive_wrong if place == "peer" else lose


PLACES = ("memory", "tenants", "host", "disk", "peer", "host_rots", "disk_rots")


class Clock:
    """Seconds that this process has computed, and those between two requests."""

    def __init__(self) -> None:
        self._idle = 0.0

    def __call__(self) -> float:
        return time.process_time() + self._idle

    def skip(self, until: float) -> None:
        self._idle += max(until - self(), 0.0)


def measure(place: str, rate: float, every: int, tokens: int, seconds: float) -> dict[str, Any]:
    with ExitStack() as stack:
        engine, plant = at(place, every, stack)
        engine.scheduler._clock = clock = Clock()
        stack.enter_context(patch("time.perf_counter", clock))  # the times of steps
        requests, start, sent, wrong, found = hits(tokens), clock(), 0, 0, list[float]()
        while (now := clock() - start) < seconds + START and not 0 < wrong <= len(found):
            while sent < now * rate:
                engine.add(next(requests))
                sent += 1
            if engine.has_work():
                engine.step()
            else:
                clock.skip(start + sent / rate)
            if now > START and not wrong and not engine.scheduler._has_sequences():
                wrong = plant(engine)
            stats = engine.scheduler.stats()
            damaged = engine._tiers.stats()["damaged"] if engine._tiers is not None else 0
            found += [now - START] * (stats.audits["differences"] + damaged - len(found))
        return {
            "place": place, "rate": rate, "every": every, "tokens": tokens, "wrong": wrong,
            "after": " ".join(f"{at:.1f}" for at in found) or "never", "by": "checksum" if damaged else "audit",
            "hits": stats.audits["hits"], "dropped": stats.audits["dropped"], "waited": stats.ahead_waited,
        }  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description="Damage in cached KV, and the time until it is found.")
    parser.add_argument("places", nargs="*", default=PLACES, metavar="PLACE", help=", ".join(PLACES))
    parser.add_argument("--rate", type=float, default=100.0, help="hits a second")
    parser.add_argument("--every", type=int, default=1000, help="of so many hits one is audited")
    parser.add_argument("--tokens", type=int, default=1, help="of an answer")
    parser.add_argument("--seconds", type=float, default=60.0, help="of each place at most, without the start")
    parser.add_argument("--json", type=Path, help="also write the figures here")
    given = parser.parse_args()
    if wrong := sorted({*given.places} - {*PLACES}):
        parser.error(f"no place: {', '.join(wrong)}")
    rows = [measure(place, given.rate, given.every, given.tokens, given.seconds) for place in given.places]
    report.show(rows)
    if given.json:
        report.save(given.json, "audits", rows, model="demo")


if __name__ == "__main__":
    main()
