"""The runner of a device."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from lmkit.turbo.runners.cpu import CpuRunner
from lmkit.turbo.runners.cuda import CudaRunner
from lmkit.turbo.runners.device import CpuDevice, Device
from lmkit.turbo.runners.ranks import LeadingRunner, Ranks
from lmkit.turbo.runners.runner import Runner, RunnerParts

RUNNERS: dict[str, Callable[[Any, RunnerParts], Runner]] = {"cpu": CpuRunner, "cuda": CudaRunner}  # by device


def make_runner(device: Device, parts: RunnerParts, ranks: Ranks | None = None) -> Runner:
    """Make a runner with its state on `device`, of rank 0 if there are other `ranks`.

    torch's OutOfMemoryError means that the device has too little memory.
    """
    if ranks is not None:
        assert isinstance(device, CpuDevice)
        return LeadingRunner(device, parts, ranks)
    return RUNNERS[device.name](device, parts)
