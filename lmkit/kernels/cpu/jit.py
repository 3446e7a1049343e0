"""Compiling kernels: once per machine, then they are read from the disk.

A kernel is a *task*: a function `(args, scratch, index)` over addresses, compiled by numba to a plain C function. It
does one piece, `index`, of a job. The job's parameters are the int64 numbers at `args`. The task has `scratch` bytes
to itself.
"""

from __future__ import annotations

import functools
import hashlib
import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import llvmlite
import numba
import numpy as np
from numba.core import event

from lmkit.config import environment
from lmkit.kernels.cpu import isa
from lmkit.log import get_logger

log = get_logger(__name__)
# Reassociation is left out: sums are computed in the order in which they are written.
FASTMATH = {"nnan", "nsz", "contract"}


class Task:
    """A task, compiled or read from the cache on first use."""

    def __init__(self, function: Callable[[int, int, int], None]) -> None:
        self.function = function

    @functools.cached_property
    def address(self) -> int:
        return int(compiled("void(int64, int64, int64)", self.function).address)


def compiled(signature: str, function: Callable[..., None]) -> Any:
    """`function` as a numba.cfunc."""
    with _numba_cache() as usable:
        options: dict[str, Any] = {"error_model": "numpy", "fastmath": FASTMATH}
        compilation = _Compilation(function.__qualname__, usable)
        with event.install_listener("numba:run_pass", compilation):
            kernel = numba.cfunc(signature, cache=usable, **options)(function)
        if compilation.started:
            _Progress.seconds += time.perf_counter() - compilation.started
        return kernel


class _Progress:
    """Kernels compiled by this process so far."""

    count = 0
    seconds = 0.0


class _Compilation(event.Listener):  # type: ignore[misc]
    """Logs that a kernel is being compiled, once that happens. Reading it from the disk runs no compiler pass."""

    def __init__(self, name: str, kept: bool) -> None:
        self.name, self.kept = name.partition(".")[0], kept
        self.started = 0.0

    def on_start(self, event: event.Event) -> None:
        if self.started:
            return
        self.started = time.perf_counter()
        if not _Progress.count:
            often = "once on this machine" if self.kept else "in every process"
            log.warning("compiling kernels for a minute, %s", often)
            log.debug("instruction set: %s", isa.host().name)
        _Progress.count += 1
        log.info("compiling kernel %d: %s (%.0f s so far)", _Progress.count, self.name, _Progress.seconds)

    def on_end(self, event: event.Event) -> None:
        pass


@functools.lru_cache(maxsize=256)
def float_bits(value: float) -> int:
    """The bits of a float32 as an integer: tasks take floats this way."""
    return int(np.float32(value).view(np.uint32))


inline = numba.njit(forceinline=True, error_model="numpy", fastmath=FASTMATH)


@contextmanager
def _numba_cache() -> Iterator[bool]:
    """Point numba's cache at `cache_directory` while a kernel is declared. Yields whether it can be written."""
    directory, before = cache_directory(), numba.config.CACHE_DIR
    numba.config.CACHE_DIR = str(directory)
    try:
        yield _writable(directory)
    finally:
        numba.config.CACHE_DIR = before


@functools.cache
def cache_directory() -> Path:
    """One folder for each version of these sources, of the compiler and of the instruction set. numba itself adds the
    processor's features, but does not notice changes in a function's callees.
    """
    key = hashlib.sha256(f"{numba.__version__} {llvmlite.__version__} {isa.host().name}".encode())
    for source in sorted(Path(__file__).parent.rglob("*.py")):
        key.update(source.read_bytes())
    return environment().cache_dir / "kernels" / key.hexdigest()[:16]


@functools.cache
def _writable(directory: Path) -> bool:
    try:
        directory.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        log.warning("kernels are compiled anew in every process: %s", error)
        return False
    return os.access(directory, os.W_OK)
