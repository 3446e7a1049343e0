"""The pool of KV blocks: it records which are free and which are held. It has ids only; the runner owns the bytes."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

HOLE = -1  # an entry of a block table that has no block


class BlockPool:
    """Blocks 0 .. num_blocks - 1 with reference counts; every operation is O(1) per block.

    A block is free, or it is held by `references(block)` owners. All owners are alike: each entry of a sequence's table
    is one, and so is a fork that shares the block. The prefix cache may be an owner too; the block is then also marked
    *cached*. A block is *idle* while the cache is its only owner, that is, while it can be evicted.

    A free block whose memory was never written, or was given back to the system, is *fresh*. It is allocated only if no
    other block is free, the lowest first, so the memory in use grows with use.

    Several blocks can be allocated as a *stripe*. A stripe is owned, shared and freed as one, and the id of its first
    block names it. All counts are counts of blocks.
    """

    def __init__(self, num_blocks: int) -> None:
        self.num_blocks = num_blocks
        self.num_changes = 0  # how often the prefix cache has got or lost blocks: what was found before may be gone
        self.on_drop: Callable[[Iterable[int]], None] | None = None  # gets the blocks that leave the prefix cache
        self._references = [0] * num_blocks
        self._cached = bytearray(num_blocks)  # 1: one of the references is the cache's
        self._num_cached = 0
        self._num_idle = 0
        self._sizes = [1] * num_blocks  # size of the stripe that this block names
        self._stripes: dict[int, list[int]] = {}  # first block -> blocks, for stripes of more than one block
        self._free: list[int] = []  # a stack: a block just freed may still be in the CPU's cache
        self._fresh = list(range(num_blocks - 1, -1, -1))  # a stack

    @property
    def num_free(self) -> int:
        return len(self._free) + len(self._fresh)

    @property
    def num_backed(self) -> int:
        """Blocks that have memory: held ones, and free ones that were in use before."""
        return self.num_blocks - len(self._fresh)

    @property
    def num_cached(self) -> int:
        return self._num_cached

    @property
    def num_idle(self) -> int:
        """Cached blocks with no other owner."""
        return self._num_idle

    def references(self, block: int) -> int:
        return self._references[block]

    def is_cached(self, block: int) -> bool:
        return bool(self._cached[block])

    def size(self, block: int) -> int:
        """The number of blocks in the stripe."""
        return self._sizes[block]

    def stripe(self, block: int) -> list[int]:
        """The blocks of the stripe that `block` names."""
        return self._stripes.get(block) or [block]

    def allocate(self, count: int, size: int = 1) -> list[int]:
        """Allocate `count` stripes of `size` blocks with one reference each. The caller has checked `num_free`."""
        assert 0 <= count * size <= self.num_free, f"{count * size} blocks asked of {self.num_free} free"
        blocks = _pop(self._free, min(count * size, len(self._free)))
        blocks += _pop(self._fresh, count * size - len(blocks))
        if size > 1:
            stripes = {blocks[i]: blocks[i : i + size] for i in range(0, len(blocks), size)}
            self._stripes |= stripes
            blocks = list(stripes)
        for block in blocks:
            self._sizes[block] = size
            self._references[block] = 1
        return blocks

    def share(self, block: int) -> None:
        """Add an owner to a held block."""
        self.share_all((block,))

    def free(self, block: int) -> None:
        """Remove an owner. The last owner returns the block to the pool."""
        self.free_all((block,))

    def share_all(self, blocks: Iterable[int]) -> None:
        """Add an owner to each of these held blocks; HOLEs are skipped."""
        references, cached = self._references, self._cached
        for block in blocks:
            if block >= 0:
                count = references[block]
                assert count > 0, f"block {block} is free and cannot be shared"
                references[block] = count + 1
                if count == 1 and cached[block]:
                    self._num_idle -= self._sizes[block]

    def free_all(self, blocks: Iterable[int]) -> None:
        """Remove an owner from each of these blocks, in this order; HOLEs are skipped."""
        references, cached, sizes, free = self._references, self._cached, self._sizes, self._free
        for block in blocks:
            if block >= 0:
                count = references[block] - 1
                # If this fails, an owner has given up the cache's reference instead of its own.
                assert count >= cached[block], f"block {block} is freed twice"
                references[block] = count
                if count:
                    if count == 1 and cached[block]:
                        self._num_idle += sizes[block]
                elif sizes[block] == 1:
                    free.append(block)
                else:
                    self._give_back(block)

    def _give_back(self, block: int) -> None:
        """Add the stripe to the free blocks. The order lets the next stripe of this size get the same blocks."""
        if self._sizes[block] > 1:
            self._free.extend(reversed(self._stripes.pop(block)))
        else:
            self._free.append(block)

    def give_back(self) -> list[int]:
        """Make all free blocks fresh. Returns those that were not, ascending: the caller gives their memory back."""
        given, self._free = sorted(self._free), []
        self._fresh = sorted({*self._fresh, *given}, reverse=True)
        return given

    def keep(self, blocks: Iterable[int]) -> None:
        """Make the prefix cache an owner of each of these held blocks, and mark them as cached."""
        references, cached = self._references, self._cached
        self.num_changes += 1
        for block in blocks:
            assert references[block] > 0, f"block {block} is free and cannot be kept"
            assert not cached[block], f"block {block} is cached already"
            references[block] += 1
            cached[block] = 1
            self._num_cached += self._sizes[block]

    def drop(self, blocks: Sequence[int]) -> None:
        """Remove the prefix cache's reference to each of these blocks, and the mark."""
        self.num_changes += 1
        if self.on_drop is not None:
            self.on_drop(blocks)
        references, cached = self._references, self._cached
        for block in blocks:
            assert cached[block], f"block {block} is not cached"
            cached[block] = 0
            references[block] -= 1
            self._num_cached -= self._sizes[block]
            if not references[block]:
                self._num_idle -= self._sizes[block]
                self._give_back(block)

    def check_integrity(self) -> None:
        """Check that free and held blocks add up, and that no id is free twice or free and held. O(num_blocks)."""
        free = {*self._free, *self._fresh}
        assert len(free) == self.num_free, "a block is free twice"
        assert not free or (min(free) >= 0 and max(free) < self.num_blocks), "a block that does not exist is free"
        assert not any(map(self._references.__getitem__, free)), "a free block is still held"
        owned = [block for block, count in enumerate(self._references) if count]
        held = {block for first in owned for block in self.stripe(first)}
        assert len(held) == sum(map(self.size, owned)), "a block is in two stripes"
        assert len(free) + len(held) == self.num_blocks, f"{len(free)} free + {len(held)} held of {self.num_blocks}"
        cached = [block for block, mark in enumerate(self._cached) if mark]
        num_cached = sum(map(self.size, cached))
        assert num_cached == self._num_cached, f"{num_cached} blocks are cached, {self._num_cached} were counted"
        assert all(map(self.references, cached)), "a free block is marked as cached"
        num_idle = sum(self.size(block) for block in cached if self._references[block] == 1)
        assert num_idle == self._num_idle, f"{num_idle} blocks are idle, {self._num_idle} were counted"


def _pop(stack: list[int], count: int) -> list[int]:
    """Take `count` entries from the top, the topmost first."""
    start = len(stack) - count
    taken = stack[start:][::-1]
    del stack[start:]
    return taken
