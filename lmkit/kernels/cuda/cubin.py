"""Machine code for exactly one architecture, by NVRTC. CuPy compiles for sm_90, which has no wgmma; sm_90a has it."""

from __future__ import annotations

import hashlib
import os
from pathlib import Path
from typing import Any

from lmkit.environment import environment
from lmkit.errors import UnsupportedError

CUPY_OPTIONS = "-ftz=true", "--device-as-default-execution-space"  # as CuPy compiles: subnormal numbers are zero


def cubin(nvrtc: Any, text: str, options: tuple[str, ...], arch: str) -> Path:
    """The file with the compiled text, in the cache folder. `nvrtc` is cupy.cuda.nvrtc. `arch`: as NVRTC names it,
    without "sm_". Raises UnsupportedError with the compiler's log."""
    flags = (f"--gpu-architecture=sm_{arch}", *CUPY_OPTIONS, *options)
    digest = hashlib.sha256("\0".join((text, *flags, str(nvrtc.getVersion()))).encode()).hexdigest()
    path = environment().cache_dir / "cubin" / f"{digest[:32]}.cubin"
    if not path.exists():
        path.parent.mkdir(parents=True, exist_ok=True)
        partial = path.with_suffix(f".{os.getpid()}.{id(flags)}")
        partial.write_bytes(_compiled(nvrtc, text, flags))
        partial.replace(path)
    return path


def _compiled(nvrtc: Any, text: str, flags: tuple[str, ...]) -> bytes:
    program = nvrtc.createProgram(text, "kernel.cu", (), ())
    try:
        nvrtc.compileProgram(program, flags)
        return bytes(nvrtc.getCUBIN(program))
    except nvrtc.NVRTCError:
        raise UnsupportedError(f"NVRTC: {nvrtc.getProgramLog(program)[:4000]}") from None
    finally:
        nvrtc.destroyProgram(program)
