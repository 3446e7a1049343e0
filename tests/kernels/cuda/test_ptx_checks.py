"""Faults that only compiled code shows, planted one at a time: each access of PTX is checked."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from torch import Tensor

from lmkit.kernels.cuda import module
from lmkit.kernels.cuda.module import Kernel
from tests.emulator.ptx.backend import PADDED, PtxBackend
from tests.kernels.cuda import toolchain

pytestmark = pytest.mark.skipif(
    toolchain.missing_nvrtc() is not None or shutil.which("g++") is None, reason="NVRTC and g++ are needed"
)

BLOCKS, THREADS, SHARED = 4, 64, 1024
# What a kernel does in each case; t is the thread, b the block, s shared memory, x and y global memory of
# BLOCKS * THREADS numbers each.
RIGHT = {
    "a barrier stands between": "s[t] = v; __syncthreads(); out = s[t ^ 32];",
    "__syncwarp is enough for lanes": "s[t] = v; __syncwarp(); out = s[t ^ 1]; __syncwarp(); s[t] = out;",
    "all write the same": "s[0] = 1.5f; __syncthreads(); out = s[0];",
    "halves of a word belong to two threads": "h[t] = t; __syncthreads(); out = h[t ^ 1];",
    "each thread changes its half of a word": "h[t] = t; __syncthreads(); h[t] = h[t] + 1; out = h[t];",
    "halves of a word are read by others before": """
        s[t] = v; __syncwarp(); out = h[2 * (t ^ 1)]; __syncwarp(); s[t] = s[t] + out;""",
    "atomics need no order": "if (!t) n[0] = 0; __syncthreads(); atomicAdd(n, 1); __syncthreads(); out = n[0];",
    "a copy is waited for": """
        cp_async16(s + 4 * t, x + 4 * (t % 16)); cp_async_commit(); cp_async_wait<0>();
        __syncthreads(); out = s[4 * (t ^ 32)];""",
    "the last block reads all": """
        y[b * 64 + t] = v; __threadfence(); __syncthreads();
        if (!t) n[0] = atomicAdd(count, 1) == gridDim.x - 1;
        __syncthreads(); if (!n[0]) return;
        __threadfence(); for (int i = 0; i < gridDim.x; ++i) out += __ldcg(y + i * 64 + t);
        if (!t) *count = 0;
        return;""",
    "one thread fences for its block": """
        y[b * 64 + t] = v; __syncthreads();
        if (!t) { __threadfence(); n[0] = atomicAdd(count, 1) == gridDim.x - 1; __threadfence(); }
        __syncthreads(); if (!n[0]) return;
        for (int i = 0; i < gridDim.x; ++i) out += __ldcg(y + i * 64 + t);
        if (!t) *count = 0;
        return;""",
    "the last block writes what all have read": """
        out = __ldcg(y + (b + 1) % 4 * 64 + t); __threadfence(); __syncthreads();
        if (!t) n[0] = atomicAdd(count, 1) == gridDim.x - 1;
        __syncthreads(); if (!n[0]) return;
        __threadfence(); for (int i = 0; i < gridDim.x; ++i) y[i * 64 + t] = out + i;
        if (!t) *count = 0;
        return;""",
    "a thread waits for what another tells": """
        u32* flag = reinterpret_cast<u32*>(y) + b * 64; if (t == 33) store_release(flag, 7u);
        if (!t) while (load_acquire(flag) != 7u) {}
        __syncthreads();""",
}
LAST, LAST_WRITES = RIGHT["the last block reads all"], RIGHT["the last block writes what all have read"]
WRONG = {
    "shared: not aligned": ("out = *reinterpret_cast<float*>(shared_memory + 2 + 4 * (t & 7));", "is not aligned"),
    "shared: a vector that is not aligned": (
        "const float2 two = reinterpret_cast<float2*>(s + 1)[t & 7]; out = two.x + two.y;",
        "is not aligned",
    ),
    "shared: outside": ("s[t + 200] = v;", "of shared memory, which has 1024"),
    "shared: before it": ("s[t - 70] = v;", "of shared memory, which has 1024"),
    "shared: never written": (
        "if (t != 33) s[t] = v; __syncthreads(); out = s[t];",
        "thread 33 reads byte 132 .* nothing has written",
    ),
    "shared: a read too early": ("s[t] = 0; __syncthreads(); s[t] = v; out = s[t ^ 32];", "a race in shared memory"),
    "shared: a write too early": ("s[t] = 0; __syncthreads(); out = s[t ^ 32]; s[t] = v;", "a race in shared memory"),
    "shared: two writes": ("s[t & 31] = v;", "a race in shared memory: thread .* writes byte"),
    "shared: lanes without __syncwarp": (
        "s[t] = 0; __syncthreads(); s[t] = v; out = s[t ^ 1];",
        "a race in shared memory",
    ),
    "shared: a shuffle orders nothing": (
        "s[t] = 0; __syncthreads(); s[t] = v; out = __shfl_xor_sync(~0u, v, 1) + s[t ^ 1];",
        "a race in shared memory",
    ),
    "shared: an atomic beside a read": (
        "if (!t) n[0] = 0; __syncthreads(); atomicAdd(n, 1); out = n[0];",
        "a race in shared memory",
    ),
    "copies: read before the wait": (
        "cp_async16(s + 4 * t, x + 4 * (t % 16)); cp_async_commit(); out = s[4 * t]; cp_async_wait<0>();",
        "the copy of line",
    ),
    "copies: a read without a barrier": (
        "cp_async16(s + 4 * t, x + 4 * (t % 16)); cp_async_commit(); cp_async_wait<0>(); out = s[4 * (t ^ 32)];",
        "a race in shared memory|the copy of line|nothing has written",
    ),
    "copies: over what others read": (
        "s[t] = v; __syncthreads(); out = s[t ^ 32]; if (t < 16) cp_async16(s + 4 * t, x + 4 * t); cp_async_wait<0>();",
        "a race in shared",
    ),
    "copies: never waited for": (
        "cp_async16(s + 4 * t, x + 4 * (t % 16)); cp_async_commit();",
        "ended with 1 copies that nobody waited for",
    ),
    "copies: not aligned": (
        "cp_async16(s + t, x + 4 * (t % 16)); cp_async_commit(); cp_async_wait<0>();",
        "is not aligned",
    ),
    "copies: from behind the end": (
        "cp_async16(s + 4 * t, x + BLOCKS * 64); cp_async_commit(); cp_async_wait<0>();",
        "16 bytes outside of all tensors",
    ),
    "lanes at two shuffles": (
        "if (t & 1) out = __shfl_xor_sync(~0u, v, 2); else out = __shfl_xor_sync(~0u, v, 4) + 1;",
        "lanes of a warp meet at line",
    ),
    "lanes that others wait for": ("if (t & 1) __syncwarp(); out = v;", "threads wait for ever"),
    "a matrix that is not aligned": (
        "s[t] = v; s[t + 64] = v; __syncthreads(); u32 r[4]; ldmatrix_x4(r, s + 1 + (t & 7)); out = r[0];",
        "is not aligned",
    ),
    "barriers at two places": (
        "if (t < 32) { __syncthreads(); s[t] = v; } else { s[t] = 1; __syncthreads(); }",
        "__syncthreads of line",
    ),
    "global: not aligned": (
        "const float2 two = reinterpret_cast<const float2*>(x + 1)[t & 7]; out = two.x + two.y;",
        "global memory at .* is not aligned",
    ),
    "global: behind the end": (
        "y[b * 64 + t + 1] = v; return;",
        r"thread 63 of block \(3, 0, 0\): an access .* outside of all tensors",
    ),
    "global: before the begin": ("out = x[b * 64 + t - 1];", r"thread 0 of block \(0, 0, 0\): an access"),
    "blocks: a read of what another writes": (
        "y[b * 64 + t] = v; out = __ldcg(y + (b + 1) % 4 * 64 + t); return;",
        "a race between blocks",
    ),
    "blocks: two writes": ("y[t] = b; return;", "a race between blocks: block . writes what"),
    "blocks: a write of what another reads": (
        "if (b) out = __ldcg(y + t); else y[t] = v + 1; return;",
        "a race between blocks: block (0 writes what block . reads|. reads what block 0 wrote)",
    ),
    "blocks: no fence behind a read": (
        LAST_WRITES.replace("__threadfence(); __syncthreads();", "__syncthreads();", 1),
        "a race between blocks: block . writes what block . reads",
    ),
    "blocks: no barrier behind a read": (
        LAST_WRITES.replace("__threadfence(); __syncthreads();", "__threadfence();", 1),
        "a race between blocks: block . writes what block . reads",
    ),
    "blocks: no fence before": (
        LAST.replace("y[b * 64 + t] = v; __threadfence();", "y[b * 64 + t] = v;"),
        "a race between blocks: block . reads",
    ),
    "blocks: no fence behind": (LAST.replace("__threadfence(); for", "for"), "a race between blocks: block . reads"),
    "blocks: no barrier before": (
        LAST.replace("__threadfence(); __syncthreads();", "__threadfence();"),
        "a race between blocks: block . reads",
    ),
}


@pytest.fixture(scope="module")
def backend() -> PtxBackend:
    return PtxBackend("90a", capability=(9, 0), overlap=False)


@pytest.fixture(autouse=True)
def installed(backend: PtxBackend) -> Iterator[None]:
    backend.begin(3)
    module.BACKENDS["cpu"] = backend
    yield
    module.BACKENDS.pop("cpu")


@pytest.fixture(scope="module")
def kernel(tmp_path_factory: pytest.TempPathFactory) -> Kernel:
    """All cases in one kernel, which is compiled once."""
    cases = [*RIGHT.values(), *(body for body, _ in WRONG.values())]
    switch = "\n".join(f"case {i}: {{ {body} break; }}" for i, body in enumerate(cases))
    path = tmp_path_factory.mktemp("planted") / "planted.cu"
    path.write_text(
        f'#include "ptx.cuh"\nconstexpr int BLOCKS = {BLOCKS};\n'
        'extern "C" __global__ void __launch_bounds__(64) planted(const float* x, float* y, int* count, int which) {\n'
        "auto* s = reinterpret_cast<float*>(shared_memory); auto* h = reinterpret_cast<u16*>(s);\n"
        "auto* n = reinterpret_cast<int*>(s);\nconst int t = threadIdx.x, b = blockIdx.x;\n"
        f"const float v = x[b * 64 + t]; float out = 0;\nswitch (which) {{\n{switch}\n}}\ny[b * 64 + t] = out;\n}}\n"
    )
    return Kernel(str(path), "planted")


def run(kernel: Kernel, which: int, blocks: int = BLOCKS) -> Tensor:
    x, y = torch.randn(BLOCKS * THREADS), torch.zeros(BLOCKS * THREADS)
    kernel(blocks, THREADS, [x, y, torch.zeros(1, dtype=torch.int32), which], shared=SHARED)
    return y


@pytest.mark.parametrize("case", RIGHT)
def test_what_is_right_passes(kernel: Kernel, case: str) -> None:
    for _ in range(3):
        run(kernel, list(RIGHT).index(case))


@pytest.mark.parametrize("case", WRONG)
def test_a_planted_fault_is_an_error(kernel: Kernel, case: str) -> None:
    with pytest.raises(RuntimeError, match=WRONG[case][1]) as error:
        run(kernel, len(RIGHT) + list(WRONG).index(case))
    assert "planted.cu: planted: " in str(error.value)


def test_an_error_shows_the_instruction(kernel: Kernel) -> None:
    where = r"\(/\S*/planted\.cu:\d+\)"
    with pytest.raises(
        RuntimeError, match=rf"(?s)line (\d+):.*\n    \1: st\.shared\.f32\s+\S+ \S+ {where}\n    of .*\.ptx"
    ):
        run(kernel, len(RIGHT) + list(WRONG).index("shared: outside"))


def test_a_race_of_two_blocks_is_seen_in_either_order(kernel: Kernel) -> None:
    seen = set()
    while len(seen) < 2:
        with pytest.raises(RuntimeError, match="a race between blocks") as error:
            run(kernel, len(RIGHT) + list(WRONG).index("blocks: a write of what another reads"), blocks=2)
        seen.add("block 0 writes" in str(error.value))


def test_blocks_of_one_launch_alone_are_compared(kernel: Kernel) -> None:
    alone = len(RIGHT) + list(WRONG).index("blocks: two writes")
    for _ in range(2):
        run(kernel, alone, blocks=1)


PRODUCT = """#include "wgmma.cuh"
extern "C" __global__ void __launch_bounds__(128) product(const u32* a, float* y, int which) {
    const int t = threadIdx.x;
    u32 registers[4] = {a[t], a[t], a[t], a[t]};
    float d[24] = {};
    auto* words = reinterpret_cast<u32*>(shared_memory);
    for (int i = t; i < 384; i += 128) words[i] = a[i];
    if (which != 1) fence_for_wgmma();
    if (which != 2) __syncthreads();
    wgmma_fence();
    wgmma<48>(d, registers, shared_matrix(shared_memory + (which == 3 ? 768 : 0), 768, 128), false);
    wgmma_commit();
    if (which == 5) words[t] = t;
    wgmma_wait_for(d);
    y[t] = d[0] + d[23];
}
"""


@pytest.mark.parametrize(
    ("which", "message"),
    [(0, None), (1, "was not fenced for it"), (2, "no barrier between|nothing has written"), (3, "128 bytes at byte"),
     (5, "which a product still reads")],
)  # fmt: skip
def test_products_of_warpgroups(tmp_path: Path, which: int, message: str | None) -> None:
    path = tmp_path / "product.cu"
    path.write_text(PRODUCT)
    a, y = torch.ones(384, dtype=torch.int32), torch.zeros(128)
    arguments = [a, y, which]
    if message is None:
        return Kernel(str(path), "product")(1, 128, arguments, shared=1536)
    with pytest.raises(RuntimeError, match=message):
        Kernel(str(path), "product")(1, 128, arguments, shared=1536)
    return None


@pytest.mark.parametrize(("what", "message"), [("s[t] * 0.0f == 0.0f", "depend"), ("n[t] == 3", None)])
def test_what_is_padding_changes_no_result(
    backend: PtxBackend, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, what: str, message: str | None
) -> None:
    """Words that nothing has written are NaN in one run, and large numbers in another."""
    path = tmp_path / "padded.cu"
    path.write_text(
        '#include "ptx.cuh"\nextern "C" __global__ void __launch_bounds__(32) padded(float* y) {\n'
        "auto* s = reinterpret_cast<float*>(shared_memory); auto* n = reinterpret_cast<int*>(s);\n"
        f"const int t = threadIdx.x; y[t] += {what} ? 2.0f : 1.0f;\n}}\n"
    )
    monkeypatch.setitem(PADDED, str(path), 0)
    y = torch.zeros(32)
    if message is None:
        Kernel(str(path), "padded")(1, 32, [y], shared=128)
        assert y.tolist() == [1.0] * 32
        assert backend.launches == ["padded"]
    else:
        with pytest.raises(RuntimeError, match=message):
            Kernel(str(path), "padded")(1, 32, [y], shared=128)
