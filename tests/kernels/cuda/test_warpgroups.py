"""The emulated wgmma: what it computes is what PTX says, and mistakes that a GPU may hide come to light."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from torch import Tensor

from lmkit.kernels.cuda import module
from lmkit.kernels.cuda.module import Kernel
from tests import emulator
from tests.emulator import EmulatedBackend

# Y [64, 48] = A [64, 32] B [32, 48], B as [chunks of 8 k][48][8]. LINES are replaced one at a time.
KERNEL = """#include "wgmma.cuh"
extern "C" __global__ void __launch_bounds__(128) product(const u16* a, const u16* b, float* y) {
    const int thread = threadIdx.x, g = thread % 32 / 4, t = thread % 4, row = thread / 32 * 16 + g;
    u32 registers[2][4];
    float d[24] = {};
    for (int i = thread; i < 192; i += 128) cp_async16(shared_memory + 16 * i, b + 8 * i);
    cp_async_commit();
    for (int step = 0; step < 2; ++step)
        for (int i = 0; i < 4; ++i) {
            const u16* from = a + (row + 8 * (i & 1)) * 32 + 16 * step + i / 2 * 8 + 2 * t;
            registers[step][i] = *reinterpret_cast<const u32*>(from);
        }
    cp_async_wait<0>();
    fence_for_wgmma();
    __syncthreads();
    const SharedMatrix first = shared_matrix(shared_memory, 768, 128);
    wgmma_fence();
    wgmma<48>(d, registers[0], first, false);
    wgmma<48>(d, registers[1], shared_matrix_behind(first, 1536), true);
    wgmma_commit();
    /* between */
    wgmma_wait_for(d);
    for (int i = 0; i < 24; ++i) y[(row + 8 * (i >> 1 & 1)) * 48 + i / 4 * 8 + 2 * t + (i & 1)] = d[i];
}
EXPORT(product)
"""


@pytest.fixture(autouse=True)
def backend() -> Iterator[EmulatedBackend]:
    try:
        yield emulator.install(seed=3)
    finally:
        module.BACKENDS.pop("cpu", None)


def run(folder: Path, replaced: dict[str, str], seed: int = 0) -> tuple[Tensor, Tensor]:
    """(the kernel's Y, A B in float64). `replaced` has new text for names in LINES."""
    text = KERNEL
    for name, new in replaced.items():
        assert LINES[name] in text
        text = text.replace(LINES[name], new)
    path = folder / f"{abs(hash(text))}.cu"
    path.write_text(text)
    emulator.install(seed)
    a, b, y = torch.randn(64, 32).half(), torch.randn(32, 48).half(), torch.zeros(64, 48)
    arranged = b.view(4, 8, 48).transpose(1, 2).contiguous()
    Kernel(str(path), "product")(1, 128, [a, arranged, y], shared=3072)
    return y, a.double() @ b.double()


LINES = {
    "async_fence": "    fence_for_wgmma();\n",
    "barrier": "    __syncthreads();\n",
    "fence": "    wgmma_fence();\n",
    "commit": "    wgmma_commit();\n",
    "between": "/* between */",
    "wait": "    wgmma_wait_for(d);\n",
}


def test_products_are_right(tmp_path: Path) -> None:
    for seed in range(3):
        y, expected = run(tmp_path, {}, seed)
        torch.testing.assert_close(y.double(), expected, rtol=1e-5, atol=1e-4)


@pytest.mark.parametrize(
    ("message", "replaced"),
    [
        ("not fenced", {"async_fence": ""}),
        ("no barrier", {"barrier": ""}),
        ("no wgmma_fence", {"fence": ""}),
        ("nobody waited", {"commit": ""}),
        ("nobody waited", {"wait": ""}),
        ("no wgmma_fence", {"between": "wgmma_wait<0>(); wgmma<48>(d, registers[0], first, true); wgmma_commit();"}),
    ],
)
def test_mistakes_are_errors(message: str, replaced: dict[str, str], tmp_path: Path) -> None:
    with pytest.raises(RuntimeError, match=message):
        run(tmp_path, replaced)


@pytest.mark.usefixtures("from_source")
def test_registers_that_change_are_an_error(tmp_path: Path) -> None:
    """In source text: a compiler takes others."""
    with pytest.raises(RuntimeError, match="registers of A have changed"):
        run(tmp_path, {"between": "registers[1][2] ^= 1;"})


def test_sums_that_are_used_too_early_are_wrong(tmp_path: Path) -> None:
    replaced = {"between": "wgmma_wait<1>(); y[thread] = d[0];", "wait": "    wgmma_wait<0>(); d[0] = y[thread];\n"}
    assert_sometimes_wrong(tmp_path, replaced)


@pytest.mark.usefixtures("from_source")
def test_sums_of_memory_that_is_written_too_early_are_wrong(tmp_path: Path) -> None:
    between = "__syncthreads(); reinterpret_cast<u32*>(shared_memory)[thread] = 0;"
    assert_sometimes_wrong(tmp_path, {"between": between})


def assert_sometimes_wrong(folder: Path, replaced: dict[str, str]) -> None:
    """In some orders."""
    wrong = 0
    for seed in range(8):
        y, expected = run(folder, replaced, seed)
        wrong += not torch.allclose(y.double(), expected, atol=1e-2)
    assert wrong
