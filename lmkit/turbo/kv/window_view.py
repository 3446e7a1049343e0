"""Arithmetic on block tables that tells which blocks of a sequence a sliding window sees."""

from __future__ import annotations

from typing import NamedTuple

from lmkit.turbo.kv.block_pool import HOLE


class WindowView(NamedTuple):
    """A token at position p sees keys > p - window and the first `sink_blocks` blocks; all before it if window is 0."""

    window: int
    sink_blocks: int
    block_size: int  # tokens

    def first_seen(self, num_tokens: int) -> int:
        """The first block that a query at position `num_tokens` sees, apart from the sinks."""
        return max(num_tokens - self.window + 1, 0) // self.block_size if self.window else 0

    def usable(self, blocks: list[int], rest: int) -> int:
        """The number of a path's blocks up to a position that sees no HOLE. `rest` tokens lie after the last block."""
        if HOLE not in blocks:
            return len(blocks)
        end = len(blocks)
        if HOLE in (sinks := blocks[: self.sink_blocks]):
            end, rest = sinks.index(HOLE), 0
        first = self.first_seen(end * self.block_size + rest)
        while HOLE in (seen := blocks[first:end]):
            end -= seen[::-1].index(HOLE) + 1
            while end and blocks[end - 1] == HOLE:
                end -= 1
            first = self.first_seen(end * self.block_size)
        return end

    def choose(self, missing: list[int], room: int) -> list[int]:
        """Choose `room` of the missing blocks to keep: the first ones, or with a window the sinks and the last ones."""
        if self.window:
            sinks = sum(i < self.sink_blocks for i in missing)
            missing = missing[:sinks] + missing[sinks:][::-1]
        return missing[:room]
