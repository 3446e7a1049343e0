"""The runner of a device, and the other processes of a model that several share."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from lmkit.config import EngineConfig
from lmkit.models.spec import ModelSpec
from lmkit.turbo.runners.cpu import CpuRunner
from lmkit.turbo.runners.cuda import CudaRunner
from lmkit.turbo.runners.device import CpuDevice, Device
from lmkit.turbo.runners.ranks import Ranks
from lmkit.turbo.runners.remote import RemoteRanks
from lmkit.turbo.runners.runner import Runner, RunnerParts
from lmkit.turbo.runners.stages import Stages

RUNNERS: dict[str, Callable[[Any, RunnerParts], Runner]] = {"cpu": CpuRunner, "cuda": CudaRunner}  # by device


Others = Ranks | Stages


def start_others(
    model_path: str, config: EngineConfig, spec: ModelSpec, lose: Callable[[str], None], cpus: list[list[int]]
) -> Others:
    """Start the other ranks or stages, see runners.ranks.Ranks."""
    if config.num_ranks == 1:
        return Stages(model_path, config, spec, lose, cpus)
    kind = Ranks if config.cluster == "none" else RemoteRanks
    return kind(model_path, config, spec, lose, cpus)


def make_runner(device: Device, parts: RunnerParts, others: Others | None = None) -> Runner:
    """Make a runner with its state on `device`, of process 0 if there are others.

    torch's OutOfMemoryError means that the device has too little memory.
    """
    if others is not None:
        assert isinstance(device, CpuDevice)
        return others.runner(device, parts)
    return RUNNERS[device.name](device, parts)
