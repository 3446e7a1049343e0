"""The devices that engines run on, by name."""

from __future__ import annotations

from lmkit.config import EngineConfig
from lmkit.log import get_logger
from lmkit.turbo.runners.cpu_device import CpuDevice
from lmkit.turbo.runners.cuda_device import CudaDevice
from lmkit.turbo.runners.device import EngineDevice

log = get_logger(__name__)

# `auto` takes the first one that misses nothing.
ENGINE_DEVICES: dict[str, type[EngineDevice]] = {kind.facts.name: kind for kind in (CudaDevice, CpuDevice)}


def resolve_device(config: EngineConfig) -> EngineDevice:
    """The device that an engine runs on. Raises UnsupportedError if the requested device is not there."""
    if config.device in ENGINE_DEVICES:
        return ENGINE_DEVICES[config.device].opened()
    reasons = list[str]()
    for name, kind in ENGINE_DEVICES.items():
        if (reason := kind.missing()) is None:
            log.info("device: %s", f"{name} ({'; '.join(reasons)})" if reasons else name)
            return kind.opened()
        reasons.append(reason)
    raise AssertionError("the CPU misses nothing")
