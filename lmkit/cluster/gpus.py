"""Which GPUs of this machine a replica has. No torch: the process that starts replicas computes nothing."""

from __future__ import annotations

import ctypes
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from lmkit.config import EngineConfig
from lmkit.devices import DEVICES
from lmkit.environment import environment


def visible_gpus() -> list[str]:
    """The GPUs that CUDA sees, by their names in CUDA_VISIBLE_DEVICES."""
    count = ctypes.c_int()
    try:
        driver = ctypes.CDLL("libcuda.so.1")
    except OSError:
        return []
    if driver.cuInit(0) or driver.cuDeviceGetCount(ctypes.byref(count)):
        return []
    given, numbers = environment().visible_gpus, map(str, range(count.value))
    return list(numbers) if given is None else given.split(",")[: count.value]


def num_gpus(options: Mapping[str, Any]) -> int:
    """GPUs that a replica with these options of `lmkit serve` may use."""
    device = DEVICES.get(options.get("device", ""))
    if device is not None and not device.own_memory:
        return 0
    named = {name: options[name] for name in ("tp", "ep", "devices") if options.get(name)}
    return 1 + max(EngineConfig(**named).gpus)


def least_used(gpus: Sequence[str], used: Iterable[str], count: int) -> list[str]:
    """The `count` GPUs that the fewest replicas have, all different, in the order of `gpus`. `used` names a GPU once
    for each replica that has it."""
    times = Counter(used)
    return sorted(sorted(gpus, key=lambda gpu: times[gpu])[:count], key=gpus.index)
