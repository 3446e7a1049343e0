"""Pages of the KV cache are taken in the background, and their content stays."""

from __future__ import annotations

import ctypes
import mmap
import os
from pathlib import Path

import numpy as np
import pytest
import torch

from lmkit.config import EngineConfig
from lmkit.turbo.engine import pages
from lmkit.turbo.engine.engine import Engine

CHUNKS = 3


@pytest.fixture
def region() -> torch.Tensor:
    """Fresh memory of some chunks and a rest, which begins within a page."""
    memory = mmap.mmap(-1, CHUNKS * pages._CHUNK + 2 * mmap.PAGESIZE, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    return torch.from_numpy(np.frombuffer(memory, np.uint8))[64:]


def resident(region: torch.Tensor) -> np.ndarray:
    """Whether each page of a region is taken."""
    start = region.data_ptr() // mmap.PAGESIZE * mmap.PAGESIZE
    size = region.data_ptr() + region.nbytes - start
    found = np.zeros(-(-size // mmap.PAGESIZE), np.uint8)
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.mincore(ctypes.c_void_p(start), ctypes.c_size_t(size), ctypes.c_void_p(found.ctypes.data)):
        pytest.skip(f"mincore: {os.strerror(ctypes.get_errno())}")
    return found & 1


def test_all_pages_are_taken_and_keep_their_content(region: torch.Tensor) -> None:
    if tuple(map(int, os.uname().release.split(".")[:2])) < (5, 14):
        pytest.skip("the system gives pages at their first use")
    region[5 * mmap.PAGESIZE] = 7
    assert not resident(region).all()
    pages.take_in_background([region]).join(60)
    assert resident(region).all()
    assert int(region.sum()) == region[5 * mmap.PAGESIZE] == 7


def test_a_system_that_refuses_is_left_alone(region: torch.Tensor, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pages, "_POPULATE_WRITE", 9999)
    pages.take_in_background([region]).join(60)
    assert not resident(region).all()


def test_an_engine_takes_its_kv_cache(demo_model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    taken: list[torch.Tensor] = []
    monkeypatch.setattr(pages, "take_in_background", taken.extend)
    Engine(str(demo_model), EngineConfig(max_batch_size=2, kv_memory=32 << 20)).close()
    assert 24 << 20 < sum(tensor.nbytes for tensor in taken) <= 32 << 20
