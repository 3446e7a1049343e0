"""How the memory of the KV pool grows and shrinks: blocks take it when they are first used, and may give it back."""

from __future__ import annotations

from collections.abc import Callable

from lmkit.turbo.kv.block_pool import BlockPool
from lmkit.turbo.kv.ledger import Ledger

GRANT = 64  # blocks that may take memory until the system is asked again


class Growth:
    """Decides when blocks without memory are used, and which blocks give theirs back."""

    def __init__(self, pool: BlockPool, ledger: Ledger) -> None:
        self.shortage: Callable[[], int] = lambda: 0  # bytes that the system lacks; the engine sets it on a CPU
        self._pool, self._ledger = pool, ledger
        self._granted = 0

    def lacking(self, count: int) -> int:
        """Blocks to evict before `count` blocks are allocated, if so many are idle.

        These are what the pool lacks, or all that would take more memory while the system is short of it.
        """
        fresh = self._pool.num_blocks - self._pool.num_backed
        grows = count - (self._pool.num_free - fresh)
        if grows <= 0:
            return 0
        return grows - fresh if grows > fresh or self._may_take(grows) else grows

    def give_back(self, evicted: int = 0) -> list[int]:
        """Blocks whose memory the caller gives back: all free ones that have some, after `evicted` idle ones, the least
        recently used, are evicted. No step may be under way."""
        self._ledger.evict(min(evicted, self._pool.num_idle))
        return self._pool.give_back()

    def _may_take(self, count: int) -> bool:
        if count > self._granted:
            self._granted = 0 if self.shortage() else max(count, GRANT)
        is_granted = count <= self._granted
        self._granted -= count if is_granted else 0
        return is_granted
