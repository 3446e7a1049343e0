"""Compiling kernels: once per machine, then they are read from the disk.

A kernel is a *task*: a function `(args, scratch, index)` over addresses, compiled by numba to a plain C function. It
does one piece, `index`, of a job. The job's parameters are the int64 numbers at `args`. The task has `scratch` bytes
to itself.

numba compiles; kernel_files.py keeps the object code and loads it. numba's own files are not used: two processes that
write them at once may mix up two kernels made by the same function.
"""

from __future__ import annotations

import functools
import hashlib
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from pathlib import Path
from typing import Any

import llvmlite
import llvmlite.binding as llvm
import numba
import numpy as np

from lmkit.environment import environment
from lmkit.kernels.cpu import isa, kernel_files
from lmkit.kernels.cpu.kernel_files import Kernel, ObjectCode
from lmkit.log import get_logger

log = get_logger(__name__)
# Reassociation is left out: sums are computed in the order in which they are written.
FASTMATH = {"nnan", "nsz", "contract"}
inline = numba.njit(forceinline=True, error_model="numpy", fastmath=FASTMATH)


class Task:
    """A task, compiled or read from the disk on first use."""

    def __init__(self, function: Callable[..., None], signature: str = "void(int64, int64, int64)") -> None:
        self.function, self.signature = function, signature
        self.name = function.__qualname__.partition(".")[0]
        self._kernel: Kernel | None = None

    @property
    def address(self) -> int:
        """The address of the C function. While tasks are collected, 0: the task is only noted."""
        collected = _COLLECTED.get()
        if collected is not None:
            collected[self] = None
            return 0
        kernel = self.load()
        if kernel is None:
            kernel = self._kernel = Kernel(self._compile_unforeseen())
        return kernel.address

    def load(self) -> Kernel | None:
        """The kernel, if it is in memory or on the disk."""
        if self._kernel is None and (code := kernel_files.read(self._path)) is not None:
            self._kernel = Kernel(code)
        return self._kernel

    @property
    def _path(self) -> Path:
        return cache_directory() / f"{self.name}-{_identity(self)}.kernel"

    def compile(self) -> ObjectCode:
        """Compile it, and write it to the disk if that is possible."""
        with uninterrupted():
            kernel = numba.cfunc(self.signature, error_model="numpy", fastmath=FASTMATH)(self.function)
            code = ObjectCode(kernel.native_name, kernel._library._get_compiled_object())
        kernel_files.write(self._path, code)
        return code

    def _compile_unforeseen(self) -> ObjectCode:
        often = "once on this machine" if kernel_files.is_writable(cache_directory()) else "in every process"
        log.info("compiling kernel %s, %s", self.name, often)
        return self.compile()


_COLLECTED: ContextVar[dict[Task, None] | None] = ContextVar("collected", default=None)


@contextmanager
def collecting() -> Iterator[dict[Task, None]]:
    """Collect tasks: inside, a task whose address is asked for is neither compiled nor loaded, but noted."""
    tasks: dict[Task, None] = {}
    token = _COLLECTED.set(tasks)
    try:
        yield tasks
    finally:
        _COLLECTED.reset(token)


def is_collecting() -> bool:
    """Whether nothing is computed, because tasks are collected."""
    return _COLLECTED.get() is not None


@functools.lru_cache(maxsize=256)
def float_bits(value: float) -> int:
    """The bits of a float32 as an integer: tasks take floats this way."""
    return int(np.float32(value).view(np.uint32))


@functools.cache
def cache_directory() -> Path:
    """One folder for each version of these sources, of Python, of the compiler, of the instruction set and of the
    processor.
    """
    versions = f"{sys.version_info[:2]} {numba.__version__} {llvmlite.__version__}"
    wanted = numba.config.CPU_NAME, numba.config.CPU_FEATURES, numba.config.ENABLE_AVX
    processor = f"{llvm.get_host_cpu_name()} {llvm.get_host_cpu_features().flatten()} {wanted}"
    key = hashlib.sha256(f"{versions} {isa.host().name} {processor}".encode())
    folder = Path(__file__).parent
    for source in sorted(folder.rglob("*.py")):
        key.update(f"{source.relative_to(folder)}\n".encode() + source.read_bytes())
    return environment().cache_dir / "kernels" / key.hexdigest()[:16]


def _identity(task: Task) -> str:
    """A digest that tells the task from others of the same sources: its code, and the values that it closes over."""
    code, cells = task.function.__code__, task.function.__closure__ or ()
    values = {name: cell.cell_contents for name, cell in zip(code.co_freevars, cells, strict=True)}
    for name, value in values.items():
        if not isinstance(value, bool | int | float | str | None):
            raise TypeError(f"{task.name} closes over {name}, a {type(value).__name__}: numbers and texts only")
    parts = task.signature, task.function.__module__, task.function.__qualname__, code.co_code, code.co_names, values
    return hashlib.sha256(repr(parts).encode()).hexdigest()[:16]


@contextmanager
def uninterrupted() -> Iterator[None]:
    """Let Ctrl-C wait until the end. Inside LLVM's calls an exception would be lost, and the kernel with it."""
    handler = signal.getsignal(signal.SIGINT)
    if threading.current_thread() is not threading.main_thread() or not callable(handler):
        yield
        return
    frames: list[Any] = []
    signal.signal(signal.SIGINT, lambda number, frame: frames.append(frame))
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, handler)
    if frames:
        handler(signal.SIGINT, frames[0])
