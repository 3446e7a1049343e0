"""Which KV blocks are free and which are held. Ids only: the bytes behind them belong to the runner."""

from __future__ import annotations


class BlockPool:
    """Blocks 0 .. num_blocks - 1 with reference counts; every operation is O(1) per block.

    A block is free, or held by `references(block)` owners. Owners are all alike: each entry of a sequence's table is
    one, and so would be a fork that shares the block, or a prefix cache that keeps it when its sequence is gone.
    """

    def __init__(self, num_blocks: int) -> None:
        self.num_blocks = num_blocks
        self._references = [0] * num_blocks
        self._free = list(range(num_blocks - 1, -1, -1))  # a stack: a block just freed may still be in the cache

    @property
    def num_free(self) -> int:
        return len(self._free)

    def references(self, block: int) -> int:
        return self._references[block]

    def allocate(self, count: int) -> list[int]:
        """`count` blocks with one reference each; the caller has looked at `num_free`."""
        assert 0 <= count <= len(self._free), f"{count} blocks asked of {len(self._free)} free"
        blocks = [self._free.pop() for _ in range(count)]
        for block in blocks:
            self._references[block] = 1
        return blocks

    def share(self, block: int) -> None:
        """One more owner of a held block."""
        assert self._references[block] > 0, f"block {block} is free and cannot be shared"
        self._references[block] += 1

    def free(self, block: int) -> None:
        """One owner fewer; the last one gives the block back."""
        assert self._references[block] > 0, f"block {block} is freed twice"
        self._references[block] -= 1
        if not self._references[block]:
            self._free.append(block)

    def check_integrity(self) -> None:
        """Free and held blocks add up, and no id is free twice or free and held at once. O(num_blocks)."""
        free = set(self._free)
        assert len(free) == len(self._free), "a block is free twice"
        assert not free or (min(free) >= 0 and max(free) < self.num_blocks), "a block that does not exist is free"
        assert not any(map(self._references.__getitem__, free)), "a free block is still held"
        held = self.num_blocks - self._references.count(0)
        assert len(free) + held == self.num_blocks, f"{len(free)} free + {held} held of {self.num_blocks}"
