"""Blocks in host memory. The least recently used are evicted first."""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, Protocol

from lmkit.errors import ConfigError


def use_chain(index: OrderedDict[bytes, Any], keys: Sequence[bytes]) -> None:
    """Mark the blocks of a chain as used. The first is evicted last, because the others are not found without it."""
    for key in reversed(keys):
        if key in index:
            index.move_to_end(key)


def check_host_bytes(host_bytes: int, block_bytes: int) -> None:
    """Raise ConfigError if a tier of `host_bytes` (0 = no tier) holds no block."""
    if 0 < host_bytes < block_bytes:
        raise ConfigError(f"kv_host_memory {host_bytes} holds no block of {block_bytes} bytes; raise it")


class BlockBytes(Protocol):
    """The device's blocks. A background thread calls `write`, and the function that `read` returns."""

    @property
    def nbytes(self) -> int:
        """Bytes of one block: all layers, K and V with their parameters."""

    @property
    def state_parts(self) -> int: ...  # of a recurrent state, each as large as a block

    def read(self, block: int, out: memoryview) -> Callable[[], None] | None:
        """Copy a block to `out`; the block may change then. A device returns a wait; after it `out` has the bytes."""

    def write(self, block: int, data: memoryview) -> None: ...


class HostBlock(NamedTuple):
    data: memoryview  # never written again
    crc: int  # see record.checksum


class HostTier:
    """At most `max_bytes` of blocks of one size.

    Any thread may call any method, and no call waits for another thread's copying.
    """

    def __init__(self, block_bytes: int, max_bytes: int) -> None:
        self._block_bytes = block_bytes
        self._max_blocks = max_bytes // block_bytes
        self._lock = threading.Lock()
        self._blocks: OrderedDict[bytes, HostBlock] = OrderedDict()  # oldest first
        self.num_evicted = 0

    @property
    def num_blocks(self) -> int:
        return len(self._blocks)

    @property
    def num_bytes(self) -> int:
        return len(self._blocks) * self._block_bytes

    def __contains__(self, key: bytes) -> bool:
        return key in self._blocks

    def get(self, key: bytes) -> HostBlock | None:
        return self._blocks.get(key)

    def touch(self, keys: Sequence[bytes]) -> None:
        with self._lock:
            use_chain(self._blocks, keys)

    def put(self, key: bytes, block: HostBlock) -> None:
        with self._lock:
            self._blocks[key] = block
            self._blocks.move_to_end(key)
            while len(self._blocks) > self._max_blocks:
                self._blocks.popitem(last=False)
                self.num_evicted += 1

    def clear(self) -> None:
        with self._lock:
            self._blocks.clear()

    def remove(self, key: bytes) -> None:
        with self._lock:
            self._blocks.pop(key, None)
