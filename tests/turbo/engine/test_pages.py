"""The memory of the KV cache: pages are taken as blocks are used, and go back. They are counted, nothing is timed."""

from __future__ import annotations

import ctypes
import mmap
import os
from pathlib import Path

import numpy as np
import pytest
import torch

from lmkit.config import EngineConfig
from lmkit.turbo.engine import pages, rest
from lmkit.turbo.engine.engine import Engine
from lmkit.turbo.kv.blocks import KVBlocks
from lmkit.turbo.request import Request, SamplingParams
from tests.quant.helpers import tiny_checkpoint

BLOCK = 3 * mmap.PAGESIZE  # bytes


@pytest.fixture
def part() -> torch.Tensor:
    """Fresh memory for ten blocks, which begins within a page: uint8 [10, BLOCK]."""
    memory = mmap.mmap(-1, 11 * BLOCK, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    return torch.from_numpy(np.frombuffer(memory, np.uint8))[64 : 64 + 10 * BLOCK].view(10, BLOCK)


def resident(region: torch.Tensor) -> int:
    """The number of pages of a region that are taken."""
    start = region.data_ptr() // mmap.PAGESIZE * mmap.PAGESIZE
    size = region.data_ptr() + region.nbytes - start
    found = np.zeros(-(-size // mmap.PAGESIZE), np.uint8)
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.mincore(ctypes.c_void_p(start), ctypes.c_size_t(size), ctypes.c_void_p(found.ctypes.data)):
        pytest.skip(f"mincore: {os.strerror(ctypes.get_errno())}")
    return int((found & 1).sum())


def test_whole_pages_of_blocks_go_back(part: torch.Tensor) -> None:
    part[:] = 7
    assert resident(part) == 31
    assert pages.give_back([part], [1, 4, 5, 6]) == (2 + 8) * mmap.PAGESIZE
    assert resident(part) == 21
    assert int(part[[0, 2, 3, 7, 8, 9]].to(torch.int64).sum()) == 6 * BLOCK * 7, "other blocks keep their content"
    assert pages.give_back([part], []) == 0


def run(engine: Engine, name: str, length: int) -> None:
    params = SamplingParams(max_tokens=1, ignore_eos=True)
    engine.add(Request(request_id=name, prompt_ids=[(7 * i + ord(name)) % 500 for i in range(length)], params=params))
    while engine.has_work():
        engine.step()


def blocks_of(engine: Engine) -> KVBlocks:
    return engine._rest._blocks


def test_an_engine_takes_memory_as_it_is_used(demo_model: Path) -> None:
    """Pages are huge where the system has such: so the pool is large, and a tenth of it is used."""
    size = 512 << 20
    engine = Engine(str(demo_model), EngineConfig(max_batch_size=2, kv_memory=size, max_step_tokens=64))
    whole = sum(resident(part) for part in blocks_of(engine).parts)
    taken = mmap.PAGESIZE * whole
    assert taken < size // 8, "the start takes little"
    run(engine, "a", 2000)
    stats, used = engine.stats(), mmap.PAGESIZE * sum(resident(part) for part in blocks_of(engine).parts)
    assert stats.blocks_backed == -(-2001 // 32)
    assert stats.blocks_backed * blocks_of(engine).nbytes <= used < size // 4
    engine.close()


def test_an_idle_engine_gives_back_what_is_not_cached(demo_model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("lmkit.turbo.host_memory.shortage", lambda: 0)
    engine = Engine(str(demo_model), EngineConfig(max_batch_size=2, kv_memory=64 << 20, prefix_cache=False))
    run(engine, "a", 1000)
    before = sum(map(resident, blocks_of(engine).parts))
    for _ in range(rest.GIVE_BACK_TURNS - 1):
        engine.rest()
    assert engine.stats().blocks_backed == -(-1001 // 32)
    engine.rest()
    assert engine.stats().blocks_backed == 0
    freed = (before - sum(map(resident, blocks_of(engine).parts))) * mmap.PAGESIZE
    assert freed > 0.8 * 31 * blocks_of(engine).nbytes
    run(engine, "b", 1000)
    engine.check_integrity()
    engine.close()


@pytest.mark.parametrize("kv_memory", [None, 64 << 20])
def test_cached_blocks_go_back_when_memory_is_short(
    demo_model: Path, monkeypatch: pytest.MonkeyPatch, kv_memory: int | None
) -> None:
    monkeypatch.setattr("lmkit.turbo.host_memory.shortage", lambda: 0)
    engine = Engine(str(demo_model), EngineConfig(max_batch_size=2, kv_memory=kv_memory))
    answers = []
    for name in ("a", "b"):
        run(engine, name, 999)
        engine.rest()
        answers.append(engine.stats().blocks_cached)
    first, both = answers
    assert both >= 2 * first > 0
    engine.scheduler.kv.growth.shortage = lambda: 10 * blocks_of(engine).nbytes
    engine.rest()
    left = both - 10 if kv_memory is None else both
    assert engine.stats().blocks_cached == engine.stats().blocks_backed == left, "a size that was asked for stays"
    run(engine, "a", 999)
    engine.check_integrity()
    engine.close()


def test_an_engine_without_attention_rests(tmp_path: Path) -> None:
    engine = Engine(str(tiny_checkpoint(tmp_path, "mamba2")), EngineConfig(max_batch_size=2, max_model_len=64))
    run(engine, "a", 20)
    for _ in range(rest.GIVE_BACK_TURNS):
        engine.rest()
    run(engine, "b", 20)
    engine.check_integrity()
    engine.close()
