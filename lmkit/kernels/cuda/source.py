"""The source text of a kernel with its includes inlined, so that a compiler's cache key covers all of it."""

from __future__ import annotations

import re
from functools import cache
from pathlib import Path

FOLDER = Path(__file__).parent / "csrc"
_INCLUDE = re.compile(r'^#include "(\S+)"\n', re.MULTILINE)


@cache
def kernel_source(name: str) -> str:
    """`csrc/<name>` with each `#include "..."` replaced by that file at its first occurrence."""
    seen: set[str] = set()

    def text(file: str) -> str:
        seen.add(file)
        return _INCLUDE.sub(lambda m: "" if m[1] in seen else text(m[1]), (FOLDER / file).read_text())

    return text(name)


def options(defines: dict[str, int]) -> tuple[str, ...]:
    """NVRTC's options besides those that CuPy adds itself."""
    return "-std=c++17", "--ptxas-options=-O3", *(f"-D{name}={value}" for name, value in sorted(defines.items()))
