"""A stand-in for a GPU, as an engine sees it."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable

import torch
from torch import Tensor

from lmkit.kernels.cuda.module import Kernel
from lmkit.kernels.cuda.ranks import HostSharing, Sharing
from lmkit.turbo.host_memory import available_memory
from lmkit.turbo.runners.cuda_device import CudaDevice
from lmkit.turbo.runners.device import Event


class EmulatedDevice(CudaDevice):
    """Tensors lie in host memory, and a kernel runs when it is launched. `emulator.install` makes it run there."""

    tensors = "cpu"
    self_test = ""

    def free_memory(self) -> int:
        return available_memory()

    def staging(self, num_bytes: int) -> Tensor:
        return torch.empty(num_bytes, dtype=torch.uint8)

    def software(self) -> str:
        return "emulated"

    def event(self) -> Event:
        return _HostEvent()

    def synchronize(self) -> None:
        pass

    def capture(self, launch: Callable[[], None]) -> Callable[[], None]:
        return launch

    def reach_each_other(self, gpus: Iterable[int]) -> bool:
        return True

    def sharing(self, *, through_host: bool) -> Sharing:
        return HostSharing(lambda address, num_bytes: None)

    def environment(self, gpu: int) -> dict[str, str]:
        return {}

    def compile(self, kernels: Iterable[Kernel]) -> None:
        """Compile nothing: most of the kernels are launched by no test."""


class _HostEvent:
    def __init__(self) -> None:
        self._time = 0.0

    def record(self) -> None:
        self._time = time.perf_counter()

    def synchronize(self) -> None:
        pass

    def elapsed_time(self, end_event: _HostEvent) -> float:
        return 1e3 * (end_event._time - self._time)
