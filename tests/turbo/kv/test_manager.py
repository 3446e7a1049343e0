"""Block tables grow all or nothing and are given back whole."""

from __future__ import annotations

import math
import random
from array import array
from typing import Any

import pytest

from lmkit.models.kv_layout import KVClass
from lmkit.turbo.decisions import DecisionStats
from lmkit.turbo.kv.manager import KVLimits, KVManager
from lmkit.turbo.kv.radix_cache import HOLE
from lmkit.turbo.sequence import Sequence
from tests.turbo.fakes import request


def manager(num_blocks: int, block_size: int, **options: Any) -> KVManager:
    return KVManager(KVLimits(num_blocks, block_size, **({"prefix_cache": False} | options)), DecisionStats())


def sequence(name: str = "a", tokens: list[int] | int = 1, **fields: Any) -> Sequence:
    req = request(name, tokens, **fields)
    return Sequence(req, 0, 0.0, math.inf, array("i", req.prompt_ids), 100, ())


def compute(kv: KVManager, seq: Sequence) -> None:
    """As a step that has run: KV of all its tokens is there."""
    assert kv.reserve(seq, seq.num_tokens) is not None
    seq.num_computed = seq.num_completed = seq.num_tokens


def held(seq: Sequence) -> int:
    return sum(len(table.blocks) for table in seq.tables)


def test_reserves_only_what_is_missing() -> None:
    kv, seq = manager(5, 4), sequence()
    assert kv.reserve(seq, 4) == [[0]]
    assert kv.reserve(seq, 4) == []
    assert kv.reserve(seq, 2) == []
    assert kv.reserve(seq, 9) == [[1, 2]]
    assert seq.tables[0].blocks == [0, 1, 2]
    assert kv.num_available == 2
    kv.check_integrity([seq])


def test_a_reservation_that_does_not_fit_changes_nothing() -> None:
    kv, a, b = manager(3, 4), sequence("a"), sequence("b")
    kv.reserve(a, 8)
    assert kv.reserve(b, 5) is None
    assert (kv.num_available, b.tables[0].blocks) == (1, [])
    assert kv.reserve(b, 4) == [[2]]
    kv.check_integrity([a, b])


def test_release_gives_all_back() -> None:
    kv, seq = manager(3, 4), sequence()
    kv.reserve(seq, 12)
    kv.release(seq)
    kv.release(seq)
    assert (kv.num_available, seq.tables) == (3, [])
    assert kv.reserve(seq, 12) == [[0, 1, 2]]


def test_check_integrity_sees_leaks_and_double_owners() -> None:
    kv, a, b = manager(4, 4), sequence("a"), sequence("b")
    kv.reserve(a, 4)
    kv.reserve(b, 4)
    with pytest.raises(AssertionError, match="0 owners"):
        kv.check_integrity([a])
    b.tables[0].blocks = [0]
    with pytest.raises(AssertionError, match="owners"):
        kv.check_integrity([a, b])
    b.tables[0].blocks = [1, 1]
    with pytest.raises(AssertionError, match="in its table twice"):
        kv.check_integrity([a, b])


def test_random_reservations_never_overlap() -> None:
    rng, kv = random.Random(1), manager(12, 3)
    seqs = [sequence(str(i)) for i in range(5)]
    lens = [0] * 5
    for _ in range(2000):
        i = rng.randrange(5)
        if rng.random() < 0.3:
            kv.release(seqs[i])
            lens[i] = 0
        else:
            want = lens[i] + rng.randint(1, 7)
            fits = kv.limits.blocks_for(want) - held(seqs[i]) <= kv.num_available
            got = kv.reserve(seqs[i], want)
            assert (got is not None) == fits
            lens[i] = want if fits else lens[i]
        assert [held(s) for s in seqs] == [kv.limits.blocks_for(n) for n in lens]
        kv.check_integrity(seqs)


def test_what_was_computed_is_found_again_up_to_the_token_whose_logits_are_wanted() -> None:
    kv, a, b = manager(8, 4, prefix_cache=True), sequence("a", 10), sequence("b", 10)
    compute(kv, a)
    kv.release(a)
    prefix = kv.find(b)
    (match,) = prefix.matches
    assert (match.num_tokens, match.tail is not None) == (9, True)
    kv.acquire(b, prefix)
    assert b.tables[0].blocks[:2] == match.blocks
    assert kv.copies == [(match.tail, b.tables[0].blocks[2])]
    assert (b.num_computed, b.num_completed) == (9, 8)  # the copy is yet to be made
    kv.check_integrity([b])


def test_tenants_and_salts_and_scored_prompts_find_nothing() -> None:
    kv, a = manager(8, 4, prefix_cache=True), sequence("a", 10)
    compute(kv, a)
    kv.release(a)
    for other in ({"tenant": "x"}, {"cache_salt": "x"}, {"prompt_logprobs": True}):
        assert kv.find(sequence("b", 10, **other)).num_tokens == 0


def test_a_lease_keeps_a_conversation_until_it_ends_or_its_blocks_are_needed() -> None:
    kv, a, other = manager(8, 4, prefix_cache=True, session_lease=10), sequence("a", 12, session_id="s"), sequence("b")
    compute(kv, a)
    kv.release(a, now=0.0, lease=True)
    assert (kv.num_available, len(kv.leases)) == (5, 1)
    kv.leases.expire(9.9)
    assert kv.reserve(other, 20) is not None
    assert kv.find(sequence("c", 13)).num_tokens == 12
    kv.leases.expire(10.0)
    assert (kv.num_available, len(kv.leases)) == (3, 0)
    kv.release(other)
    compute(kv, a := sequence("a", 12, session_id="s"))
    kv.release(a, now=20.0, lease=True)
    assert kv.reserve(other, 24) is not None  # more than is free: the lease ends early
    assert (len(kv.leases), kv.decision_stats.decisions["lease ended: blocks needed"]) == (0, 1)
    kv.check_integrity([other])


def test_blocks_of_a_sliding_window_go_round() -> None:
    kv, seq = manager(200, 16, classes=(KVClass(64, 5),), max_step_tokens=32), sequence("a", 4000)
    for end in range(32, 4001, 32):
        assert kv.reserve(seq, end) is not None
        seq.num_computed = seq.num_completed = end
        assert kv.pool.num_blocks - kv.num_available <= kv.limits.blocks_for(4000) < 16
    first = (4000 - 32 - 64 + 1) // 64 * 64 // 16
    assert [i for i, block in enumerate(seq.tables[0].blocks) if block != HOLE] == [0, *range(first, 250)]
    kv.release(seq)
    assert kv.num_available == 200
