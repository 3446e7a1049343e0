"""Keys, costs, the host tier and the count of failures."""

from __future__ import annotations

import errno
import hashlib
import logging
import random
from collections import OrderedDict

import numpy as np
import pytest

from lmkit.turbo.kv.tiers import record
from lmkit.turbo.kv.tiers.cost import LoadCost
from lmkit.turbo.kv.tiers.failures import FAILURES_IN_A_ROW, LOG_SECONDS, REST_SECONDS, Failures
from lmkit.turbo.kv.tiers.host import HostBlock, HostTier
from lmkit.turbo.kv.tiers.keys import block_keys, root_key


def keys_of(tokens: list[int], root: bytes = b"root", size: int = 4) -> list[bytes]:
    keys: list[bytes] = []
    block_keys(root, np.array(tokens, np.int32), size, keys)
    return keys


def test_keys_are_a_chain_of_full_blocks() -> None:
    tokens = list(range(-3, 7))
    first = hashlib.sha256(b"root" + np.array(tokens[:4], "<i4").tobytes()).digest()
    second = hashlib.sha256(first + np.array(tokens[4:8], "<i4").tobytes()).digest()
    assert keys_of(tokens) == [first, second]
    assert keys_of(tokens[:3]) == []
    assert keys_of([9, *tokens[1:]])[1] != second  # what is before a block counts


def test_keys_are_extended() -> None:
    tokens = np.random.default_rng(0).integers(0, 1 << 20, 103).astype(np.int32)
    known: list[bytes] = []
    for end in (2, 10, 11, 40, 40, 103):
        block_keys(b"root", tokens[:end], 5, known)
        assert known == keys_of(tokens[:end].tolist(), size=5)
    block_keys(b"root", np.repeat(tokens, 2)[::2], 5, again := known[:3])  # not contiguous
    assert again == known


def test_roots_tell_identities_tenants_and_salts_apart() -> None:
    parts = [(b"f", "a", "b"), (b"g", "a", "b"), (b"f", "ab", ""), (b"f", "", "ab"), (b"fa", "", "b"), (b"f", "a", "")]
    assert len({root_key(*part) for part in parts}) == len(parts)
    assert root_key(b"f", "\ud800", "é") == root_key(b"f", "\ud800", "é")


def test_the_header_is_what_the_documentation_says() -> None:
    key, data = bytes(range(32)), b"x" * 100
    head = record.header(key, len(data), record.checksum(key, data))
    assert len(head) == record.HEADER_BYTES
    assert head[:24] == b"lmkit-kv" + (1).to_bytes(4, "little") + bytes(4) + (100).to_bytes(8, "little")
    assert head[24:60] == key + bytes(4)
    import zlib

    assert head[60:] == zlib.crc32(head[:60] + data).to_bytes(4, "little")


def test_cost_begins_with_an_assumption_and_learns() -> None:
    cost = LoadCost(1 << 20)
    assert 0.0005 < cost.seconds({"host": 1}) < cost.seconds({"disk": 1}) < 0.01
    assert LoadCost(1 << 15).seconds({"disk": 6250}) < 6250 / 1000  # more than 1000 small blocks a second
    assert cost.seconds({}) == cost.latency
    cost.observe("disk", 1000, 2.0)
    assert cost.seconds({"disk": 500}) == pytest.approx(1.0 + cost.latency, rel=1e-3)
    for _ in range(16):  # half the way
        cost.observe("disk", 1, 0.004)
    assert cost.per_block["disk"] == pytest.approx(0.003)
    before = cost.seconds({"host": 3})
    cost.observe("disk", 1, 9.0)
    cost.observe("host", 0, 9.0)
    assert cost.seconds({"host": 3}) == before
    for _ in range(50):
        cost.observe_latency(0.1)
    assert cost.seconds({}) == pytest.approx(0.1, rel=1e-3)


def test_the_host_tier_keeps_what_was_used_last() -> None:
    tier, rng = HostTier(10, 75), random.Random(0)
    model: OrderedDict[bytes, HostBlock] = OrderedDict()
    for step in range(2000):
        key = bytes([rng.randrange(12)])
        if rng.random() < 0.1:
            tier.remove(key)
            model.pop(key, None)
        elif rng.random() < 0.5:
            found = tier.get(key)
            assert found is model.get(key)
            other = bytes([rng.randrange(12)])
            tier.touch([key, other])
            for touched in (other, key):
                if touched in model:
                    model.move_to_end(touched)
        else:
            block = HostBlock(memoryview(b"0123456789"), step)
            tier.put(key, block)
            model[key] = block
            model.move_to_end(key)
            if len(model) > 7:
                model.popitem(last=False)
        assert {bytes([i]) for i in range(12) if bytes([i]) in tier} == set(model)
        assert tier.num_bytes == 10 * len(model) <= 75
    assert tier.num_evicted > 0


def test_failures_are_logged_once_a_minute_and_counted_always(caplog: pytest.LogCaptureFixture) -> None:
    now = 1000.0
    failures = Failures(lambda: now)
    full, broken = OSError(errno.ENOSPC, "full"), OSError(errno.EIO, "broken")
    with caplog.at_level(logging.WARNING, "lmkit"):
        for error in (full, full, broken, full, broken, ValueError("odd")):
            failures.note("writing", error)
        assert (len(caplog.records), failures.count) == (3, 6)
        now += LOG_SECONDS
        failures.note("writing", full)
        assert len(caplog.records) == 4


def test_writing_rests_when_it_keeps_failing() -> None:
    now = 1000.0
    failures, error = Failures(lambda: now), OSError(errno.ENOSPC, "full")
    for _ in range(FAILURES_IN_A_ROW - 1):
        failures.note_write("writing", error)
    failures.written()
    for _ in range(FAILURES_IN_A_ROW):
        assert not failures.resting
        failures.note_write("writing", error)
    assert failures.resting
    now += REST_SECONDS
    assert not failures.resting  # one more try
    failures.note_write("writing", error)
    assert failures.resting
    now += REST_SECONDS
    failures.written()
    failures.note_write("writing", error)
    assert not failures.resting
