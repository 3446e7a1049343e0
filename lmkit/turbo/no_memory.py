"""Errors of an allocation that found no memory, in one line."""

from __future__ import annotations

import errno
from collections.abc import Iterator
from contextlib import contextmanager

import torch

from lmkit.errors import ConfigError

DRIVER_STATUS = 2  # CUDA_ERROR_OUT_OF_MEMORY, of launches by the driver and by CuPy
SAID = "out of memory"


def missing_memory(error: BaseException) -> str:
    """What an error says of an allocation that found no memory; an empty text for any other error."""
    first = (str(error).strip() or "no memory").splitlines()[0]
    if isinstance(error, torch.OutOfMemoryError):
        return f"GPU: {first.partition('. ')[0]}"
    if getattr(error, "status", None) == DRIVER_STATUS or (isinstance(error, torch.AcceleratorError) and SAID in first):
        return f"GPU: {first}"
    refused = isinstance(error, OSError) and error.errno == errno.ENOMEM
    of_torch = isinstance(error, RuntimeError) and "DefaultCPUAllocator" in first
    first = first.rpartition("DefaultCPUAllocator: ")[2]
    return first if isinstance(error, MemoryError) or refused or of_torch else ""


@contextmanager
def finds_memory(what: str) -> Iterator[None]:
    """Turn an error of an allocation into a ConfigError that says in one line that `what` found no memory."""
    try:
        yield
    except (RuntimeError, MemoryError, OSError) as error:
        if not (why := missing_memory(error)):
            raise
        raise ConfigError(
            f"{what} found no room in memory; lower kv_memory, max_batch_size or max_step_tokens: {why}"
        ) from None
