"""Running tasks on all cores. One OpenMP pool serves torch and the kernels: two pools would spin against each other.

A *job* is a task and the number of its runs; a *program* is a list of jobs in order. Every thread walks through the
program. It takes indices of a job until none is left, waits until all taken indices are done, and goes on to the next
job. No thread waits for a thread that took nothing. A core that is busy elsewhere therefore delays a program once, at
its end, not at every job.

    program   int64: scratch bytes, threads that have begun | job | job | ... | 0
        job       int64: task, next index, indices done (a counter of `wait_for`), count, chunk, n, aside | n arguments
        chunk     a thread takes so many indices at once; if negative, so many shares are left, and it takes one
        aside     0; 1: every second thread begins with this job, and none waits for it; below 0: so many bytes lie
                  between here and a job aside, which all threads end now

A late thread may still look at a job that is long done. This is safe: only the two counters of a job ever change.

Functions of the host may stand between jobs (`run_on_host`). The jobs before one are done when it is called.
"""

from __future__ import annotations

import ctypes
import functools
from array import array
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from pathlib import Path
from typing import Any

import numba
import numpy as np
import torch

from lmkit.cores import available
from lmkit.environment import default_num_threads
from lmkit.errors import ConfigError
from lmkit.kernels.cpu import jit, numa
from lmkit.kernels.cpu.intrinsics import SLEEPER, add, allocate, call, call_worker, release, unpack, wait_for, wake
from lmkit.log import get_logger

log = get_logger(__name__)
_HEADER = 7  # int64 numbers of a job before its arguments
_ALIGN = 64
SHARES = 2  # for each thread: the part of the remaining indices that it takes
Launcher = Callable[[int, int], None]  # (address of a program, threads)


class _Pool:
    """The process' number of working threads, for each Python thread where no engine has its own (OF_ENGINE)."""

    def __init__(self) -> None:
        self.num_threads = 0

    @functools.cached_property
    def launch(self) -> Launcher:
        worker = WORK.address
        for library in _openmp_libraries():
            if hasattr(library, "GOMP_parallel"):
                start = library.GOMP_parallel
                start.argtypes, start.restype = (ctypes.c_void_p, ctypes.c_void_p, ctypes.c_uint, ctypes.c_uint), None
                return lambda program, threads: start(worker, program, threads, 0)
        log.info("torch's OpenMP runtime cannot be shared: the kernels use numba's thread pool")
        return _numba_launcher(worker)


_POOL = _Pool()
OF_ENGINE: ContextVar[int] = ContextVar("num_threads", default=0)  # of the engine that computes now; 0: there is none
_CAPTURING: ContextVar[Program | None] = ContextVar("capturing", default=None)


class Jobs:
    """Jobs in a row, in the memory that threads walk through."""

    def __init__(self) -> None:
        self._numbers = array("q")
        self._counters: list[int] = []
        self._scratch = 0
        self._parallel = False
        self._aside: dict[int, tuple[int, ...]] = {}  # jobs that are still to be joined, by their place

    def add(self, job: tuple[int, ...], args: Sequence[int], *, parallel: bool, scratch: int) -> int:
        """Returns the job's place."""
        place = len(self._numbers)
        self._counters += (place + 3, place + 4)  # after the two numbers of the program
        self._numbers.extend((*job, *args))
        self._scratch = max(self._scratch, scratch)
        self._parallel |= parallel
        return place

    def add_aside(self, job: tuple[int, ...], args: Sequence[int], *, scratch: int) -> int:
        place = self.add((*job[:-1], 1), args, parallel=True, scratch=scratch)
        self._aside[place] = job
        return place

    def join(self, *places: int) -> None:
        """End the jobs aside at these places, or all."""
        for place in places or tuple(self._aside):
            if (job := self._aside.pop(place, None)) is not None:
                task, *_, count, chunk, _, _ = job
                self._numbers.extend((task, 0, 0, count, chunk, 0, 8 * (place - len(self._numbers))))

    def apart(self) -> Iterator[tuple[int, Callable[[], None]]]:
        """Of each job the address of its task, and what runs it alone: for profiles."""
        self.join()
        start, end = 0, len(self._numbers)
        while start < end:
            task, *_, length, aside = self._numbers[start : start + _HEADER]
            following = start + _HEADER + length
            if aside >= 0:
                alone, numbers = Jobs(), self._numbers[start:following]
                job, args = (*numbers[: _HEADER - 1], 0), numbers[_HEADER:]
                alone.add(job, args, parallel=self._parallel, scratch=self._scratch)
                _ = alone._ready
                yield task, alone
            start = following

    @functools.cached_property
    def _ready(self) -> tuple[np.ndarray, np.ndarray, int]:
        """(all numbers, the places of the counters, the address of the numbers)."""
        numbers = np.array([self._scratch, 0, *self._numbers, 0], np.int64)
        return numbers, np.array([1, *self._counters], np.int64), numbers.ctypes.data

    def __call__(self) -> None:
        numbers, counters, address = self._ready
        numbers[counters] = 0
        _POOL.launch(address, num_threads() if self._parallel else 1)


class Program:
    """Jobs captured once and launched many times. The caller keeps the memory at their addresses alive."""

    def __init__(self) -> None:
        self.parts: list[Jobs | Callable[[], None]] = []
        self.kept: list[torch.Tensor] = []  # memory that the program itself keeps alive

    @property
    def jobs(self) -> Jobs:
        """The jobs at the end of the program."""
        if not self.parts or not isinstance(self.parts[-1], Jobs):
            self.parts.append(Jobs())
        last = self.parts[-1]
        assert isinstance(last, Jobs)
        return last

    def call(self, function: Callable[[], None]) -> None:
        if self.parts and isinstance(last := self.parts[-1], Jobs):
            last.join()
        self.parts.append(function)

    def launch(self) -> None:
        """Run the program on the calling thread and the others of the pool."""
        for part in self.parts:
            part()


def configure(num_threads: int) -> None:
    """As `prepare`, and make the kernels of all Python threads use `num_threads` threads, where no engine has its own
    number. Raises ConfigError for a number below 1.
    """
    prepare(num_threads)
    _POOL.num_threads = num_threads


def prepare(num_threads: int) -> None:
    """Make torch's operators, called from this Python thread, use `num_threads` threads from now on. On several NUMA
    nodes, memory that this thread and threads that it starts take from now on is spread over them.

    Raises ConfigError for a number below 1.
    """
    if num_threads < 1:
        raise ConfigError(f"num_threads={num_threads}: must be at least 1")
    torch.set_num_threads(num_threads)
    nodes = available().nodes
    if len(nodes) > 1:
        numa.interleave(nodes)


def num_threads() -> int:
    """Threads of the engine that computes now, or of the process."""
    if of_engine := OF_ENGINE.get():
        return of_engine
    if not _POOL.num_threads:
        configure(default_num_threads())
    return _POOL.num_threads


@contextmanager
def capturing() -> Iterator[Program]:
    """Capture: inside, `run` computes nothing and adds its jobs to the program."""
    program = Program()
    token = _CAPTURING.set(program)
    try:
        yield program
    finally:
        _CAPTURING.reset(token)


def keep(memory: torch.Tensor) -> torch.Tensor:
    """If a program is being captured, keep `memory` alive as long as the program may be launched."""
    program = _CAPTURING.get()
    if program is not None:
        program.kept.append(memory)
    return memory


def run(
    task: jit.Task, count: int, args: Sequence[int], *, parallel: bool = True, in_order: bool = False, scratch: int = 0
) -> None:
    """Run `task` for every index below `count`, each thread with `scratch` bytes to itself.

    Threads take the next index when they have finished one, so a busy core delays no other. `parallel` False keeps
    small work on one thread: sharing it would cost more. `in_order` gives a thread many neighbours at once, and fewer
    towards the end: a processor reads memory ahead only where it is read in order.
    """
    if not count:
        return
    if not (address := task.address):  # tasks are being collected
        _ = WORK.address
        return
    chunk = count if not parallel else -SHARES * num_threads() if in_order else 1
    job = (address, 0, 0, count, chunk, len(args), 0)
    program = _CAPTURING.get()
    if program is not None:
        program.jobs.add(job, args, parallel=parallel, scratch=scratch)
        return
    alone = array("q", (scratch, 0, *job, *args, 0))
    _POOL.launch(alone.buffer_info()[0], min(num_threads(), count) if parallel else 1)


def run_aside(task: jit.Task, count: int, args: Sequence[int], *, scratch: int = 0) -> Callable[[], None]:
    """As `run`, beside the jobs that follow until the result is called, which none of them may depend on.

    Every second thread begins with the task, the others with the next jobs, so that cores that compute stand beside
    cores that wait for memory. Outside of a program that is captured it runs at once.
    """
    program = _CAPTURING.get()
    if program is None or not count:
        run(task, count, args, scratch=scratch)
        return lambda: None
    jobs = program.jobs
    place = jobs.add_aside((task.address, 0, 0, count, 1, len(args), 0), args, scratch=scratch)
    return functools.partial(jobs.join, place)


def run_on_host(function: Callable[[], None]) -> None:
    """Call `function` on the launching thread after the jobs so far, each time if a program is being captured."""
    program = _CAPTURING.get()
    if program is not None:
        program.call(function)
    elif not jit.is_collecting():
        function()


@jit.inline
def _share(job: int, count: int, chunk: int) -> int:
    """Indices to take next. Another thread may take some meanwhile: the number is not exact, and need not be."""
    if chunk > 0:
        return chunk
    _, next_index = unpack(job, 2)
    left: int = count - next_index
    return max(1, left // -chunk)


@jit.inline
def _take(job: int, scratch: int) -> None:
    """Take indices of a job until none is left."""
    task, _, _, count, chunk = unpack(job, 5)
    done = 0
    taken = _share(job, count, chunk)
    index = add(job + 8, taken)
    while index < count:
        end = min(index + taken, count)
        done += end - index
        while index < end:
            call(task, job + 8 * _HEADER, scratch, index)
            index += 1
        taken = _share(job, count, chunk)
        index = add(job + 8, taken)
    if done:
        before = add(job + 16, done)
        if before >= SLEEPER and before % SLEEPER + done == count:
            wake(job + 16)


def _work(program: int) -> None:
    (scratch_bytes,) = unpack(program, 1)
    thread = add(program + 8, 1)
    scratch = allocate((scratch_bytes + _ALIGN) // _ALIGN * _ALIGN)
    job = program + 16
    task, _, _, count, _, length, aside = unpack(job, _HEADER)
    while task:
        place = job + min(aside, 0)
        if aside <= 0 or thread % 2:
            _take(place, scratch)
        if aside <= 0:
            wait_for(place + 16, count)
        job += 8 * (_HEADER + length)
        task, _, _, count, _, length, aside = unpack(job, _HEADER)
    release(scratch)


WORK = jit.Task(_work, "void(int64)")


def _openmp_libraries() -> list[ctypes.CDLL]:
    """The OpenMP runtimes that torch brings. Opening one again returns the copy that is running."""
    folder = Path(torch.__file__).parent / "lib"
    return [ctypes.CDLL(str(path)) for pattern in ("libgomp*", "libiomp*", "libomp*") for path in folder.glob(pattern)]


def _numba_launcher(worker: int) -> Launcher:
    @numba.njit("void(int64, int64, int64)", parallel=True, nogil=True)
    def launch(function: int, program: int, threads: int) -> None:
        for _ in numba.prange(threads):
            call_worker(function, program)

    def start(program: int, threads: int) -> None:
        launch(worker, program, threads)

    return start


__all__: list[Any] = [
    "Program",
    "capturing",
    "configure",
    "keep",
    "num_threads",
    "prepare",
    "run",
    "run_aside",
    "run_on_host",
]
