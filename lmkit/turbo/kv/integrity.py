"""A check that the records of blocks agree with each other, for tests and pauses."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable

from lmkit.turbo.kv.block_pool import BlockPool
from lmkit.turbo.kv.leases import Leases
from lmkit.turbo.kv.radix_cache import HOLE, RadixCache
from lmkit.turbo.sequence import Sequence


def check_owners(pool: BlockPool, caches: Iterable[RadixCache], leases: Leases, holders: Iterable[Sequence]) -> None:
    """Raise AssertionError unless every reference of the pool has its owner: a cache, a lease or one of `holders`."""
    pool.check_integrity()
    for cache in caches:
        cache.check_integrity()
    held: Counter[int] = Counter()
    for lease in leases:
        held.update(block for block in lease.blocks if block != HOLE)
    for seq in holders:
        own = [block for table in seq.tables for block in table.blocks if block != HOLE]
        assert len(set(own)) == len(own), f"{seq.request_id}: a block is in its table twice"
        held.update(own)
    for block in range(pool.num_blocks):
        count = held[block] + pool.is_cached(block)
        assert pool.references(block) == count, f"block {block}: {count} owners, another count in the pool"
