"""The emulated GPU itself: what it computes is what PTX says, and mistakes that a GPU may hide come to light."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from lmkit.kernels.cuda import module
from lmkit.kernels.cuda.module import Kernel
from tests import emulator
from tests.emulator import EmulatedBackend

Run = Callable[..., None]


@pytest.fixture(autouse=True)
def backend() -> Iterator[EmulatedBackend]:
    if shutil.which("g++") is None:
        pytest.skip("kernels are emulated with g++")
    yield emulator.install(seed=3)
    module.BACKENDS.pop("cpu", None)


@pytest.fixture
def run(tmp_path: Path) -> Run:
    """run("parameters", "body", [arguments], block=32): one kernel of that text."""

    def run(parameters: str, body: str, args: list[Any], *, grid: int = 1, block: int = 32, **defines: int) -> None:
        path = tmp_path / f"{len(list(tmp_path.iterdir()))}.cu"
        path.write_text(
            '#include "ptx.cuh"\n'
            f'extern "C" __global__ void __launch_bounds__(1024) mine({parameters}) {{\n'
            f"    const int t = threadIdx.x;\n{body}\n}}\nEXPORT(mine)\n"
        )
        Kernel(str(path), "mine", **defines)(grid, block, args, shared=4096)

    return run


# ---- mistakes


@pytest.mark.usefixtures("from_source")
def test_a_missing_barrier_gives_wrong_results(run: Run) -> None:
    body = """
    auto* s = reinterpret_cast<float*>(shared_memory);
    s[t] = x[t];
    %s
    y[t] = s[(t + 1) & 63];"""
    x, y = torch.randn(64), torch.zeros(64)
    run("const float* x, float* y", body % "__syncthreads();", [x, y], block=64)
    assert torch.equal(y, x.roll(-1))
    run("const float* x, float* y", body % "", [x, y], block=64)
    assert y.isnan().any()


COPY = """
    auto* s = reinterpret_cast<float*>(shared_memory);
    cp_async16(s + 4 * t, x + 4 * t);
    cp_async_commit();
    cp_async16(s + 128 + 4 * t, x + 128 + 4 * t, t < 16);
    cp_async_commit();
    %s
    for (int i = 0; i < 8; ++i) y[8 * t + i] = s[255 - 8 * t - i];
    cp_async_wait<0>();"""


def test_copies_land_when_they_are_waited_for(run: Run) -> None:
    x, y = torch.randn(256), torch.zeros(256)
    run("const float* x, float* y", COPY % "cp_async_wait<0>(); __syncthreads();", [x, y])
    assert torch.equal(y, torch.cat([x[:192], torch.zeros(64)]).flip(0))


@pytest.mark.usefixtures("from_source")
@pytest.mark.parametrize("wait", ["__syncthreads();", "cp_async_wait<1>(); __syncthreads();", "cp_async_wait<0>();"])
def test_a_missing_wait_or_barrier_behind_copies_gives_wrong_results(run: Run, wait: str) -> None:
    x, y = torch.randn(256), torch.zeros(256)
    run("const float* x, float* y", COPY % wait, [x, y])
    assert y.isnan().any()


def test_copies_that_nobody_waits_for_are_an_error(run: Run) -> None:
    body = "cp_async16(shared_memory + 16 * t, x + 4 * t); cp_async_commit();"
    with pytest.raises(RuntimeError, match="nobody waited for"):
        run("const float* x", body, [torch.zeros(128)])


def test_unaligned_copies_are_an_error(run: Run) -> None:
    with pytest.raises(RuntimeError, match="not aligned"):
        run("const float* x", "cp_async16(shared_memory, x + 1); cp_async_wait<0>();", [torch.zeros(128)])


@pytest.mark.usefixtures("from_source")
def test_shared_memory_starts_as_nan(run: Run) -> None:
    y = torch.zeros(32)
    run("float* y", "y[t] = reinterpret_cast<float*>(shared_memory)[t];", [y])
    assert y.isnan().all()
    halves = torch.zeros(32, dtype=torch.float16)
    run("u16* y", "y[t] = reinterpret_cast<u16*>(shared_memory)[t];", [halves])
    assert halves.isnan().all()


@pytest.mark.parametrize(
    ("body", "message"),
    [
        ("if (t < 32) __syncthreads();\nelse\n__syncthreads();", "__syncthreads of line"),
        ("if (t < 32) __syncthreads();\nelse if (t < 48) __syncwarp();", "wait for ever"),
        ("if (t >= 16) return;\n__shfl_xor_sync(0xffffffffu, t, 1);", "wait for ever"),
        ("if (t < 16) __shfl_xor_sync(0xffffu, t, 16);", "takes no part"),
        ("if (t & 1) __syncwarp();\nelse\n__syncwarp();", "meet at line"),
        ("__syncwarp(0xffffu);", "not in its own mask"),
    ],
)
def test_threads_that_do_not_meet_are_an_error(run: Run, body: str, message: str) -> None:
    with pytest.raises(RuntimeError, match=message):
        run("float* y", body, [torch.zeros(1)], block=64)


def test_an_error_does_not_outlive_its_launch(run: Run) -> None:
    with pytest.raises(RuntimeError, match="wait for ever"):
        run("float* y", "if (t) __syncwarp();", [torch.zeros(1)])
    y = torch.zeros(32)
    run("float* y", "__syncwarp(); y[t] = t;", [y])
    assert torch.equal(y, torch.arange(32.0))


def test_arguments_of_another_size_are_refused(run: Run) -> None:
    with pytest.raises(AssertionError, match="arguments of"):
        run("float* y, long long n", "y[t] = n;", [torch.zeros(32), 5])


def test_blocks_and_threads_take_every_order(run: Run) -> None:
    orders = set()
    for _ in range(4):
        count, y = torch.zeros(1, dtype=torch.int32), torch.zeros(128, dtype=torch.int32)
        run("int* count, int* y", "y[blockIdx.x * 32 + t] = atomicAdd(count, 1);", [count, y], grid=4)
        assert torch.equal(y.sort().values, torch.arange(128, dtype=torch.int32))
        orders.add(tuple(y.tolist()))
    assert len(orders) == 4


# ---- kernels that overlap

COPIES = "const float* x, float* y", "launch_next(); %s y[t] = x[t]; %s"


@pytest.fixture
def overlapping() -> EmulatedBackend:
    return emulator.install(seed=4, overlap=True)


def test_a_kernel_that_waits_reads_what_the_one_before_wrote(run: Run, overlapping: EmulatedBackend) -> None:
    x, y, z = torch.randn(32), torch.zeros(32), torch.zeros(32)
    parameters, body = COPIES
    run(parameters, body % ("wait_for_previous();", ""), [x, y])
    run(parameters, body % ("wait_for_previous();", ""), [y, z])
    run(
        "const float* w, const float* x, float* y",
        "const float a = w[t]; wait_for_previous(); y[t] = a * x[t];",
        [x, z, y],
    )
    assert torch.equal(y, x * x)


@pytest.mark.parametrize(
    ("before", "message"),
    [
        ("const float a = x[t]; wait_for_previous(); y[t] = a;", "reads what an earlier kernel writes"),
        ("const double a = *(const double*)(x + 2 * (t / 2)); wait_for_previous(); y[t] = a;", "reads what an earlier"),
        ("cp_async16(shared_memory + 16 * t, x + 4 * (t % 8)); wait_for_previous(); cp_async_wait<0>();", "reads what"),
        ("const u16 a = ((const u16*)x)[t]; wait_for_previous(); y[t] = a;", "reads what an earlier kernel writes"),
        ("if (t) wait_for_previous(); y[t] = 1;", "writes before it has waited"),
        ("y[t] = 1; wait_for_previous();", "writes before it has waited"),
        ("atomicAdd(y, 1.0f); wait_for_previous();", "before it has waited|reads what"),
        ("if (t < 31) wait_for_previous();", "thread 31 .* did not wait"),
        ("if (blockIdx.x == 1) return; wait_for_previous();", r"block \(1, 0, 0\) ended"),
    ],
)
def test_a_missing_wait_is_an_error(run: Run, overlapping: EmulatedBackend, before: str, message: str) -> None:
    x, y, z = torch.randn(32), torch.zeros(32), torch.zeros(32)
    parameters, body = COPIES
    run(parameters, body % ("wait_for_previous();", ""), [x, y])
    with pytest.raises(RuntimeError, match=message):
        run(parameters, before, [y, z], grid=2)


def test_what_was_written_before_a_barrier_may_be_read(run: Run, overlapping: EmulatedBackend) -> None:
    x, y, z = torch.randn(32), torch.zeros(32), torch.zeros(32)
    parameters, body = COPIES
    run(parameters, body % ("wait_for_previous();", ""), [x, y])
    overlapping.barrier()
    run(parameters, "const float a = y ? x[t] : 0; wait_for_previous(); y[t] = a;", [y, z])
    assert torch.equal(z, x)


def test_memory_of_a_tensor_that_is_gone_may_be_read_as_another(run: Run, overlapping: EmulatedBackend) -> None:
    x, z, memory = torch.randn(32), torch.zeros(32), np.zeros(32, np.float32)
    parameters, body = COPIES
    early = "const float a = y ? x[t] : 0; wait_for_previous(); y[t] = a;"
    y = torch.from_numpy(memory)
    run(parameters, body % ("wait_for_previous();", ""), [x, y[:16]], block=16)
    part = y[8:]
    del y
    with pytest.raises(RuntimeError, match="reads what an earlier kernel writes"):
        run(parameters, early, [part, z], block=16)
    del part
    run(parameters, early, [torch.from_numpy(memory), z])
    assert torch.equal(z[:16], x[:16])


def test_shared_memory_and_shuffles_need_no_wait(run: Run, overlapping: EmulatedBackend) -> None:
    x, y = torch.randn(64), torch.zeros(64)
    body = """
    auto* s = reinterpret_cast<float*>(shared_memory);
    s[t] = warp_sum(x[t]);
    __syncthreads();
    const float a = s[0] + s[32];
    wait_for_previous();
    y[t] = a;"""
    run("const float* x, float* y", body, [x, y], block=64)
    torch.testing.assert_close(y, x.sum().expand(64))


# ---- warps

SHUFFLES: dict[str, Callable[[Tensor], Tensor]] = {
    "__shfl_sync(~0u, x[t], 5)": lambda x: x[5].expand(32),
    "__shfl_sync(~0u, x[t], t + 3, 8)": lambda x: x.view(4, 8).roll(-3, 1).flatten(),
    "__shfl_xor_sync(~0u, x[t], 9)": lambda x: x[torch.arange(32) ^ 9],
    "__shfl_up_sync(~0u, x[t], 3)": lambda x: torch.cat([x[:3], x[:-3]]),
    "__shfl_down_sync(~0u, x[t], 3, 16)": lambda x: torch.cat(
        [x[3:16], x[13:16], x[19:32], x[29:32]]  # what would come from the next 16 stays as it is
    ),
    "warp_max(x[t])": lambda x: x.max().expand(32),
    "__ballot_sync(~0u, x[t] > 0) >> t & 1": lambda x: (x > 0).float(),
    "__reduce_max_sync(~0u, static_cast<int>(1000 * x[t]))": lambda x: (1000 * x).int().max().float().expand(32),
}


@pytest.mark.parametrize("expression", SHUFFLES)
def test_warp_functions(run: Run, expression: str) -> None:
    x, y = torch.randn(32), torch.zeros(32)
    run("const float* x, float* y", f"y[t] = {expression};", [x, y])
    assert torch.equal(y, SHUFFLES[expression](x))


@pytest.mark.parametrize("trans", [False, True])
@pytest.mark.parametrize("matrices", [2, 4])
def test_ldmatrix(run: Run, matrices: int, trans: bool) -> None:
    body = f"""
    for (int i = 0; i < {2 * matrices}; ++i) reinterpret_cast<u16*>(shared_memory)[i * 32 + t] = x[i * 32 + t];
    __syncthreads();
    u32 r[{matrices}];
    ldmatrix_x{matrices}{"_trans" if trans else ""}(r, shared_memory + 16 * (t % {8 * matrices}));
    for (int i = 0; i < {matrices}; ++i) y[i * 32 + t] = r[i];"""
    x = torch.randint(0, 1 << 15, (matrices, 8, 8), dtype=torch.int16)
    y = torch.zeros(matrices, 8, 8, dtype=torch.int16)  # lane 4 g + t has (g, 2t) and (g, 2t + 1)
    run("const u16* x, u32* y", body, [x, y])
    assert torch.equal(y, x.mT if trans else x)


def test_movmatrix(run: Run) -> None:
    x, y = torch.randint(0, 1 << 15, (8, 8), dtype=torch.int16), torch.zeros(8, 8, dtype=torch.int16)
    run("const u32* x, u32* y", "y[t] = movmatrix_trans(x[t]);", [x, y])
    assert torch.equal(y, x.T)


FRAGMENTS = """
    const int g = t / 4, q = t & 3;
    u32 a[4], b[2];
    for (int i = 0; i < 4; ++i) a[i] = A[(g + 8 * (i & 1)) * 8 + q + 4 * (i >> 1)];
    for (int i = 0; i < 2; ++i) b[i] = B[g * 8 + q + 4 * i];
    %s c[4];
    for (int i = 0; i < 4; ++i) c[i] = C[(g + 8 * (i >> 1)) * 8 + 2 * q + (i & 1)];
    %s
    for (int i = 0; i < 4; ++i) C[(g + 8 * (i >> 1)) * 8 + 2 * q + (i & 1)] = c[i];"""  # rows of 8 u32: A 16, B^T 8


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_mma(run: Run, dtype: torch.dtype) -> None:
    a, b, c = torch.randn(16, 16).to(dtype), torch.randn(8, 16).to(dtype), torch.randn(16, 8)
    expected = c + a.float() @ b.float().T
    body = FRAGMENTS % ("float", "Half::mma(c, a, b[0], b[1]);")
    run("const u32* A, const u32* B, float* C", body, [a, b, c], **({"LM_BF16": 1} if dtype == torch.bfloat16 else {}))
    torch.testing.assert_close(c, expected, rtol=1e-5, atol=1e-5)


def test_mma_s8(run: Run) -> None:
    a, b = (torch.randint(-128, 128, (rows, 32), dtype=torch.int8) for rows in (16, 8))
    c = torch.randint(-1000, 1000, (16, 8), dtype=torch.int32)
    expected = c + a.int() @ b.int().T
    run("const u32* A, const u32* B, int* C", FRAGMENTS % ("int", "mma_s8(c, a, b[0], b[1]);"), [a, b, c])
    assert torch.equal(c, expected)


def test_mma_e4m3(run: Run, request: pytest.FixtureRequest) -> None:
    if request.config.getoption("--ptx") == "sm_80":
        pytest.skip("sm_80 multiplies no float8 numbers")
    a, b = (torch.randn(rows, 32).to(torch.float8_e4m3fn) for rows in (16, 8))
    a[0, :4], c = torch.tensor([448.0, -448.0, 2**-9, -(2**-7)]).to(a.dtype), torch.randn(16, 8)
    expected = c + a.float() @ b.float().T
    run("const u32* A, const u32* B, float* C", FRAGMENTS % ("float", "mma_e4m3(c, a, b[0], b[1]);"), [a, b, c])
    torch.testing.assert_close(c, expected, rtol=1e-5, atol=1e-5)


# ---- numbers


def _floats() -> Tensor:
    exact = torch.tensor(
        [0.0, -0.0, 1.0, 0.5 + 2**-12, 65504, 1e-7, 3e-8, 448, 0.0009765625, 2**-9, 2**-10, 1.5 * 2**-9]
    )
    return torch.cat([exact, torch.randn(200) * 2 ** torch.randint(-12, 8, (200,)).float(), torch.zeros(12)])


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_types(run: Run, dtype: torch.dtype) -> None:
    x = _floats().view(-1, 2)
    y, z = torch.zeros(len(x), 2, dtype=dtype), torch.zeros(len(x), 2, dtype=dtype)
    body = (
        "for (int i = t; i < n; i += 32) { y[i] = Half::pack(x[2*i], x[2*i+1]); z[i] = Half::fma(y[i], y[i], y[i]); }"
    )
    defines = {"LM_BF16": 1} if dtype == torch.bfloat16 else {}
    run("const float* x, u32* y, u32* z, int n", body, [x, y, z, len(x)], **defines)
    assert torch.equal(y, x.to(dtype))
    assert torch.equal(z, (y.double() * y.double() + y.double()).to(dtype))


def test_float8(run: Run) -> None:
    codes = torch.arange(256, dtype=torch.uint8).view(-1, 2)
    codes = codes[(codes & 127 != 127).all(1)]  # without NaN
    halves = torch.zeros(codes.shape, dtype=torch.float16)
    body = "for (int i = t; i < n; i += 32) y[i] = e4m3_to_f16(x[i]);"
    run("const u16* x, u32* y, int n", body, [codes.contiguous(), halves, len(codes)])
    assert torch.equal(halves.float(), codes.contiguous().view(torch.float8_e4m3fn).float())

    x = torch.cat([_floats(), halves.float().flatten(), torch.tensor([447.0, 464, 1e9, -1e9])])
    back = torch.zeros(len(x), dtype=torch.uint8)
    run(
        "const float* x, u8* y, int n", "for (int i = t; i < n; i += 32) y[i] = float_to_e4m3(x[i]);", [x, back, len(x)]
    )
    assert torch.equal(back.view(torch.float8_e4m3fn).float(), x.clamp(-448, 448).to(torch.float8_e4m3fn).float())


def test_bits(run: Run) -> None:
    x, y = torch.randint(-(2**31), 2**31 - 1, (32, 3), dtype=torch.int64).int(), torch.zeros(32, 4, dtype=torch.int32)
    body = """
    const u32 a = x[3 * t], b = x[3 * t + 1], c = x[3 * t + 2];
    y[4 * t] = lop3<0x96>(a, b, c), y[4 * t + 1] = and_or(a, b, c);
    y[4 * t + 2] = prmt(a, b, 0x5140), y[4 * t + 3] = prmt(a, b, 0xf92a);"""
    run("const u32* x, u32* y", body, [x, y])
    a, b, c = x.T
    assert torch.equal(y[:, 0], a ^ b ^ c)
    assert torch.equal(y[:, 1], (a & b) | c)
    both = x[:, :2].contiguous().view(torch.uint8)  # bytes 0-3 of a, 4-7 of b
    assert torch.equal(y[:, 2].contiguous().view(torch.uint8).view(32, 4), both[:, [0, 4, 1, 5]])
    signs = (both[:, [2, 7]] >= 128).to(torch.uint8) * 255  # the nibbles a, 2 | 8: byte 2's sign; f: byte 7's
    expected = torch.stack([signs[:, 0], both[:, 2], (both[:, 1] >= 128).to(torch.uint8) * 255, signs[:, 1]], 1)
    assert torch.equal(y[:, 3].contiguous().view(torch.uint8).view(32, 4), expected)
