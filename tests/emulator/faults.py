"""Faults of an emulated GPU's kernels.

plant(backend, "gemm=wrong,decode_attention=dies@5")        # from its fifth launch on
plant(backend, "gemm=wrong/early", device)      # where a kernel before it may still run: `device` is a FaultyDevice
plant(backend, "gemm=dies/replayed", device)    # in the replay of a captured step
plant(backend, "gemm[INT8]=wrong")              # of the variants with that define
"""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from lmkit.errors import UnsupportedError
from lmkit.kernels.cuda.launcher import LaunchError
from lmkit.kernels.cuda.module import Launch
from lmkit.kernels.cuda.switches import switches
from tests.emulator.backend import EmulatedBackend
from tests.emulator.device import EmulatedDevice

VARIABLE = "EMULATED_FAULTS"
KINDS = "wrong", "unsteady", "refused", "uncompiled", "faults", "dies", "hangs"
EARLY, REPLAYED = "early", "replayed"


class FaultyDevice(EmulatedDevice):
    """A device that knows whether it has waited for its kernels, whether a captured step is replayed, and whether it
    refuses to go on. `planted`: if some of it happens only to kernels that begin early, kernels overlap here."""

    def __init__(self, planted: str = "") -> None:
        super().__init__()
        self._may_overlap = EARLY in planted
        self.has_waited, self.is_replaying, self.has_faulted = True, False, False

    def overlaps(self) -> bool:
        return self._may_overlap and switches().overlap

    def synchronize(self) -> None:
        self.has_waited = True

    def capture(self, launch: Callable[[], None]) -> Callable[[], None]:
        def replay() -> None:
            self.is_replaying = True
            try:
                launch()
            finally:
                self.is_replaying = False

        return replay

    def happens(self, when: str) -> bool:
        """Whether a launch now is one of a kind, or of any kind if `when` is empty."""
        if when == EARLY:
            return self.overlaps() and not self.has_waited
        return self.is_replaying or when != REPLAYED


def plant(backend: EmulatedBackend, text: str, device: FaultyDevice | None = None) -> None:
    """Make kernels fail, named as the entries of csrc, each in one way of KINDS."""
    where, given = device or FaultyDevice(), {}
    for part in filter(None, text.split(",")):
        name, _, how = part.partition("=")
        how, _, when = how.partition("/")
        kind, _, first = how.partition("@")
        assert kind in KINDS, kind
        assert when in ("", EARLY, REPLAYED), when
        given[name] = kind, int(first or 1), when
    load, counts = EmulatedBackend.load, dict.fromkeys(given, 0)

    def faulty(source: str, name: str, defines: dict[str, int]) -> Launch:
        key = next((key for key in (name, *(f"{name}[{define}]" for define in defines)) if key in given), None)
        if key is None:
            return unwaited(name, load(backend, source, name, defines))
        kind, first, when = given[key]
        if kind == "uncompiled":
            raise UnsupportedError(f"{source} cannot be compiled: error: planted")
        inner = load(backend, source, name, defines)

        def launch(grid: tuple[int, ...], block: tuple[int, ...], args: Sequence[Any], shared: int) -> None:
            happens = where.happens(when)
            counts[key] += happens
            is_planted = happens and counts[key] >= first
            if is_planted:
                where.has_faulted = kind == "faults"
                _fail(kind, name)
            inner(grid, block, args, shared)
            if is_planted and kind in ("wrong", "unsteady"):
                _spoil(args, 1.002 if kind == "unsteady" and counts[key] % 2 else 1.0, 1 if kind == "wrong" else 0)

        return unwaited(name, launch)

    def unwaited(name: str, launch: Launch) -> Launch:
        def launch_on(grid: tuple[int, ...], block: tuple[int, ...], args: Sequence[Any], shared: int) -> None:
            if where.has_faulted:
                _fail("faults", name)
            launch(grid, block, args, shared)
            where.has_waited = False

        return launch_on

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
