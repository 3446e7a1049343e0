"""Block tables grow all or nothing and are given back whole."""

from __future__ import annotations

import random

import pytest

from lmkit.turbo.kv_manager import KVManager
from lmkit.turbo.sequence import Sequence
from tests.turbo.fakes import request


def sequence(name: str = "a") -> Sequence:
    return Sequence(request(name, 1), 0, [2], 100, ())


def test_reserves_only_what_is_missing() -> None:
    kv, seq = KVManager(5, 4), sequence()
    assert kv.reserve(seq, 4) == [0]
    assert kv.reserve(seq, 4) == []
    assert kv.reserve(seq, 2) == []
    assert kv.reserve(seq, 9) == [1, 2]
    assert seq.block_table == [0, 1, 2]
    assert kv.num_free == 2
    kv.check_integrity([seq])


def test_a_reservation_that_does_not_fit_changes_nothing() -> None:
    kv, a, b = KVManager(3, 4), sequence("a"), sequence("b")
    kv.reserve(a, 8)
    assert kv.reserve(b, 5) is None
    assert (kv.num_free, b.block_table) == (1, [])
    assert kv.reserve(b, 4) == [2]
    kv.check_integrity([a, b])


def test_release_gives_all_back() -> None:
    kv, seq = KVManager(3, 4), sequence()
    kv.reserve(seq, 12)
    kv.release(seq)
    kv.release(seq)
    assert (kv.num_free, seq.block_table) == (3, [])
    assert kv.reserve(seq, 12) == [0, 1, 2]


def test_check_integrity_sees_leaks_and_double_owners() -> None:
    kv, a, b = KVManager(4, 4), sequence("a"), sequence("b")
    kv.reserve(a, 4)
    kv.reserve(b, 4)
    with pytest.raises(AssertionError, match="in no table"):
        kv.check_integrity([a])
    b.block_table = [0]
    with pytest.raises(AssertionError, match="2 owners"):
        kv.check_integrity([a, b])
    b.block_table = [1, 1]
    with pytest.raises(AssertionError, match="in its table twice"):
        kv.check_integrity([a, b])


def test_random_reservations_never_overlap() -> None:
    rng, kv = random.Random(1), KVManager(12, 3)
    seqs = [sequence(str(i)) for i in range(5)]
    lens = [0] * 5
    for _ in range(2000):
        i = rng.randrange(5)
        if rng.random() < 0.3:
            kv.release(seqs[i])
            lens[i] = 0
        else:
            want = lens[i] + rng.randint(1, 7)
            fits = kv.blocks_for(want) - len(seqs[i].block_table) <= kv.num_free
            got = kv.reserve(seqs[i], want)
            assert (got is not None) == fits
            lens[i] = want if fits else lens[i]
        assert [len(s.block_table) for s in seqs] == [kv.blocks_for(n) for n in lens]
        kv.check_integrity(seqs)
