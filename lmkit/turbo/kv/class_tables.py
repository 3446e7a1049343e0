"""The block tables of one class of layers: the stripes that its window still sees, and the blocks of its stripes."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np

from lmkit.models.kv_layout import KVClass
from lmkit.turbo.kv.block_pool import HOLE, BlockPool
from lmkit.turbo.kv.ledger import Ledger
from lmkit.turbo.kv.limits import RETIRE_ALIGN, KVLimits
from lmkit.turbo.kv.radix_cache import Namespace, RadixCache
from lmkit.turbo.sequence import BlockTable


class ClassTables:
    """Stripe i of a table holds the tokens from i * block_size on, for all groups of the class."""

    def __init__(self, layers: KVClass, groups: range, cache: RadixCache | None, pool: BlockPool, size: int) -> None:
        self.groups = groups
        self.cache = cache
        self.window = layers.window
        self._pool = pool
        self._sinks = layers.sinks
        self._block_size = size

    @classmethod
    def of(cls, limits: KVLimits, pool: BlockPool, ledger: Ledger) -> list[ClassTables]:
        """The tables of every class, each with its cache."""
        tables, first = [], 0
        for layers in limits.classes:
            groups = range(first, first := first + layers.num_groups)
            cache = None
            if limits.prefix_cache:
                cache = RadixCache(
                    pool, limits.block_size, window=layers.window, sinks=layers.sinks, stripe=len(groups),
                    ledger=ledger, whole_tails=bool(limits.snapshots),
                )  # fmt: skip
            tables.append(cls(layers, groups, cache, pool, limits.block_size))
        return tables

    def unseen(self, indices: Iterable[int], position: int) -> list[int]:
        """Return the stripes among `indices` that are not kept for a token at `position` or later.

        Everything that such a token sees is kept, and a little more.
        """
        if not self.window:
            return []
        first = max(position - self.window + 1, 0) // RETIRE_ALIGN * RETIRE_ALIGN
        size = self._block_size
        return [i for i in indices if i * size >= self._sinks and (i + 1) * size <= first]

    def leaving(self, table: BlockTable, position: int) -> list[int]:
        """Return the stripes that the window has passed since the last call."""
        if not self.window:
            return []
        size, end = self._block_size, table.num_retired
        first = max(position - self.window + 1, 0) // RETIRE_ALIGN * RETIRE_ALIGN
        while end < len(table.blocks) and (end * size < self._sinks or (end + 1) * size <= first):
            end += 1
        gone = range(table.num_retired, end)
        table.num_retired = end
        return [i for i in gone if i * size >= self._sinks]

    def has_twin(self, namespace: Namespace, tokens: np.ndarray, blocks: list[int]) -> bool:
        """Whether the cache has other blocks than these for the same tokens.

        Blocks that followed ours could then not be evicted in order. Such a sequence publishes when it ends.
        """
        found = self.cache.match(namespace, tokens).blocks if self.cache is not None else []
        return any(own != cached for own, cached in zip(blocks, found, strict=False) if HOLE not in (own, cached))

    def punch(self, table: BlockTable, indices: list[int]) -> None:
        """Return these stripes to the pool and leave HOLEs in the table."""
        self._pool.free_all([table.blocks[i] for i in indices])
        for i in indices:
            table.blocks[i] = HOLE

    def by_group(self, blocks: list[int]) -> list[list[int]]:
        """Turn stripes into the blocks of each group. A HOLE becomes an arbitrary block."""
        if len(self.groups) == 1:
            return [[max(block, 0) for block in blocks]]
        stripes = [self._pool.stripe(max(block, 0)) for block in blocks]
        return [[stripe[g] if g < len(stripe) else 0 for stripe in stripes] for g in range(len(self.groups))]


def seen_below(classes: Sequence[ClassTables], indices: range, size: int) -> list[tuple[int, int]]:
    """The blocks of `size` tokens that are seen from the end of `indices` on, as (index, class).

    They are in the order of their tokens: if a load ends early, all classes have the same tokens.
    """
    seen = []
    for c, layers in enumerate(classes):
        unseen = set(layers.unseen(indices, indices.stop * size))
        seen += [(i, c) for i in indices if i not in unseen]
    return sorted(seen)
