"""Blocks are free or held, never both, and never lost."""

from __future__ import annotations

import random

import pytest

from lmkit.turbo.block_pool import BlockPool


def test_hands_out_every_block_once() -> None:
    pool = BlockPool(5)
    assert pool.allocate(2) + pool.allocate(3) == [0, 1, 2, 3, 4]
    assert pool.num_free == 0
    assert pool.allocate(0) == []


def test_a_shared_block_is_free_when_its_last_owner_leaves() -> None:
    pool = BlockPool(2)
    (block,) = pool.allocate(1)
    pool.share(block)
    pool.free(block)
    assert (pool.num_free, pool.references(block)) == (1, 1)
    pool.check_integrity()
    pool.free(block)
    assert (pool.num_free, pool.references(block)) == (2, 0)
    pool.check_integrity()


def test_misuse_is_caught() -> None:
    pool = BlockPool(2)
    with pytest.raises(AssertionError, match="3 blocks asked of 2 free"):
        pool.allocate(3)
    with pytest.raises(AssertionError, match="freed twice"):
        pool.free(0)
    with pytest.raises(AssertionError, match="cannot be shared"):
        pool.share(0)


@pytest.mark.parametrize(
    ("free", "references", "message"),
    [
        ([1, 1], [1, 0, 1], "free twice"),
        ([1, 3], [1, 0, 1], "does not exist"),
        ([1, -1], [1, 0, 1], "does not exist"),
        ([0, 1], [1, 0, 1], "still held"),
        ([1], [1, 0, 0], "1 free \\+ 1 held of 3"),
    ],
)
def test_check_integrity_sees_damage(free: list[int], references: list[int], message: str) -> None:
    pool = BlockPool(3)
    pool._free, pool._references = free, references
    with pytest.raises(AssertionError, match=message):
        pool.check_integrity()


def test_random_operations_agree_with_a_plain_count() -> None:
    rng, pool = random.Random(0), BlockPool(20)
    owners: list[int] = []  # one entry per reference
    for _ in range(3000):
        action = rng.randrange(3)
        if action == 0 and pool.num_free:
            blocks = pool.allocate(rng.randint(1, pool.num_free))
            assert not set(blocks) & set(owners)
            owners += blocks
        elif action == 1 and owners:
            owners.append(rng.choice(owners))
            pool.share(owners[-1])
        elif owners:
            for _ in range(rng.randint(1, len(owners))):
                pool.free(owners.pop(rng.randrange(len(owners))))
        assert pool.num_free == 20 - len(set(owners))
        assert all(pool.references(b) == owners.count(b) for b in range(20))
        pool.check_integrity()
