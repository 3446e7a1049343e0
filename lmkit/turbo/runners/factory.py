"""The runner of a device."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from lmkit.turbo.runners.cpu import CpuRunner
from lmkit.turbo.runners.cuda import CudaRunner
from lmkit.turbo.runners.device import Device
from lmkit.turbo.runners.runner import Runner, RunnerParts

RUNNERS: dict[str, Callable[[Any, RunnerParts], Runner]] = {"cpu": CpuRunner, "cuda": CudaRunner}  # by device


def make_runner(device: Device, parts: RunnerParts) -> Runner:
    """Make a runner with its state on `device`.

    torch's OutOfMemoryError means that the device has too little memory.
    """
    return RUNNERS[device.name](device, parts)
