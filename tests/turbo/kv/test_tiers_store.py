"""Saves and loads in the background: right bytes, each load reported once, nothing blocks, failures are misses."""

from __future__ import annotations

import errno
import random
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from lmkit.errors import ConfigError
from lmkit.turbo.kv.tiers import files, store
from lmkit.turbo.kv.tiers.store import Loaded, TierStore
from lmkit.turbo.plan import Load, Save
from tests.turbo.kv.tier_helpers import (
    BLOCK,
    ArrayBlocks,
    HeldSaver,
    chain,
    collect,
    content,
    disk,
    fill,
    load,
    path_of,
    save,
    settle,
)


@pytest.mark.parametrize(("host", "on_disk"), [(20, False), (0, True), (20, True)])
def test_what_is_saved_is_loaded(tmp_path: Path, host: int, on_disk: bool) -> None:
    blocks, keys = ArrayBlocks(12), chain(12)
    tiers = TierStore(blocks, host_bytes=host * BLOCK, disk=disk(tmp_path) if on_disk else None)
    assert tiers.lookup(keys) == 0
    save(tiers, blocks, keys[:9])
    assert [tiers.lookup(keys), tiers.lookup(keys[:4]), tiers.lookup(keys[9:]), tiers.lookup([])] == [9, 4, 0, 0]
    assert load(tiers, blocks, keys) == Loaded(7, 9, {"host" if host else "disk": 9})
    stats = tiers.stats()
    assert (stats["saved"], stats["loaded"], stats["misses"], stats["damaged"], stats["failures"]) == (9, 9, 1, 0, 0)
    assert stats.get("host_bytes", 0) == (9 * BLOCK if host else 0)
    assert stats.get("disk_bytes", 0) == (9 * 4096 if on_disk else 0)
    tiers.close()


def test_the_disk_serves_after_a_restart_and_fills_host_memory(tmp_path: Path) -> None:
    blocks, keys = ArrayBlocks(6), chain(6)
    tiers = TierStore(blocks, disk=disk(tmp_path))
    save(tiers, blocks, keys)
    tiers.close()
    tiers = TierStore(blocks, host_bytes=4 * BLOCK, disk=disk(tmp_path))
    assert tiers.lookup(keys) == 6
    assert load(tiers, blocks, keys).hits == {"disk": 6}
    assert load(tiers, blocks, keys[2:]).hits == {"host": 4}
    assert load(tiers, blocks, keys[:1]).hits == {"disk": 1}
    tiers.close()


def test_a_known_key_is_not_saved_again_but_counts_as_used(tmp_path: Path) -> None:
    blocks, keys = ArrayBlocks(4), chain(4)
    tiers = TierStore(blocks, host_bytes=3 * BLOCK, disk=disk(tmp_path, blocks=3))
    save(tiers, blocks, keys[:3])
    blocks.failing = {0}  # would fail if it were read
    save(tiers, blocks, keys[:1])
    blocks.failing = set()
    tiers.save([Save(keys[3], 3)])
    settle(tiers)
    assert [tiers.lookup([key]) for key in keys] == [1, 0, 1, 1]
    assert (tiers.stats()["present"], tiers.stats()["failures"]) == (1, 0)
    tiers.close()


@pytest.mark.parametrize("on_disk", [False, True])
def test_a_chain_shrinks_from_its_end(tmp_path: Path, on_disk: bool) -> None:
    blocks, keys, more = ArrayBlocks(6), chain(6), chain(6, "more")
    tier = disk(tmp_path, blocks=6) if on_disk else None
    tiers = TierStore(blocks, host_bytes=0 if on_disk else 6 * BLOCK, disk=tier)
    save(tiers, blocks, keys)
    tiers.touch(keys)
    save(tiers, blocks, more[:2])
    assert tiers.lookup(keys) == 4
    assert load(tiers, blocks, keys[:4]).num_blocks == 4  # used later than the two others
    save(tiers, blocks, chain(3, "third"))
    assert (tiers.lookup(keys), tiers.lookup(more)) == (3, 0)
    tiers.close()


def test_what_is_being_loaded_does_not_leave(tmp_path: Path) -> None:
    blocks, keys = ArrayBlocks(12), chain(6)
    tiers = TierStore(blocks, disk=disk(tmp_path, blocks=12))
    save(tiers, blocks, keys)
    save(tiers, blocks, chain(6, "more"))
    gate, begun, write = threading.Event(), threading.Event(), blocks.write

    def held(block: int, data: memoryview) -> None:
        begun.set()
        assert gate.wait(20)
        write(block, data)

    blocks.write = held  # type: ignore[method-assign]
    tiers.load(Load(1, keys, list(range(6))))
    assert begun.wait(20)
    tiers.save([Save(key, 6 + index) for index, key in enumerate(chain(6, "third"))])
    settle(tiers)
    gate.set()
    assert collect(tiers, loads=1) == [Loaded(1, 6, {"disk": 6})]
    tiers.close()


def test_a_disk_that_fails_leaves_host_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    blocks, keys = ArrayBlocks(8), chain(8)
    tiers = TierStore(blocks, host_bytes=8 * BLOCK, disk=disk(tmp_path))

    def fail(*args: Any) -> int:
        raise OSError(errno.ENOSPC, "full")

    with monkeypatch.context() as patched:
        patched.setattr(files.os, "writev", fail)
        save(tiers, blocks, keys)
    assert load(tiers, blocks, keys).hits == {"host": 8}
    assert (tiers.stats()["disk_blocks"], tiers.stats()["failures"]) == (0, 5)
    tiers.close()


def test_damage_ends_a_load(tmp_path: Path) -> None:
    blocks, keys, tier = ArrayBlocks(5), chain(5), disk(tmp_path)
    tiers = TierStore(blocks, disk=tier)
    save(tiers, blocks, keys)
    path = path_of(tier, keys[3])
    path.write_bytes(path.read_bytes()[:-1] + b"?")
    assert load(tiers, blocks, keys) == Loaded(7, 3, {"disk": 3})
    assert tiers.stats()["damaged"] == 1
    assert tiers.lookup(keys) == 3  # the next lookup knows
    tiers.close()


def test_damage_in_host_memory_is_found(tmp_path: Path) -> None:
    blocks, keys = ArrayBlocks(3), chain(3)
    tiers = TierStore(blocks, host_bytes=9 * BLOCK, disk=disk(tmp_path))
    save(tiers, blocks, keys)
    host = tiers._host
    assert host is not None
    found = host.get(keys[1])
    assert found is not None
    found.data[77] ^= 1
    assert load(tiers, blocks, keys).hits == {"host": 2, "disk": 1}
    assert tiers.stats()["damaged"] == 1
    assert load(tiers, blocks, keys).hits == {"host": 3}
    tiers.close()


def test_a_device_that_fails(tmp_path: Path) -> None:
    blocks, keys = ArrayBlocks(4), chain(4)
    tiers = TierStore(blocks, host_bytes=9 * BLOCK, disk=disk(tmp_path))
    blocks.failing = {1}
    save(tiers, blocks, keys)
    assert [tiers.lookup([key]) for key in keys] == [1, 0, 1, 1]
    blocks.failing = set()
    save(tiers, blocks, keys)
    blocks.failing = {2}
    assert load(tiers, blocks, keys) == Loaded(7, 2, {"host": 2})
    blocks.failing = set()
    assert load(tiers, blocks, keys).num_blocks == 4
    assert tiers.stats()["failures"] == 2
    tiers.close()


def test_a_block_may_change_as_soon_as_save_returns(tmp_path: Path) -> None:
    blocks, keys = ArrayBlocks(6), chain(6)
    tiers = TierStore(blocks, disk=disk(tmp_path))
    saver = HeldSaver(tiers)
    tiers.save(fill(blocks, keys))
    blocks.data[:] = 255
    saver.go()
    settle(tiers)
    assert load(tiers, blocks, keys).num_blocks == 6
    tiers.close()


class DeviceBlocks(ArrayBlocks):
    """A device that copies by itself: the bytes arrive when they are waited for, if at all."""

    def read(self, block: int, out: memoryview) -> Callable[[], None]:
        there = self.data[block].copy()
        np.frombuffer(out, np.uint8)[:] = 255

        def wait() -> None:
            self._touch(block)
            np.frombuffer(out, np.uint8)[:] = there

        return wait


def test_a_copy_that_a_device_makes_is_waited_for_by_the_saver() -> None:
    blocks, keys = DeviceBlocks(6), chain(6)
    tiers = TierStore(blocks, host_bytes=20 * BLOCK)
    blocks.failing = {4}
    tiers.save(fill(blocks, keys))
    settle(tiers)
    blocks.failing = set()
    assert load(tiers, blocks, keys) == Loaded(7, 4, {"host": 4})
    assert (tiers.stats()["saved"], tiers.stats()["failures"]) == (5, 1)
    tiers.close()


def test_loads_go_ahead_of_saves(tmp_path: Path) -> None:
    blocks, keys, more = ArrayBlocks(50), chain(3), chain(50, "more")
    tiers = TierStore(blocks, disk=disk(tmp_path))
    save(tiers, blocks, keys)
    saver = HeldSaver(tiers)
    tiers.save(fill(blocks, more))
    assert load(tiers, blocks, keys).num_blocks == 3
    assert tiers.stats()["queued_saves"] == 50
    saver.go()
    settle(tiers)
    assert tiers.lookup(more) == 50
    tiers.close()


def test_what_exceeds_the_backlog_is_dropped_at_once() -> None:
    blocks, keys = ArrayBlocks(100), chain(100)
    tiers = TierStore(blocks, host_bytes=200 * BLOCK, backlog_bytes=70 * BLOCK)
    saver = HeldSaver(tiers)
    blocks.failing = {80}  # would fail if it were read
    tiers.save(fill(blocks, keys))
    assert (tiers.stats()["dropped"], tiers.stats()["failures"]) == (30, 0)
    saver.go()
    settle(tiers)
    assert (tiers.lookup(keys), tiers.stats()["saved"], tiers.stats()["dropped"]) == (70, 70, 30)
    tiers.close()


def test_expected_seconds_cover_the_queue(tmp_path: Path) -> None:
    blocks, keys = ArrayBlocks(10), chain(10)
    tiers = TierStore(blocks, disk=disk(tmp_path))
    save(tiers, blocks, keys)
    gate, write = threading.Event(), blocks.write

    def held(block: int, data: memoryview) -> None:
        assert gate.wait(20)
        write(block, data)

    idle, part = tiers.load_seconds(keys), tiers.load_seconds(keys[:1])
    assert 0 < part < idle < 1
    blocks.write = held  # type: ignore[method-assign]
    for job in range(3):
        tiers.load(Load(job, keys, list(range(10))))
    assert tiers.load_seconds(keys) > 3 * idle
    assert tiers.load_seconds(chain(2, "unknown")) < tiers.load_seconds(keys)
    gate.set()
    collect(tiers, loads=3)
    assert tiers.load_seconds([]) == pytest.approx(tiers._cost.latency)
    tiers.close()


def test_wait_ends_with_the_first_result_or_the_time() -> None:
    blocks, keys = ArrayBlocks(2), chain(2)
    tiers = TierStore(blocks, host_bytes=9 * BLOCK)
    tiers.wait(0.01)
    assert tiers.finished() == []
    save(tiers, blocks, keys)
    tiers.load(Load(1, keys, [0, 1]))
    start = time.monotonic()
    tiers.wait(20)
    assert time.monotonic() - start < 10
    assert tiers.finished() == [Loaded(1, 2, {"host": 2})]
    tiers.close()


@pytest.mark.parametrize("seed", range(3))
def test_random_traffic(tmp_path: Path, seed: int) -> None:
    """Against a model that knows what each key holds: loads are right, everything ends once, bounds hold."""
    rng, blocks, tier = random.Random(seed), ArrayBlocks(64), disk(tmp_path, blocks=25)
    tiers = TierStore(blocks, host_bytes=10 * BLOCK, disk=tier)
    chains = [chain(rng.randrange(1, 12), str(n)) for n in range(8)]
    free = set(range(64))
    loading: dict[int, Load] = {}
    reported = 0
    for job in range(300):
        keys = rng.choice(chains)
        taken = rng.sample(sorted(free), min(len(keys), len(free)))
        keys = keys[: len(taken)]
        if rng.random() < 0.5:
            for block, key in zip(taken, keys, strict=True):
                blocks.data[block] = content(key)
            tiers.save([Save(key, block) for block, key in zip(taken, keys, strict=True)])
            blocks.data[taken] = 0
        else:
            free -= set(taken)
            tiers.load(load_job := Load(job, keys, taken))
            loading[job] = load_job
        if rng.random() < 0.05 and (victims := list(tmp_path.rglob("*.kv"))):
            victims[0].write_bytes(b"torn")
        while len(free) < 30 or (job == 299 and loading):
            tiers.wait(10)
            for done in tiers.finished():
                load_job = loading.pop(done.job)  # KeyError if it is reported twice
                for block, key in list(zip(load_job.blocks, load_job.keys, strict=True))[: done.num_blocks]:
                    assert (blocks.data[block] == content(key)).all()
                free |= set(load_job.blocks)
                reported += 1
        assert tier.num_bytes <= 25 * 4096
        assert tiers.stats()["host_bytes"] <= 10 * BLOCK
    assert reported > 100
    settle(tiers)
    stats = tiers.stats()
    assert min(stats["saved"], stats["present"], stats["loaded_host"], stats["loaded_disk"]) > 0
    assert tiers.finished() == []
    tiers.close()
    assert sum(p.stat().st_size for p in tmp_path.rglob("*.kv")) <= 25 * 4096


def test_close_finishes_what_it_can_and_reports_the_rest(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    blocks, keys, more = ArrayBlocks(40), chain(40), chain(40, "more")
    tiers = TierStore(blocks, disk=disk(tmp_path))
    monkeypatch.setattr(store, "CLOSE_SECONDS", 20.0)
    tiers.save(fill(blocks, keys))
    tiers.close()
    assert tiers.stats()["saved"] == 40
    monkeypatch.setattr(store, "CLOSE_SECONDS", 0.1)
    tiers = TierStore(blocks, disk=disk(tmp_path))
    assert tiers.lookup(keys) == 40

    def slow(*_: object) -> None:
        time.sleep(0.02)

    blocks.write = slow  # type: ignore[method-assign]
    monkeypatch.setattr(tiers, "_keep", slow)
    tiers.save(fill(blocks, more))
    for job in range(3):
        tiers.load(Load(job, keys, list(range(40))))
    tiers.close()
    loads = tiers.finished()
    assert [done.job for done in loads] == [0, 1, 2]
    assert loads[0].num_blocks < 40
    assert [done.num_blocks for done in loads[1:]] == [0, 0]
    dropped = tiers.stats()["dropped"]
    assert 0 < dropped <= 40
    tiers.save([Save(more[39], 0)])  # too late: refused, and said so
    tiers.load(Load(9, keys, list(range(40))))
    assert (tiers.finished(), tiers.stats()["dropped"]) == ([Loaded(9, 0, {})], dropped + 1)


def test_close_does_not_wait_for_a_thread_that_hangs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(store, "CLOSE_SECONDS", 0.05)
    blocks = ArrayBlocks(3)
    tiers = TierStore(blocks, host_bytes=9 * BLOCK)
    saver = HeldSaver(tiers)
    tiers.save(fill(blocks, chain(3)))
    assert saver.begun.wait(20)
    start = time.monotonic()
    tiers.close()
    assert time.monotonic() - start < 10
    assert tiers.stats()["dropped"] == 2
    saver.go()


def test_a_process_ends_with_a_backlog() -> None:
    code = """
from tests.turbo.kv.tier_helpers import *
blocks = ArrayBlocks(100)
store = TierStore(blocks, host_bytes=100 * BLOCK)
HeldSaver(store)
store.save(fill(blocks, chain(100)))
"""
    assert subprocess.run([sys.executable, "-c", code], timeout=15, check=False).returncode == 0


def test_host_memory_for_no_block() -> None:
    with pytest.raises(ConfigError, match="kv_host_memory 2999 holds no block of 3000 bytes; raise it"):
        TierStore(ArrayBlocks(1), host_bytes=BLOCK - 1)


def test_without_tiers_nothing_is_found() -> None:
    blocks = ArrayBlocks(2)
    tiers = TierStore(blocks)
    save(tiers, blocks, chain(2))
    assert tiers.lookup(chain(2)) == 0
    assert load(tiers, blocks, chain(2)) == Loaded(7, 0, {})
    assert not np.any(blocks.data)
    tiers.close()
