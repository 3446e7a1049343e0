"""Kernels touch nothing outside of the buffers they are given: AddressSanitizer, over emulated ones."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]
HERE = Path(__file__).parent.relative_to(ROOT)
# What runs a second time with the sanitizer: a part of each file's tests, as `pytest -k` takes it.
WATCHED: dict[str, str] = {
    "test_emulation.py": "ldmatrix or copies_land or mma_s8 or mma_e4m3",
    "test_linear.py": "test_tails",
    "test_int8_rows.py": "test_formats and int4-256",
    "test_float8_rows.py": "test_formats and long",
    "test_experts.py": "places_and_sums or (test_route and 21) or (products_are and int4-5)",
    "test_delta.py": "begins_with_drafts or 2x3x8x12x4-flat",
    "test_sampling.py": "lie_anywhere",
    "test_tokens.py": "known",
    "test_elementwise.py": "515-given1 or 512-given2 or begin_anywhere or wider_tensor or embedding or gated",
    "test_library.py": "few_tokens and (8-200-33 or 1-2056-17) or test_codes and 528 and given1 or odd_widths",
    "test_blocks.py": "copies",
    "test_ranks.py": "same_bits and 2 or come_to_rank_0 and 2",
    "test_append.py": "test_rope_append and (80-20 or 256-256)",
    "test_decode_attention.py": "test_shapes and (80-48 or 96-16) or append_and_attend and (80-20 or 64-32)",
    "test_prefill_attention.py": "many_splits or may_be_anything and types2 or test_attention and (types7 or types17)",
    "test_balanced.py": "test_attention and types4 and both or test_append and 96",
    "test_wide_attention.py": "may_be_anything or (other_shapes and shape1)",
}

PLANTED = """
import sys, torch
from tests import emulator
from lmkit.kernels.cuda.module import Kernel
emulator.install(sanitize=True)
path, *after = sys.argv[1:]
Kernel(path, "planted")(1, 32, [torch.zeros(32), torch.zeros(32), *map(int, after)], shared=128)
"""
KERNEL = """#include "ptx.cuh"
extern "C" __global__ void __launch_bounds__(32) planted(const float* x, float* y, int after_x, int after_s) {
    auto* s = reinterpret_cast<float*>(shared_memory);
    s[threadIdx.x + after_s] = x[threadIdx.x + after_x];
    y[threadIdx.x] = s[threadIdx.x + after_s];
}
EXPORT(planted)
"""


def sanitizer() -> list[str]:
    """The libraries to load first, or nothing where g++ has none."""
    if shutil.which("g++") is None:
        return []
    names = ("libasan.so", "libstdc++.so.6")
    found = [subprocess.check_output(["g++", f"-print-file-name={name}"], text=True).strip() for name in names]
    return found if all(map(os.path.isabs, found)) else []


def watched(*arguments: str) -> subprocess.CompletedProcess[str]:
    """Run Python with the sanitizer's library loaded before anything else."""
    asan = {"LD_PRELOAD": " ".join(sanitizer()), "ASAN_OPTIONS": "detect_leaks=0"}
    return subprocess.run(
        [sys.executable, *arguments], env=os.environ | asan, cwd=ROOT, capture_output=True, text=True, check=False
    )


pytestmark = pytest.mark.skipif(not sanitizer(), reason="g++ with AddressSanitizer is needed")


@pytest.mark.parametrize(("after_x", "after_s"), [(1, 0), (0, 1)])
def test_the_sanitizer_finds_what_was_planted(tmp_path: Path, after_x: int, after_s: int) -> None:
    source = tmp_path / "planted.cu"
    source.write_text(KERNEL)
    done = watched("-c", PLANTED, str(source), str(after_x), str(after_s))
    assert "heap-buffer-overflow" in done.stderr
    assert "planted" in done.stderr


@pytest.mark.exhaustive
def test_kernels_stay_within_their_buffers() -> None:
    options = ["-v", "-x", "-s", "-m", "not gpu", "-p", "tests.kernels.cuda.sanitized", "-p", "no:cacheprovider"]
    chosen = " or ".join(f"{file.removesuffix('.py')} and ({names})" for file, names in WATCHED.items())
    done = watched("-m", "pytest", *options, *(str(HERE / file) for file in WATCHED), "-k", chosen)
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-4000:]
    unwatched = [file for file in WATCHED if not re.search(rf"/{file}::.* PASSED", done.stdout)]
    assert not unwatched, f"no test is chosen of {unwatched}"
