"""Blocks without a device, and the content that they should hold."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np

from lmkit.turbo.kv.tiers.disk import DiskTier
from lmkit.turbo.kv.tiers.keys import block_keys, root_key
from lmkit.turbo.kv.tiers.store import Loaded, TierStore
from lmkit.turbo.plan import Load, Save

BLOCK = 3000  # bytes; a file takes 4096
LAYER = BLOCK // 3
KV_IDENTITY = bytes(range(32))


def chain(count: int, tenant: str = "") -> list[bytes]:
    """Keys of a sequence's first blocks."""
    keys: list[bytes] = []
    block_keys(root_key(KV_IDENTITY, tenant, ""), np.arange(4 * count, dtype=np.int32), 4, keys)
    return keys


def content(key: bytes, size: int = BLOCK) -> np.ndarray:
    """uint8 [size], different for every key."""
    return np.random.default_rng(list(key)).integers(0, 256, size, dtype=np.uint8)


def disk(path: Path, blocks: int = 1000, identity: bytes = KV_IDENTITY) -> DiskTier:
    return DiskTier(path, identity, block_bytes=BLOCK, max_bytes=4096 * blocks)


def path_of(tier: DiskTier, key: bytes) -> Path:
    return Path(tier.folder) / key.hex()[:2] / f"{key.hex()}.kv"


class ArrayBlocks:
    """`BlockBytes` over an array. Reading and writing can be made to fail."""

    nbytes = BLOCK

    def __init__(self, count: int) -> None:
        self.data = np.zeros((count, BLOCK), np.uint8)
        self.failing: set[int] = set()

    def read(self, block: int, out: memoryview) -> Callable[[], None] | None:
        self._touch(block)
        np.frombuffer(out, np.uint8)[:] = self.data[block]
        return None

    def read_layer(self, layer: int, block: int, out: memoryview) -> int:
        """A layer is LAYER bytes."""
        self._touch(block)
        part = slice(layer * LAYER, (layer + 1) * LAYER)
        np.frombuffer(out, np.uint8)[part] = self.data[block, part]
        return part.stop

    def write(self, block: int, data: memoryview) -> None:
        self._touch(block)
        self.data[block] = np.frombuffer(data, np.uint8)

    def _touch(self, block: int) -> None:
        if block in self.failing:
            raise RuntimeError("the device is gone")


def fill(blocks: ArrayBlocks, keys: list[bytes]) -> list[Save]:
    """Give block i the content of key i. Returns the saves of all blocks."""
    for block, key in enumerate(keys):
        blocks.data[block] = content(key)
    return [Save(key, block) for block, key in enumerate(keys)]


def collect(store: TierStore, loads: int) -> list[Loaded]:
    """Collect exactly `loads` finished loads, and not one more."""
    loaded: list[Loaded] = []
    while len(loaded) < loads:
        before = len(loaded)
        store.wait(10)
        loaded += store.finished()
        assert len(loaded) > before, "nothing ended within 10 s"
    assert len(loaded) == loads
    return loaded


def settle(store: TierStore) -> None:
    """Wait until nothing is queued to be saved."""
    end = time.monotonic() + 10
    while store.stats()["queued_saves"]:
        assert time.monotonic() < end, "saves are stuck"
        time.sleep(0.001)


class HeldSaver:
    """Makes the store's saver take one block and wait until `go`."""

    def __init__(self, store: TierStore) -> None:
        self.begun, self._gate, self._keep = threading.Event(), threading.Event(), store._keep
        self.go = self._gate.set
        store._keep = self._held  # type: ignore[method-assign]

    def _held(self, key: bytes, data: memoryview) -> None:
        self.begun.set()
        self._gate.wait(20)
        self._keep(key, data)


def save(store: TierStore, blocks: ArrayBlocks, keys: list[bytes]) -> None:
    """Save blocks and wait until they are saved."""
    store.save(fill(blocks, keys))
    settle(store)


def load(store: TierStore, blocks: ArrayBlocks, keys: list[bytes]) -> Loaded:
    """Load into blocks 0, 1, ... Assert that the loaded content is right and nothing else was written."""
    blocks.data[:] = 0
    store.load(Load(7, keys, list(range(len(keys)))))
    (loaded,) = collect(store, loads=1)
    assert loaded.job == 7
    assert sum(loaded.hits.values()) == loaded.num_blocks
    for block, key in enumerate(keys[: loaded.num_blocks]):
        assert (blocks.data[block] == content(key)).all()
    assert not blocks.data[loaded.num_blocks :].any()
    return loaded
