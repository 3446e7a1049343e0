"""Running tasks on all cores. One OpenMP pool serves torch and the kernels: two would spin against each other."""

from __future__ import annotations

import ctypes
import functools
from array import array
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numba
import numpy as np
import torch

from lmkit.config import default_num_threads
from lmkit.errors import ConfigError
from lmkit.kernels.cpu import jit
from lmkit.kernels.cpu.intrinsics import call, call_worker, take, unpack
from lmkit.log import get_logger

log = get_logger(__name__)
_HEADER = 4  # int64 numbers before a job's own: task, next index, count, scratch bytes
_ALIGN = 64
Launcher = Callable[[int, int], None]  # (address of a job, threads)


class _Pool:
    """How many threads work, for every Python thread of the process (OpenMP would keep a number for each)."""

    def __init__(self) -> None:
        self.num_threads = 0

    @functools.cached_property
    def launch(self) -> Launcher:
        worker = jit.compiled("void(int64)", _work)
        for library in _openmp_libraries():
            if hasattr(library, "GOMP_parallel"):
                start = library.GOMP_parallel
                start.argtypes, start.restype = (ctypes.c_void_p, ctypes.c_void_p, ctypes.c_uint, ctypes.c_uint), None
                return lambda job, threads: start(worker.address, job, threads, 0)
        log.info("torch's OpenMP runtime cannot be shared: the kernels use numba's thread pool")
        return _numba_launcher(worker.address)


_POOL = _Pool()


def configure(num_threads: int) -> None:
    """Torch's operators (called from this Python thread) and the kernels use `num_threads` threads from here on.

    Raises ConfigError for a number below 1.
    """
    if num_threads < 1:
        raise ConfigError(f"num_threads={num_threads}: must be at least 1")
    torch.set_num_threads(num_threads)
    _POOL.num_threads = num_threads


def num_threads() -> int:
    if not _POOL.num_threads:
        configure(default_num_threads())
    return _POOL.num_threads


def run(task: jit.Task, count: int, args: tuple[int, ...], *, parallel: bool = True, scratch: int = 0) -> None:
    """Run `task` for every index below `count`, each thread with `scratch` bytes to itself.

    Threads take the next index when they are done with one, so a busy core delays no other. `parallel` False keeps
    small work on this thread: waking the others costs a few microseconds.
    """
    if count:
        job = array("q", (task.address, 0, count, scratch, *args))
        _POOL.launch(job.buffer_info()[0], min(num_threads(), count) if parallel else 1)


def _work(job: int) -> None:
    task, _, count, scratch_bytes = unpack(job, _HEADER)
    scratch = np.empty(scratch_bytes + _ALIGN, np.uint8)
    aligned = (scratch.ctypes.data + _ALIGN - 1) & ~(_ALIGN - 1)
    index = take(job + 8)
    while index < count:
        call(task, job + 8 * _HEADER, aligned, index)
        index = take(job + 8)


def _openmp_libraries() -> list[ctypes.CDLL]:
    """The OpenMP runtimes that torch came with; opening one again returns the copy that is running."""
    folder = Path(torch.__file__).parent / "lib"
    return [ctypes.CDLL(str(path)) for pattern in ("libgomp*", "libiomp*", "libomp*") for path in folder.glob(pattern)]


def _numba_launcher(worker: int) -> Launcher:
    @numba.njit("void(int64, int64, int64)", parallel=True, nogil=True)
    def launch(function: int, job: int, threads: int) -> None:
        for _ in numba.prange(threads):
            call_worker(function, job)

    def start(job: int, threads: int) -> None:
        launch(worker, job, threads)

    return start


__all__: list[Any] = ["configure", "num_threads", "run"]
