"""The device that a quantization computes on. A CPU has lmkit's kernels. Elsewhere torch's own operations compute.

One layer, the statistics of its inputs and one batch of hidden states lie there. The hidden states of all rows lie in
the host's memory or on its disk, and finished layers on its disk.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager

import torch

from lmkit.devices import CPU, CUDA
from lmkit.errors import ConfigError, UnsupportedError
from lmkit.kernels.cpu import isa
from lmkit.kernels.cuda.module import TORCH, tensor_device

BFLOAT16_CAPABILITY = (8, 0)  # of NVIDIA GPUs that multiply bfloat16 faster than float32


def resolve_device(asked: str, local_rank: int = 0) -> str:
    """The name that layers take of `auto`, `cpu`, `cuda` or `cuda:N`. Processes of one machine get a GPU each.

    Raises ConfigError for another name, and UnsupportedError if there is no such GPU.
    """
    if not re.fullmatch(rf"auto|{CPU.name}|{CUDA.name}(:\d+)?", asked):
        raise ConfigError(f"--device {asked}: expected auto, cpu, cuda or cuda:N")
    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if asked == CPU.name or (asked == "auto" and not count):
        return CPU.name
    if not count:
        raise UnsupportedError(f"--device {asked}: torch {torch.__version__} finds no GPU here; use --device cpu")
    number = int(asked.partition(":")[2] or local_rank % count)
    if number >= count:
        raise UnsupportedError(f"--device {asked}: GPUs here are cuda:0 to cuda:{count - 1}")
    return f"{TORCH}{CUDA.tensors}:{number}"


def gpu(device: str) -> torch.device | None:
    """The GPU that this is for torch, if it is one."""
    at = torch.device(tensor_device(device))
    return at if at.type == CUDA.tensors else None


def multiplies_bfloat16(device: str) -> bool:
    """Whether products of bfloat16 matrices are faster than those of float32."""
    if (at := gpu(device)) is not None:
        return torch.cuda.get_device_capability(at) >= BFLOAT16_CAPABILITY
    return isa.multiplies_bfloat16()


def wait(device: str) -> None:
    """Wait until all that was asked of the device is computed."""
    if (at := gpu(device)) is not None:
        torch.cuda.synchronize(at)


def free_memory(device: str) -> int | None:
    """Bytes that are free on a device with memory of its own, else None."""
    return None if (at := gpu(device)) is None else torch.cuda.mem_get_info(at)[0]


@contextmanager
def fits(device: str) -> Iterator[None]:
    """Turn an out-of-memory error of the device into a ConfigError of one line."""
    try:
        yield
    except torch.OutOfMemoryError as error:
        short = str(error).partition(". ")[0]
        raise ConfigError(
            f"{tensor_device(device)} has too little memory: --max-memory takes smaller steps; the finished layers are "
            f"kept: {short}"
        ) from None
