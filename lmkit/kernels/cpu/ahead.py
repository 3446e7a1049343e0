"""Compiling the kernels of a model ahead of its first step, on all cores.

A computation that is run inside `jit.collecting` names its tasks without computing. The tasks that are not on the disk
are then compiled, each by a process of its own, because numba holds Python's lock. The processes are forks: they have
the tasks already, and nothing has to be imported again. They compile and write one file, and do nothing else.
"""

from __future__ import annotations

import ctypes
import fcntl
import gc
import os
import selectors
import signal
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from typing import NoReturn

from numba.core.compiler_lock import global_compiler_lock
from numba.core.registry import cpu_target

from lmkit.kernels.cpu import jit, kernel_files
from lmkit.kernels.cpu.jit import Task
from lmkit.log import get_logger

log = get_logger(__name__)
PROCESS_BYTES = 256 << 20  # memory that a compiling process takes of its own
_DIE_WITH_PARENT = 1  # PR_SET_PDEATHSIG


def compile_missing(tasks: Iterable[Task], num_processes: int) -> None:
    """Compile the tasks that are not on the disk, in at most `num_processes` at once.

    One process on a machine does this at a time; others wait, and find the files. A task that cannot be compiled here
    is left: its first use compiles it, and raises what is wrong. If the folder of kernels is not writable, all are.
    """
    if not (missing := _missing(tasks)) or not kernel_files.is_writable(jit.cache_directory()):
        return
    with _only_one():
        if missing := _missing(missing):
            _compile(missing, max(1, min(num_processes, len(missing))))


def _missing(tasks: Iterable[Task]) -> list[Task]:
    """Those not on the disk, the longest functions first: they take longest to compile. The others are loaded."""
    missing = [task for task in tasks if task.load() is None]
    return sorted(missing, key=lambda task: -len(task.function.__code__.co_code))


def _compile(tasks: list[Task], num_processes: int) -> None:
    log.warning("compiling %d kernels, once on this machine", len(tasks))
    start = time.perf_counter()
    with jit.uninterrupted():  # what every compilation needs, once instead of in each process
        cpu_target.target_context.refresh()
        cpu_target.typing_context.refresh()
    with selectors.DefaultSelector() as running:
        try:
            for number, task in enumerate(tasks, 1):
                while len(running.get_map()) >= num_processes:
                    _wait_for_one(running)
                seconds = time.perf_counter() - start
                log.info("compiling kernel %d of %d: %s (%.0f s so far)", number, len(tasks), task.name, seconds)
                with jit.uninterrupted():
                    pid, pipe = _fork(task)
                    running.register(pipe, selectors.EVENT_READ, pid)
            while running.get_map():
                _wait_for_one(running)
        finally:
            for key in list(running.get_map().values()):
                with suppress(ProcessLookupError):
                    os.kill(key.data, signal.SIGKILL)
                _end(key)
    log.info("compiled %d kernels in %.0f s", len(tasks), time.perf_counter() - start)


def _wait_for_one(running: selectors.BaseSelector) -> None:
    for key, _ in running.select():
        running.unregister(key.fileobj)
        _end(key)


def _end(key: selectors.SelectorKey) -> None:
    os.close(key.fd)
    with suppress(ChildProcessError):  # the application ignores SIGCHLD
        os.waitpid(key.data, 0)


def _fork(task: Task) -> tuple[int, int]:
    """Compile in a new process. Returns (its id, a pipe that closes when it ends).

    Ctrl-C goes to every process of a terminal. The new one never sees it, because the signal is blocked meanwhile.
    """
    read_end, write_end = os.pipe()
    parent = os.getpid()
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        with global_compiler_lock:  # no other thread compiles, so the child finds numba and LLVM at rest
            if pid := os.fork():
                return pid, read_end
            _child(task, parent)
    finally:
        os.close(write_end)
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _child(task: Task, parent: int) -> NoReturn:
    """Compile and end. What the parent would do at its end is left out: no buffer is written, no handler called."""
    try:
        ctypes.CDLL(None).prctl(_DIE_WITH_PARENT, signal.SIGKILL)
        if os.getppid() == parent:
            gc.disable()  # a search through the parent's objects takes a tenth of the time
            task.compile()
    finally:  # whatever it is that failed, the parent meets it when it compiles the task itself
        os._exit(0)


@contextmanager
def _only_one() -> Iterator[None]:
    """Hold the lock of the folder of kernels."""
    fd = os.open(jit.cache_directory(), os.O_RDONLY | os.O_DIRECTORY)
    try:
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            log.warning("waiting for another process, which compiles kernels")
            fcntl.flock(fd, fcntl.LOCK_EX)
        yield
    finally:
        os.close(fd)
