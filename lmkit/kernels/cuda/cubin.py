"""Machine code for exactly one architecture, by NVRTC. CuPy compiles for sm_90, which has no wgmma; sm_90a has it."""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Any

from lmkit.environment import environment
from lmkit.errors import UnsupportedError
from lmkit.kernels.cuda.cached_file import replace_file
from lmkit.log import get_logger

log = get_logger(__name__)

CUPY_OPTIONS = "-ftz=true", "--device-as-default-execution-space"  # as CuPy compiles: subnormal numbers are zero


def first_error(text: str) -> str:
    """The first line of a compiler's log that says error, or else its first line."""
    lines = [line.strip() for line in text.splitlines() if line.strip()] or ["no reason is given"]
    return next((line for line in lines if "error" in line.lower()), lines[0])[:300]


def cubin(nvrtc: Any, text: str, options: tuple[str, ...], arch: str) -> Path:
    """The file with the compiled text, in the cache folder. `nvrtc` is cupy.cuda.nvrtc. `arch`: as NVRTC names it,
    without "sm_". Raises UnsupportedError with the first error of the compiler's log."""
    flags = (f"--gpu-architecture=sm_{arch}", *CUPY_OPTIONS, *options)
    digest = hashlib.sha256("\0".join((text, *flags, str(nvrtc.getVersion()))).encode()).hexdigest()
    path = environment().cache_dir / "cubin" / f"{digest[:32]}.cubin"
    if not path.exists():
        replace_file(path, _compiled(nvrtc, text, flags))
    return path


def _compiled(nvrtc: Any, text: str, flags: tuple[str, ...]) -> bytes:
    program = nvrtc.createProgram(text, "kernel.cu", (), ())
    try:
        nvrtc.compileProgram(program, flags)
        return bytes(nvrtc.getCUBIN(program))
    except nvrtc.NVRTCError:
        text = nvrtc.getProgramLog(program)
        log.debug("NVRTC: %s", text)
        raise UnsupportedError(f"NVRTC: {first_error(text)}") from None
    finally:
        nvrtc.destroyProgram(program)
