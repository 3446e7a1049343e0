"""Blocks are free or held, never both, and never lost."""

from __future__ import annotations

import random

import pytest

from lmkit.turbo.kv.block_pool import HOLE, BlockPool


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
    with pytest.raises(AssertionError, match="cannot be kept"):
        pool.keep([0])
    with pytest.raises(AssertionError, match="not cached"):
        pool.drop([0])
    (block,) = pool.allocate(1)
    pool.keep([block])
    with pytest.raises(AssertionError, match="cached already"):
        pool.keep([block])
    pool.free(block)
    with pytest.raises(AssertionError, match="freed twice"):
        pool.free(block)  # the reference that is left is the cache's


def test_a_cached_block_is_idle_while_nobody_else_holds_it() -> None:
    pool = BlockPool(4)
    blocks = pool.allocate(3)
    pool.keep(blocks[:2])
    assert (pool.num_cached, pool.num_idle) == (2, 0)
    pool.free_all([*blocks, HOLE])
    assert (pool.num_cached, pool.num_idle, pool.num_free) == (2, 2, 2)
    pool.share_all([HOLE, blocks[0]])
    assert pool.num_idle == 1
    pool.check_integrity()
    pool.drop(blocks[:2])
    assert (pool.num_cached, pool.num_idle, pool.num_free) == (0, 0, 3)
    assert pool.references(blocks[0]) == 1
    pool.check_integrity()


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
    pool._fresh, pool._references = free, references
    with pytest.raises(AssertionError, match=message):
        pool.check_integrity()


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("_num_idle", 0, "1 blocks are idle, 0 were counted"),
        ("_num_cached", 1, "2 blocks are cached, 1 were counted"),
        ("_cached", bytearray([1, 1, 1]), "3 blocks are cached, 2"),
    ],
)
def test_check_integrity_sees_wrong_marks(name: str, value: object, message: str) -> None:
    pool = BlockPool(3)
    blocks = pool.allocate(2)
    pool.keep(blocks)
    pool.free(blocks[0])
    pool.check_integrity()
    setattr(pool, name, value)
    with pytest.raises(AssertionError, match=message):
        pool.check_integrity()


def test_random_operations_agree_with_a_plain_count() -> None:
    rng, pool = random.Random(0), BlockPool(20)
    owners: list[int] = []  # one entry per reference, those of the cache aside
    cached: set[int] = set()
    for _ in range(3000):
        action = rng.randrange(5)
        if action == 0 and pool.num_free:
            blocks = pool.allocate(rng.randint(1, pool.num_free))
            assert not set(blocks) & {*owners, *cached}
            owners += blocks
        elif action == 1 and owners:
            blocks = rng.choices([*owners, *cached], k=3)
            owners += blocks
            pool.share_all(blocks)
        elif action == 2 and set(owners) - cached:
            blocks = sorted(set(owners) - cached)[: rng.randint(1, 5)]
            cached |= set(blocks)
            pool.keep(blocks)
        elif action == 3 and cached:
            blocks = sorted(cached)[: rng.randint(1, 5)]
            cached -= set(blocks)
            pool.drop(blocks)
        elif owners:
            pool.free_all([owners.pop(rng.randrange(len(owners))) for _ in range(rng.randint(1, len(owners)))])
        assert pool.num_free == 20 - len({*owners, *cached})
        assert (pool.num_cached, pool.num_idle) == (len(cached), len(cached - set(owners)))
        assert all(pool.references(b) == owners.count(b) + (b in cached) for b in range(20))
        pool.check_integrity()


def test_memory_is_taken_as_blocks_are_used_and_given_back() -> None:
    pool = BlockPool(8)
    assert pool.num_backed == 0
    first = pool.allocate(3)
    pool.free_all(first)
    assert (pool.num_backed, pool.num_free) == (3, 8)
    assert sorted(pool.allocate(3)) == first, "blocks that have memory come first"
    pool.free_all(first)
    held = pool.allocate(4)
    assert (sorted(held), pool.num_backed) == ([0, 1, 2, 3], 4)
    pool.free_all(held[:2])
    assert pool.give_back() == sorted(held[:2])
    assert (pool.num_backed, pool.num_free) == (2, 6)
    pool.check_integrity()
    assert pool.give_back() == []
    assert pool.allocate(3) == [*sorted(held[:2]), 4], "the lowest block is used first"
    pool.check_integrity()
