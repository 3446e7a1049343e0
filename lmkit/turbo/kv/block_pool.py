"""Which KV blocks are free and which are held. Ids only: the bytes behind them belong to the runner."""

from __future__ import annotations

from collections.abc import Collection, Iterable

HOLE = -1  # in a table of blocks: no block is there


class BlockPool:
    """Blocks 0 .. num_blocks - 1 with reference counts; every operation is O(1) per block.

    A block is free, or held by `references(block)` owners. Owners are all alike: each entry of a sequence's table is
    one, and so is a fork that shares the block. One of them may be the prefix cache, then the block is also marked
    *cached*; it is *idle* while the cache is its only owner, that is, while it could be had by an eviction.
    """

    def __init__(self, num_blocks: int) -> None:
        self.num_blocks = num_blocks
        self._references = [0] * num_blocks
        self._cached = bytearray(num_blocks)  # 1: one of the references is the cache's
        self._num_cached = 0
        self._num_idle = 0
        self._free = list(range(num_blocks - 1, -1, -1))  # a stack: a block just freed may still be in the CPU's cache

    @property
    def num_free(self) -> int:
        return len(self._free)

    @property
    def num_cached(self) -> int:
        return self._num_cached

    @property
    def num_idle(self) -> int:
        """Cached blocks that nobody else holds."""
        return self._num_idle

    def references(self, block: int) -> int:
        return self._references[block]

    def is_cached(self, block: int) -> bool:
        return bool(self._cached[block])

    def allocate(self, count: int) -> list[int]:
        """`count` blocks with one reference each; the caller has looked at `num_free`."""
        assert 0 <= count <= len(self._free), f"{count} blocks asked of {len(self._free)} free"
        start = len(self._free) - count
        blocks = self._free[start:][::-1]
        del self._free[start:]
        for block in blocks:
            self._references[block] = 1
        return blocks

    def share(self, block: int) -> None:
        """One more owner of a held block."""
        self.share_all((block,))

    def free(self, block: int) -> None:
        """One owner fewer; the last one gives the block back."""
        self.free_all((block,))

    def share_all(self, blocks: Iterable[int]) -> None:
        """One more owner of each of these held blocks; HOLEs are passed over."""
        references, cached = self._references, self._cached
        for block in blocks:
            if block >= 0:
                count = references[block]
                assert count > 0, f"block {block} is free and cannot be shared"
                references[block] = count + 1
                if count == 1 and cached[block]:
                    self._num_idle -= 1

    def free_all(self, blocks: Iterable[int]) -> None:
        """One owner fewer for each of these blocks, in this order; HOLEs are passed over."""
        references, cached, free = self._references, self._cached, self._free
        for block in blocks:
            if block >= 0:
                count = references[block] - 1
                # Else an owner has given up the cache's reference instead of its own.
                assert count >= cached[block], f"block {block} is freed twice"
                references[block] = count
                if not count:
                    free.append(block)
                elif count == 1 and cached[block]:
                    self._num_idle += 1

    def keep(self, blocks: Collection[int]) -> None:
        """The prefix cache becomes one more owner of each of these held blocks, and marks them as cached."""
        references, cached = self._references, self._cached
        for block in blocks:
            assert references[block] > 0, f"block {block} is free and cannot be kept"
            assert not cached[block], f"block {block} is cached already"
            references[block] += 1
            cached[block] = 1
        self._num_cached += len(blocks)

    def drop(self, blocks: Collection[int]) -> None:
        """The prefix cache gives up its reference and the mark."""
        references, cached, free = self._references, self._cached, self._free
        for block in blocks:
            assert cached[block], f"block {block} is not cached"
            cached[block] = 0
            references[block] -= 1
            if not references[block]:
                self._num_idle -= 1
                free.append(block)
        self._num_cached -= len(blocks)

    def check_integrity(self) -> None:
        """Free and held blocks add up, and no id is free twice or free and held at once. O(num_blocks)."""
        free = set(self._free)
        assert len(free) == len(self._free), "a block is free twice"
        assert not free or (min(free) >= 0 and max(free) < self.num_blocks), "a block that does not exist is free"
        assert not any(map(self._references.__getitem__, free)), "a free block is still held"
        held = self.num_blocks - self._references.count(0)
        assert len(free) + held == self.num_blocks, f"{len(free)} free + {held} held of {self.num_blocks}"
        cached = [count for count, mark in zip(self._references, self._cached, strict=True) if mark]
        assert len(cached) == self._num_cached, f"{len(cached)} blocks are cached, {self._num_cached} were counted"
        assert 0 not in cached, "a free block is marked as cached"
        assert cached.count(1) == self._num_idle, f"{cached.count(1)} blocks are idle, {self._num_idle} were counted"
