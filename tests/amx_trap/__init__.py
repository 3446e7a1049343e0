"""Native AMX code on processors with AVX512 alone: trap.c does the work of each AMX instruction when it faults."""

from __future__ import annotations

import hashlib
import os
import shutil
import subprocess
from pathlib import Path

import llvmlite.binding as llvm

from lmkit.environment import environment
from lmkit.kernels.cpu import isa

SOURCE = Path(__file__).parent / "trap.c"
KINDS = ("configure", "store configuration", "release", "zero", "load", "store", "dot int8", "dot bf16")


def refused() -> str | None:
    """Why this machine cannot run native AMX code in the trap, or need not; None if it can."""
    if isa.host().tiles:
        return "the other tests run the instructions"
    if isa.obstacle(isa.named("avx512_vnni")):
        return "the code around the AMX instructions needs AVX512-VNNI"
    return None if shutil.which("gcc") else "the trap is compiled with gcc"


def variables() -> dict[str, str]:
    """The environment of a process that takes this machine for one with AMX."""
    features = dict(llvm.get_host_cpu_features()) | dict.fromkeys(("amx-tile", "amx-int8", "amx-bf16"), True)
    flat = ",".join(f"{'+' if has else '-'}{name}" for name, has in sorted(features.items()))
    machine = {"NUMBA_CPU_NAME": llvm.get_host_cpu_name(), "NUMBA_CPU_FEATURES": flat}
    return os.environ | machine | {"LMKIT_CPU_ISA": "amx", "LD_PRELOAD": str(_library())}


def _library() -> Path:
    folder = environment().cache_dir / "amx_trap"
    library = folder / f"{hashlib.sha256(SOURCE.read_bytes()).hexdigest()[:16]}.so"
    if not library.exists():
        folder.mkdir(parents=True, exist_ok=True)
        part = library.with_suffix(f".{os.getpid()}")
        flags = ("-O2", "-mfma", "-fPIC", "-shared", "-Wall", "-Wextra", "-Werror")
        subprocess.run(["gcc", *flags, "-o", str(part), str(SOURCE), "-lm", "-ldl"], check=True)
        part.rename(library)
    return library
