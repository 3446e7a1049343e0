"""A stand-in for a GPU, as an engine sees it."""

from __future__ import annotations

import mmap
import os
import time
from collections.abc import Callable, Iterable

import numpy as np
import torch
from torch import Tensor

from lmkit.kernels.cuda.module import Kernel
from lmkit.kernels.cuda.ranks import Sharing
from lmkit.turbo.host_memory import available_memory
from lmkit.turbo.runners.device import CudaDevice, Event


class EmulatedDevice(CudaDevice):
    """Tensors lie in host memory, and a kernel runs when it is launched. `emulator.install` makes it run there."""

    tensors = "cpu"

    def free_memory(self) -> int:
        return available_memory()

    def staging(self, num_bytes: int) -> Tensor:
        return torch.empty(num_bytes, dtype=torch.uint8)

    def event(self) -> Event:
        return _HostEvent()

    def synchronize(self) -> None:
        pass

    def capture(self, launch: Callable[[], None]) -> Callable[[], None]:
        return launch

    def sharing(self) -> Sharing:
        return Files()

    def environment(self, gpu: int) -> dict[str, str]:
        return {}

    def compile(self, kernels: Iterable[Kernel]) -> None:
        """Compile nothing: most of the kernels are launched by no test."""


class Files:
    """Ranks that are processes of this machine map each other's memory, which is a file without a name."""

    def allocate(self, num_bytes: int) -> tuple[int, bytes]:
        file = os.memfd_create("lmkit-emulated")
        os.ftruncate(file, num_bytes)
        return _mapped(file, num_bytes), f"/proc/{os.getpid()}/fd/{file}".encode()

    def open(self, handle: bytes) -> int:
        file = os.open(handle, os.O_RDWR)
        return _mapped(file, os.fstat(file).st_size)


def _mapped(file: int, num_bytes: int) -> int:
    """The address of a file, which stays mapped."""
    return np.frombuffer(_KEPT.setdefault(file, mmap.mmap(file, num_bytes)), np.uint8).ctypes.data


_KEPT: dict[int, mmap.mmap] = {}  # by descriptor


class _HostEvent:
    def __init__(self) -> None:
        self._time = 0.0

    def record(self) -> None:
        self._time = time.perf_counter()

    def synchronize(self) -> None:
        pass

    def elapsed_time(self, end_event: _HostEvent) -> float:
        return 1e3 * (end_event._time - self._time)
