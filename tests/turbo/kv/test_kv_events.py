"""KV events: a reader that follows them knows at each moment what full blocks the caches have."""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import math
import os
import random
import signal
import socket
from array import array
from collections import Counter
from collections.abc import Collection, Iterable
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
import zmq

from lmkit.config import EngineConfig
from lmkit.errors import ConfigError
from lmkit.turbo.kv.block_log import BlockStored, Event
from lmkit.turbo.kv.block_pool import HOLE, BlockPool
from lmkit.turbo.kv.limits import KVLimits
from lmkit.turbo.kv.publisher import Publisher, fold, recorded
from lmkit.turbo.kv.radix_cache import RadixCache
from lmkit.turbo.request import ImageInput, Request, SamplingParams
from lmkit.turbo.sequence import Sequence
from lmkit.turbo.transport.async_engine import AsyncEngine
from tests.serve.fake_engine import DEMO
from tests.turbo.scheduling.traffic import Traffic

PATIENCE = 20_000  # milliseconds
Content = dict[tuple[int, int], list[int]]  # the tokens of each full block, by class of layers and hash


def expected_hash(namespace: tuple[str, str], tokens: list[int], size: int) -> int:
    """As docs/kv_events.md has it."""
    root = hashlib.sha256(b"lmkit kv 1")
    for part in (b"", namespace[0].encode(), namespace[1].encode()):
        root.update(len(part).to_bytes(8, "little") + part)
    key = root.digest()
    for start in range(0, len(tokens), size):
        key = hashlib.sha256(key + np.array(tokens[start : start + size], "<i4").tobytes()).digest()
    return int.from_bytes(key[-8:], "big")


def blocks_of(tokens: list[int], size: int) -> Content:
    """The full blocks of a text without tenant or salt."""
    ends = range(size, len(tokens) + 1, size)
    return {(0, expected_hash(("", ""), tokens[:end], size)): tokens[end - size : end] for end in ends}


def content(caches: Iterable[RadixCache], size: int, states: Collection[int] = ()) -> Content:
    """What the trees have. `states`: the blocks after which a recurrent state stands, of a model with one class."""
    found = {}
    for group, cache in enumerate(caches):
        for node in cache._tree:
            above, parent = list[int](), node.parent
            while parent is not None:
                above, parent = [*parent.tokens.tolist(), *above], parent.parent
            for i in range(len(node.tokens) // size):
                if node.blocks[i] != HOLE:
                    tokens = above + node.tokens[: (i + 1) * size].tolist()
                    key = expected_hash(node.namespace, tokens, size)
                    found |= {(c, key): tokens[-size:] for c in ([0, 1] if node.blocks[i] in states else [group])}
    return found


class Followed(Traffic):
    """Random traffic. After each operation, what events tell is compared with the trees."""

    def follow(self) -> None:
        kv = self.engine.scheduler.kv
        self.events = recorded(kv.caches, self.limits.kv, kv.snapshots)
        self.known: dict[tuple[int, int], BlockStored] = {}

    def compare(self) -> None:
        fold(self.known, self.events)
        self.counts.update(type(event).__name__ for event in self.events)
        self.events.clear()
        kv = self.engine.scheduler.kv
        states = kv.snapshots._of_block if kv.snapshots is not None else ()
        self.counts["states"] += sum(group == 1 for group, _ in self.known) if states else 0
        told = {key: event.token_ids for key, event in self.known.items()}
        assert told == content(kv.caches, kv.block_size, states)

    def step(self, disturb: bool) -> None:
        super().step(disturb)
        self.compare()

    def evict(self) -> None:
        super().evict()
        self.compare()

    def abort(self) -> None:
        super().abort()
        self.compare()


@pytest.mark.parametrize("depth", [pytest.param(1, marks=pytest.mark.exhaustive), 2])
def test_events_give_the_trees_content_at_every_moment(depth: int, tmp_path: Path) -> None:
    """Through evictions, preemptions, tiers, sessions, tenants, salts, windows, drafts, aborts and failed steps, and of
    models with recurrent states, whose snapshots come and go beside blocks."""
    total = Counter[str]()
    for seed in range(40):
        folder = tmp_path / str(seed) if seed % 2 else None
        kind = {"drafts": seed % 3 == 0, "recurrent": seed % 4 == 3, "ahead": seed % 8 == 7}
        traffic = Followed(seed, depth, disturb=True, folder=folder, thorough=False, **kind)
        traffic.follow()
        traffic.run(120)
        traffic.check_results()
        total += traffic.counts
    assert total["BlockStored"] > 1000
    assert total["BlockRemoved"] > 300
    assert total["preemptions"] > 100
    assert total["loaded"] > 20
    assert total["states"] > 1000


class Reader:
    """As a router reads the stream: msgpack, by position in the lists, and a replay for a gap in the numbers."""

    def __init__(self, address: str, replays: str, topic: str = "") -> None:
        self.content: Content = {}
        self.last = -1
        self.replayed = 0  # batches
        self.events: list[Any] = []
        self._context = zmq.Context()
        self._live, self._replay = self._context.socket(zmq.SUB), self._context.socket(zmq.DEALER)
        self._live.reconnect_ivl = self._replay.reconnect_ivl = 10
        self._live.rcvtimeo = self._replay.rcvtimeo = PATIENCE
        self._live.subscribe(topic)
        self._live.connect(address)
        self._replay.connect(replays)

    def catch_up(self) -> None:
        self._replay.send_multipart([b"", (self.last + 1).to_bytes(8)])
        while True:
            _, number, payload = self._replay.recv_multipart()
            if number == b"\xff" * 8:
                return
            self.replayed += 1
            self._take(int.from_bytes(number), payload)

    def next(self) -> bytes:
        """One live message. Returns its topic."""
        topic, number, payload = self._live.recv_multipart()
        if int.from_bytes(number) > self.last + 1:
            self.catch_up()
        if int.from_bytes(number) > self.last:  # a replay may have had it
            self._take(int.from_bytes(number), payload)
        return topic

    def until(self, wanted: Content) -> None:
        while self.content != wanted or self._live.poll(0):
            self.next()

    def _take(self, number: int, payload: bytes) -> None:
        _, events, rank = msgspec.msgpack.decode(payload)
        assert rank == 0
        self.last = number
        self.events += events
        for kind, *fields in events:
            if kind == "BlockStored":
                hashes, parent, tokens, size, lora_id, medium, _, extra, group, *_ = fields
                assert (lora_id, medium, extra) == (None, "GPU", None), "these prompts have no images"
                assert parent is None or (group, parent) in self.content or group
                self.content |= {(group, hash): tokens[i * size : (i + 1) * size] for i, hash in enumerate(hashes)}
            elif kind == "BlockRemoved":
                hashes, _, group = fields
                for hash in hashes:
                    del self.content[group, hash]
            else:
                assert kind == "AllBlocksCleared"
                self.content.clear()

    def close(self) -> None:
        self._context.destroy(linger=0)


class Cache:
    """A cache of blocks of two tokens, and its publisher."""

    def __init__(self, **options: Any) -> None:
        self.pool = BlockPool(64)
        self.cache = RadixCache(self.pool, 2)
        self.publisher = Publisher("tcp://127.0.0.1:0", "kv@a", recorded([self.cache], KVLimits(64, 2)), **options)

    def keep(self, tokens: list[int], adapter: str = "") -> None:
        params = SamplingParams(max_tokens=1)
        self.insert(Request(request_id="r", prompt_ids=tokens, params=params, adapter=adapter))

    def insert(self, request: Request) -> list[Event]:
        """Keep the blocks of a prompt, and publish. Returns the events."""
        blocks = self.pool.allocate(-(-len(request.prompt_ids) // 2))
        seq = Sequence(request, 0, 0.0, math.inf, array("i", request.prompt_ids), 99, ())
        self.cache.insert(("", ""), seq.cached_as(seq.num_tokens).copy(), blocks, seq)
        self.pool.free_all(blocks)
        events = self.publisher._events[:]
        self.publisher.publish()
        return events

    def reader(self) -> Reader:
        return Reader(self.publisher.address, self.publisher.replay_address, "kv@")


def test_a_reader_that_comes_late_asks_for_what_it_missed() -> None:
    here = Cache(kept=3)
    here.keep([1, 2, 3, 4, 5])
    early = here.reader()
    early.catch_up()
    assert (early.content, early.replayed) == (blocks_of([1, 2, 3, 4], 2), 3)
    first = early.last
    for i in range(8):
        here.keep([1, 2, 10 + i, 0], adapter="pirate" if i == 7 else "")
    here.cache.evict(3)
    here.publisher.publish()
    here.publisher.publish()  # nothing has changed
    wanted = content([here.cache], 2)
    early.catch_up()  # of ten batches three are kept: one more tells what was before them
    assert (early.content, early.replayed, early.last) == (wanted, 3 + 4, first + 9)
    late = here.reader()
    late.catch_up()
    assert (late.content, late.replayed) == (wanted, 4)
    names = {tuple(event[1]): event[7] for event in late.events if event[0] == "BlockStored"}
    assert names[expected_hash(("", ""), [1, 2, 17, 0], 2),] == "pirate"
    assert names[expected_hash(("", ""), [1, 2], 2),] is None
    late.catch_up()
    assert late.replayed == 4, "nothing is new"
    here.publisher.close()
    early.close()
    late.close()


def test_live_messages_have_the_topic_and_the_end_clears_all() -> None:
    here = Cache()
    reader = here.reader()
    while not reader.content:  # a subscription takes a moment; what comes before it is missed, and replayed
        here.keep([here.pool.num_free, 1])
        if reader._live.poll(10):
            assert reader.next() == b"kv@a"
    wanted = content([here.cache], 2)
    reader.until(wanted)
    here.publisher.close()
    reader.until({})
    reader.close()


def test_images_are_told_apart_by_their_digests() -> None:
    """Each block has its prompt's tokens and the digests of the images in it, and a hash that depends on both."""
    here, mark, (cat, dog) = Cache(), 77, (b"c" * 32, b"d" * 32)

    def keep(*digests: bytes) -> list[Any]:
        """A prompt [1, image, 2, image, 3] of blocks of two: 1c ccc2 dddd 3"""
        ids = [1, mark, mark, mark, mark, 2, *[mark] * 4]
        numbers = {digest: i + 1 for i, digest in enumerate((cat, dog))}
        images = [ImageInput(start, 1, 4, x, number=numbers[x]) for start, x in zip((1, 6), digests, strict=True)]
        params = SamplingParams(max_tokens=1)
        return here.insert(Request(request_id="r", prompt_ids=ids, params=params, images=tuple(images)))

    (first,) = keep(cat, dog)
    c, d = cat.hex(), dog.hex()
    assert first.token_ids == [1, 77, 77, 77, 77, 2, 77, 77, 77, 77]
    assert first.extra_keys == [[c], [c], [c], [d], [d]]
    key = hashlib.sha256(b"lmkit kv 1" + bytes(24)).digest()
    for tokens, digests in (([1, -1], cat), ([-1, -1], cat * 2), ([-1, 2], cat)):
        key = hashlib.sha256(key + np.array(tokens, "<i4").tobytes() + digests).digest()
    assert first.block_hashes[2] == int.from_bytes(key[-8:])
    assert keep(cat, dog) == [], "the same images"
    (second,) = keep(cat, cat)
    assert (second.parent_block_hash, second.extra_keys) == (first.block_hashes[2], [[c], [c]])
    assert not {*first.block_hashes} & {*second.block_hashes}
    (third,) = keep(dog, cat)
    assert third.extra_keys == [[d], [d], [d], [c], [c]]
    assert len({*first.block_hashes, *second.block_hashes, *third.block_hashes}) == 12
    late: dict[tuple[int, int], BlockStored] = {}
    fold(late, [first, second, third])
    assert late[0, second.block_hashes[0]].extra_keys == [[c]]
    assert late[0, first.block_hashes[4]].extra_keys == [[d]]
    here.publisher.close()


def test_a_request_that_is_none_is_ignored() -> None:
    here = Cache()
    reader = here.reader()
    for frames in ([b""], [b"", b"x"], [b"", b"", b"", b""]):
        reader._replay.send_multipart(frames)
    reader.catch_up()
    assert reader.replayed == 2, "what was before the first batch, and that"
    here.publisher.close()
    reader.close()


def test_an_address_that_is_taken_is_named() -> None:
    here = Cache()
    with pytest.raises(
        ConfigError, match=r"^kv_events: cannot listen at tcp://127\.0\.0\.1:\d+: Address already in use"
    ):
        Publisher(here.publisher.address, "", [])
    here.publisher.close()


def free_ports() -> int:
    """The first of two free ones, outside the range from which the system takes ports for others' connections."""
    rng = random.Random(os.getpid())
    while True:
        port = rng.randrange(20_000, 32_000, 2)
        with socket.socket() as one, socket.socket() as two, contextlib.suppress(OSError):
            one.bind(("127.0.0.1", port))
            two.bind(("127.0.0.1", port + 1))
            return port


@pytest.mark.slow
def test_an_engine_that_sleeps_wakes_and_is_killed_is_followed() -> None:
    """The demo model in its process. A reader never has a block that the engine lacks, whatever it missed."""
    port, size = free_ports(), 16
    config = EngineConfig(kv_events=f"tcp://127.0.0.1:{port}", block_size=size, num_threads=1, max_model_len=256)
    reader = Reader(f"tcp://127.0.0.1:{port}", f"tcp://127.0.0.1:{port + 1}")

    async def answer(engine: AsyncEngine, first: int) -> Content:
        """The blocks of one request's prompt and answer, whose last token is never computed."""
        prompt = [first + i for i in range(50)]
        params = SamplingParams(max_tokens=20, temperature=0.0, ignore_eos=True)
        request = Request(request_id=str(first), prompt_ids=prompt, params=params)
        tokens = [token async for output in engine.generate(request) for token in output.token_ids]
        return blocks_of((prompt + tokens)[:-1], size)

    async def connected(engine: AsyncEngine) -> Content:
        """Answer until the reader hears of it, and return what the engine has then."""
        have = await answer(engine, 5)
        assert len(have) == 4
        for first in range(100, 500):
            have |= await answer(engine, first)
            if reader._live.poll(20):
                break
        await asyncio.to_thread(reader.until, have)
        return have

    async def main() -> None:
        engine = AsyncEngine(DEMO, config)
        await engine.start()
        assert await connected(engine)
        await engine.sleep()
        await asyncio.to_thread(reader.until, {})
        await engine.wake()
        assert await connected(engine)
        assert engine.engine_pid is not None
        os.kill(engine.engine_pid, signal.SIGKILL)
        while engine.state == "ready":
            await asyncio.sleep(0.01)
        while engine.state != "ready":
            await asyncio.sleep(0.01)
        assert await connected(engine)
        await engine.shutdown()

    asyncio.run(asyncio.wait_for(main(), 120))
    reader.close()
