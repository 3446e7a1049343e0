"""The pool takes memory as it is used. Where the system lacks it, cached blocks are used again instead."""

from __future__ import annotations

from lmkit.turbo.decisions import DecisionStats
from lmkit.turbo.kv.growth import GRANT
from lmkit.turbo.kv.limits import KVLimits
from lmkit.turbo.kv.manager import KVManager
from tests.turbo.kv.test_manager import compute, sequence

SIZE, BLOCKS = 4, 3 * GRANT


def manager(shortage: int) -> KVManager:
    kv = KVManager(KVLimits(BLOCKS, SIZE), DecisionStats())
    kv.growth.shortage = lambda: shortage
    return kv


def run(kv: KVManager, name: int, blocks: int) -> None:
    """A sequence that fills `blocks` blocks, and leaves them to the cache."""
    seq = sequence(str(name), [name] * (blocks * SIZE))
    compute(kv, seq)
    kv.release(seq)


def test_the_cache_grows_while_there_is_memory() -> None:
    kv = manager(0)
    for name in range(3):
        run(kv, name, GRANT)
    assert (kv.pool.num_backed, kv.pool.num_cached) == (BLOCKS, BLOCKS)


def test_without_memory_the_cache_does_not_grow() -> None:
    kv = manager(1)
    for name in range(3):
        run(kv, name, GRANT)
    assert (kv.pool.num_backed, kv.pool.num_cached) == (GRANT, GRANT)
    run(kv, 3, GRANT + 5)  # what a sequence needs it gets
    assert kv.pool.num_backed == GRANT + 5
    kv.check_idle()


def test_the_system_is_asked_once_for_many_blocks() -> None:
    kv, asked = manager(0), [0]

    def shortage() -> int:
        asked[0] += 1
        return 0

    kv.growth.shortage = shortage
    for name in range(GRANT):
        run(kv, name, 1)
    assert asked == [1]
    run(kv, GRANT, 1)
    assert asked == [2]


def test_idle_blocks_give_their_memory_back() -> None:
    kv = manager(0)
    run(kv, 0, 8)
    run(kv, 1, 8)
    assert kv.growth.give_back() == []
    assert kv.growth.give_back(evicted=5) == [3, 4, 5, 6, 7], "the end of what was used longest ago"
    assert (kv.pool.num_cached, kv.pool.num_backed) == (11, 11)
    assert len(kv.growth.give_back(evicted=100)) == 11
    assert kv.pool.num_backed == 0
    kv.check_idle()
