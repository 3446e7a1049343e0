"""Gives sequences the KV blocks they need, and takes them back."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable

from lmkit.turbo.block_pool import BlockPool
from lmkit.turbo.sequence import Sequence


class KVManager:
    """The only writer of `Sequence.block_table`: block i of a table holds tokens i * block_size and on."""

    def __init__(self, num_blocks: int, block_size: int) -> None:
        self.pool = BlockPool(num_blocks)
        self.block_size = block_size

    @property
    def num_free(self) -> int:
        return self.pool.num_free

    def blocks_for(self, num_tokens: int) -> int:
        return -(-num_tokens // self.block_size)

    def reserve(self, seq: Sequence, num_tokens: int) -> list[int] | None:
        """Make the table hold the first `num_tokens` tokens.

        Its new blocks ([] if it already does), or None and no change if too few are free.
        """
        missing = max(self.blocks_for(num_tokens) - len(seq.block_table), 0)
        if missing > self.pool.num_free:
            return None
        blocks = self.pool.allocate(missing)
        seq.block_table += blocks
        return blocks

    def release(self, seq: Sequence) -> None:
        """Drop the whole table. Tail first, so that the blocks are handed out again in their old order."""
        for block in reversed(seq.block_table):
            self.pool.free(block)
        seq.block_table.clear()

    def check_integrity(self, holders: Iterable[Sequence]) -> None:
        """Every reference of the pool is an entry of one of `holders`' tables, which are all that hold blocks."""
        self.pool.check_integrity()
        held: Counter[int] = Counter()
        for seq in holders:
            assert len(set(seq.block_table)) == len(seq.block_table), f"{seq.request_id}: a block is in its table twice"
            held.update(seq.block_table)
        for block, count in held.items():
            assert self.pool.references(block) == count, f"block {block}: {count} owners, another count in the pool"
        assert len(held) + self.num_free == self.pool.num_blocks, "a held block is in no table"
