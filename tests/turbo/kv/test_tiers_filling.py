"""Blocks that a step fills: other engines get them layer by layer, whole and right, or not at all."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import suppress

import numpy as np
import pytest

from lmkit.turbo.kv.tiers import filling as fillings
from lmkit.turbo.kv.tiers import wire
from lmkit.turbo.kv.tiers.filling import Filling
from lmkit.turbo.kv.tiers.store import TierStore
from lmkit.turbo.plan import Load, Save
from tests.turbo.kv.test_tiers_peer import KIND, served
from tests.turbo.kv.tier_helpers import BLOCK, LAYER, ArrayBlocks, chain, collect, content, fill, load, save, settle

KEYS = chain(6)
Given = tuple[TierStore, ArrayBlocks, Filling]


@pytest.fixture
def given() -> Iterator[Given]:
    """The first two blocks are in host memory, and the device has the others."""
    blocks = ArrayBlocks(8)
    store = TierStore(blocks, host_bytes=8 * BLOCK, layers=blocks)
    save(store, blocks, KEYS[:2])
    fill(blocks, KEYS)
    assert store.filling is not None
    yield store, blocks, store.filling
    store.close()


def part_arrives(monkeypatch: pytest.MonkeyPatch) -> threading.Event:
    """Set when an engine has got a part of blocks that are being filled."""
    arrived, receive = threading.Event(), wire.Link.frame

    def received(link: wire.Link, seconds: float, num_keys: int, block_bytes: int) -> tuple[wire.Frame, memoryview]:
        frame, data = receive(link, seconds, num_keys, block_bytes)
        if 0 < frame.end < block_bytes:
            arrived.set()
        return frame, data

    monkeypatch.setattr(wire.Link, "frame", received)
    return arrived


def assembled(frames: list[tuple[wire.Frame, bytes | memoryview]]) -> list[bytes]:
    blocks = [bytearray(BLOCK) for _ in KEYS]
    for frame, data in frames:
        size = frame.end - frame.begin
        for i in range(frame.num_blocks):
            blocks[frame.first + i][frame.begin : frame.end] = data[i * size : (i + 1) * size]
    return [bytes(block) for block in blocks]


@pytest.mark.parametrize("frame_bytes", [4 << 20, 1000])
def test_each_layer_is_given_before_the_next_one_is_computed(
    given: Given, frame_bytes: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fillings, "FRAME_BYTES", frame_bytes)
    store, blocks, filling = given
    frames, came = filling.frames(KEYS), list[tuple[wire.Frame, bytes | memoryview]]()
    with filling.step(fill(blocks, KEYS)[2:]):
        for layer in range(3):
            filling.advance(layer)
            while not came or came[-1][0].end < (layer + 1) * LAYER or came[-1][0].num_blocks == 1:
                came.append(next(frames))
            assert came[-1][0][:2] == (2, 4)
            assert came[-1][0].end == (layer + 1) * LAYER
    assert next(frames, None) is None
    assert assembled(came) == [content(key).tobytes() for key in KEYS]
    settle(store)
    assert store.lookup_here(KEYS) == 6
    assert store.stats()["saved"] == 6


def test_blocks_that_are_given_are_not_copied_again(given: Given) -> None:
    store, blocks, filling = given
    saves = fill(blocks, KEYS)
    with filling.step(saves[2:]):
        for layer in range(3):
            filling.advance(layer)
    blocks.failing = set(range(8))
    store.save(saves[2:])
    settle(store)
    assert store.stats()["present"] == 4
    assert store.stats()["failures"] == 0


def test_two_sequences_may_fill_the_same_content(given: Given) -> None:
    store, blocks, filling = given
    blocks.data[7] = content(KEYS[4])
    with filling.step([*fill(blocks, KEYS)[2:], Save(KEYS[4], 7)]):
        for layer in range(3):
            filling.advance(layer)
    settle(store)
    assert store.stats()["saved"] == 6
    assert load(store, blocks, KEYS).num_blocks == 6


def test_a_step_that_fails_gives_no_block(given: Given) -> None:
    store, blocks, filling = given
    frames = filling.frames(KEYS[2:])
    with suppress(RuntimeError), filling.step(fill(blocks, KEYS)[2:]):
        filling.advance(0)
        assert next(frames)[0] == wire.Frame(0, 4, 0, LAYER)
        blocks.failing = set(range(8))
        filling.advance(1)
    with pytest.raises(wire.WireError, match="a step has failed"):
        next(frames)
    settle(store)
    assert store.lookup_here(KEYS[2:]) == 0


def test_nothing_comes_of_nothing(given: Given, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(wire, "WAIT_SECONDS", 0.01)
    _, _, filling = given
    assert next(filling.frames(KEYS[4:]))[0] == wire.NOTHING


@pytest.mark.parametrize("fails", [True, False])
def test_another_engine_loads_what_is_filled(given: Given, fails: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Over a connection. A step that fails leaves it the blocks before."""
    store, blocks, filling = given
    has_part = part_arrives(monkeypatch)
    with served(store) as server:
        other = ArrayBlocks(8)
        taker = TierStore(other, host_bytes=8 * BLOCK, kind=KIND)
        with filling.step(fill(blocks, KEYS)[2:]):
            filling.advance(0)
            taker.load(Load(1, KEYS, list(range(6)), "{}:{}".format(*server.address), 60.0))
            assert has_part.wait(20)
            for layer in () if fails else (1, 2):
                filling.advance(layer)
        (loaded,) = collect(taker, loads=1)
        assert loaded.num_blocks == (2 if fails else 6)
        for block, key in enumerate(KEYS[: loaded.num_blocks]):
            assert (other.data[block] == content(key)).all()
        assert not other.data[loaded.num_blocks :].any()
        assert taker.lookup_here(KEYS) == loaded.num_blocks
        taker.close()


@pytest.mark.parametrize(
    "frame", [wire.Frame(0, 7, 0, BLOCK), wire.Frame(1, 1, 0, BLOCK), wire.Frame(0, 1, 0, BLOCK + 1),
              wire.Frame(0, 1, 8, 4), wire.Frame(0, 1, 8, 16), wire.Frame(0, 1, 0, 0)],
    ids=str,
)  # fmt: skip
def test_a_frame_of_another_form_ends_the_load(given: Given, frame: wire.Frame) -> None:
    store, _, filling = given
    filling.frames = lambda keys: iter([(frame, bytes(max(0, frame.nbytes)))])  # type: ignore[method-assign]
    with served(store) as server:
        other = ArrayBlocks(8)
        taker = TierStore(other, kind=KIND)
        taker.load(Load(1, KEYS, list(range(6)), "{}:{}".format(*server.address), 60.0))
        (loaded,) = collect(taker, loads=1)
        assert loaded.num_blocks == 0
        assert not np.any(other.data)
        assert taker.stats()["failures"] == 1
        taker.close()
