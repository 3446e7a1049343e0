"""Which emulator runs kernels for tensors on the CPU: their source text through g++, or what NVRTC makes of it."""

from __future__ import annotations

from functools import cache

from lmkit.kernels.cuda import module
from lmkit.kernels.cuda.gpus import Capability
from tests.emulator.backend import EmulatedBackend
from tests.emulator.ptx.backend import PtxBackend

_compiled_for: str | None = None


def run_compiled(arch: str | None) -> None:
    """From now on, `install` runs NVRTC's code for an architecture ("90a"), or the source text."""
    global _compiled_for
    _compiled_for = arch


def install(
    seed: int = 0, *, sanitize: bool = False, capability: Capability = (9, 0), overlap: bool = False
) -> EmulatedBackend:
    """Run kernels for tensors on the CPU by an emulator. Raises UnsupportedError without g++."""
    backend = _backend(sanitize, capability, overlap, None if sanitize else _compiled_for)
    backend.begin(seed)
    module.BACKENDS["cpu"] = backend
    return backend


@cache
def _backend(sanitize: bool, capability: Capability, overlap: bool, arch: str | None) -> EmulatedBackend:
    """The one backend of each kind. There is only one, because kernels keep the code that they have loaded."""
    if arch is not None:
        return PtxBackend(arch, capability=capability, overlap=overlap)
    return EmulatedBackend(sanitize=sanitize, capability=capability, overlap=overlap)
