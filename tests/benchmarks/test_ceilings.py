"""The ceilings of the machine, and what they are measured on."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path

import pytest

from benchmarks import ceilings, kernels, loops
from benchmarks.ceilings import Ceilings, Meter, cache_bytes, measure_ceilings
from lmkit.kernels.cpu import threads


@pytest.fixture
def sysfs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Four cores: two L3 of 240 MB, each shared by two of them."""
    for cpu in range(4):
        shared = "0-1" if cpu < 2 else "2-3"
        for index, (level, size, cores) in enumerate(
            ((1, "48K", str(cpu)), (2, "2048K", str(cpu)), (3, "245760K", shared))
        ):
            folder = tmp_path / f"cpu{cpu}" / "cache" / f"index{index}"
            folder.mkdir(parents=True)
            for name, text in (("level", str(level)), ("size", size), ("shared_cpu_list", cores)):
                (folder / name).write_text(text + "\n")
    monkeypatch.setattr(ceilings, "CACHES", tmp_path)
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: {0, 1, 2, 3}, raising=False)
    return tmp_path


def test_last_level_cache(sysfs: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert cache_bytes() == 480 << 20
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: {0, 1})
    assert cache_bytes() == 240 << 20
    monkeypatch.setattr(ceilings, "CACHES", sysfs / "no such folder")
    assert cache_bytes() == ceilings.UNKNOWN_CACHE


@pytest.mark.usefixtures("sysfs")
def test_copies_exceed_a_large_cache() -> None:
    for size in (16 << 20, 128 << 20, 4 << 30):
        assert kernels.num_copies(size) * size >= 600 << 20
        assert kernels.num_copies(size) >= 2


@pytest.mark.parametrize(
    ("cache", "asked", "least"), [(480 << 20, None, 960 << 20), (1 << 20, None, 256 << 20), (0, 3, 3)]
)
def test_bytes_that_are_read_at_once(
    cache: int, asked: int | None, least: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    sizes: list[int] = []
    monkeypatch.setattr(ceilings, "cache_bytes", lambda: cache)
    monkeypatch.setattr(ceilings, "_buffers", lambda size: sizes.append(size) or {})
    Meter(asked)
    assert sizes[0] >= least


def test_later_measurements_run_the_fastest_loops_alone() -> None:
    threads.configure(1)
    meter = Meter(1 << 20)
    _, rates = meter.measure()
    assert {name for name in rates if name.startswith("read, huge pages")}
    made_up = dict.fromkeys(rates, 1.0) | {"4-bit dot, 4 x 3": 3.0, "4-bit dot, 8 x 1": 2.0}
    meter.keep_fastest(made_up)
    again, kept = meter.measure()
    assert {name for name in kept if name.startswith("4-bit")} == {"4-bit dot, 4 x 3", "4-bit dot, 8 x 1"}
    assert len(kept) <= 2 * 5
    assert min(vars(again).values()) > 0


def test_the_better_of_two_readings() -> None:
    one = Ceilings(1, 2, 3, 4, 5)
    assert one.best(replace(one, bytes_per_s=9, float_ops=1)) == replace(one, bytes_per_s=9)
    assert one.fastest_ops == 5


@pytest.mark.parametrize("task", [loops.TILE_INT8, loops.TILE_BFLOAT])
def test_tile_loops_run(task: loops.Task) -> None:
    """Emulated where there is no AMX."""
    threads.run(task, 1, (3,), scratch=loops.TILE_SCRATCH)


@pytest.mark.exhaustive
def test_ceilings_are_finite_and_positive() -> None:
    found = measure_ceilings(seconds=0.0)
    assert 0 < found.bytes_per_s < 1e14
    assert 0 < found.float_ops < 1e16
    assert 0 < found.int8_ops < 1e16
    assert 0 < found.int4_ops < 1e16
    assert found.float_ops <= found.bfloat16_ops < 1e16
