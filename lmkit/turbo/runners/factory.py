"""The runner of a device, and the other processes of a model that several share."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from lmkit.turbo.runners.cpu import CpuRunner
from lmkit.turbo.runners.cuda import CudaRunner
from lmkit.turbo.runners.cuda_ranks import CudaRanks
from lmkit.turbo.runners.device import Device
from lmkit.turbo.runners.processes import Processes, SharedModel
from lmkit.turbo.runners.ranks import Ranks
from lmkit.turbo.runners.remote import RemoteRanks
from lmkit.turbo.runners.runner import Runner, RunnerParts
from lmkit.turbo.runners.stages import Stages

RUNNERS: dict[str, Callable[[Any, RunnerParts], Runner]] = {"cpu": CpuRunner, "cuda": CudaRunner}  # by device


def start_others(model: SharedModel, lose: Callable[[str], None]) -> Processes:
    """Start the other ranks or stages, see Processes."""
    if model.config.device == "cuda":
        return CudaRanks(model, lose)
    if model.config.num_ranks == 1:
        return Stages(model, lose)
    return (Ranks if model.config.cluster == "none" else RemoteRanks)(model, lose)


def make_runner(device: Device, parts: RunnerParts, others: Processes | None = None) -> Runner:
    """Make a runner with its state on `device`, of process 0 if there are others.

    torch's OutOfMemoryError means that the device has too little memory.
    """
    if others is not None:
        return others.runner(device, parts)
    return RUNNERS[device.name](device, parts)
