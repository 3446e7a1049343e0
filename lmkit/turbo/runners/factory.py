"""The runner of a device."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from lmkit.turbo.runners.cpu import CpuRunner
from lmkit.turbo.runners.cuda import CudaRunner
from lmkit.turbo.runners.device import CpuDevice, Device
from lmkit.turbo.runners.ranks import Ranks
from lmkit.turbo.runners.runner import Runner, RunnerParts
from lmkit.turbo.runners.stages import Stages

RUNNERS: dict[str, Callable[[Any, RunnerParts], Runner]] = {"cpu": CpuRunner, "cuda": CudaRunner}  # by device


def make_runner(device: Device, parts: RunnerParts, others: Ranks | Stages | None = None) -> Runner:
    """Make a runner with its state on `device`, of process 0 if there are others.

    torch's OutOfMemoryError means that the device has too little memory.
    """
    if others is not None:
        assert isinstance(device, CpuDevice)
        return others.runner(device, parts)
    return RUNNERS[device.name](device, parts)
