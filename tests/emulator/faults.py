"""Faults of an emulated GPU's kernels.

plant(backend, "gemm=wrong,decode_attention=dies@5")        # from its fifth launch on
"""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from lmkit.errors import UnsupportedError
from lmkit.kernels.cuda.launcher import LaunchError
from lmkit.kernels.cuda.module import Launch
from tests.emulator.backend import EmulatedBackend

VARIABLE = "EMULATED_FAULTS"
KINDS = "wrong", "unsteady", "refused", "uncompiled", "faults", "dies", "hangs"


def plant(backend: EmulatedBackend, text: str) -> None:
    """Make kernels fail, named as the entries of csrc, each in one way of KINDS."""
    given = {}
    for part in filter(None, text.split(",")):
        name, _, how = part.partition("=")
        kind, _, first = how.partition("@")
        assert kind in KINDS, kind
        given[name] = kind, int(first or 1)
    load, counts = EmulatedBackend.load, dict.fromkeys(given, 0)

    def faulty(source: str, name: str, defines: dict[str, int]) -> Launch:
        if name not in given:
            return load(backend, source, name, defines)
        kind, first = given[name]
        if kind == "uncompiled":
            raise UnsupportedError(f"{source} cannot be compiled: error: planted")
        inner = load(backend, source, name, defines)

        def launch(grid: tuple[int, ...], block: tuple[int, ...], args: Sequence[Any], shared: int) -> None:
            counts[name] += 1
            if counts[name] >= first:
                _fail(kind, name)
            inner(grid, block, args, shared)
            if counts[name] >= first and kind in ("wrong", "unsteady"):
                _spoil(args, 1.002 if kind == "unsteady" and counts[name] % 2 else 1.0, 1 if kind == "wrong" else 0)

        return launch

    backend.load = faulty  # type: ignore[method-assign]


def _fail(kind: str, name: str) -> None:
    if kind == "refused":
        raise LaunchError(name, 1, "invalid argument")
    if kind == "faults":
        raise LaunchError(name, 700, "an illegal memory access was encountered")
    if kind == "dies":
        os.kill(os.getpid(), signal.SIGKILL)
    if kind == "hangs":
        time.sleep(1e6)


def _spoil(args: Sequence[Any], factor: float, more: int) -> None:
    """Change a number of every tensor among the arguments: what is read is spoiled, too. A factor near 1 leaves it
    nearly right."""
    for arg in args:
        if isinstance(arg, Tensor) and arg.dtype in (torch.float16, torch.bfloat16, torch.float32) and arg.numel():
            arg[(0,) * arg.dim()].mul_(factor).add_(more)
        elif isinstance(arg, Tensor) and arg.dtype == torch.int64 and arg.dim() == 1 and arg.numel() and more:
            arg[:1].bitwise_xor_(1)
