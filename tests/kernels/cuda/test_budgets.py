"""What kernels may move and execute, counted on their PTX: a change that doubles the sectors of a load fails."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import pytest
import torch

from lmkit.kernels.cuda import elementwise, gemm, gemm_plan, gemm_wide, module
from lmkit.kernels.cuda.gpus import GPUS
from lmkit.kernels.ops import Norm
from lmkit.kv_dtype import INT8, KVDtype
from tests.emulator.ptx.backend import PtxBackend
from tests.emulator.ptx.traffic import KINDS, Traffic, joined
from tests.kernels.cuda import toolchain
from tests.kernels.cuda.test_decode_attention import case, decode
from tests.kernels.cuda.test_linear import pack, weight

pytestmark = pytest.mark.skipif(
    toolchain.missing_nvrtc() is not None or shutil.which("g++") is None, reason="NVRTC and g++ are needed"
)
H200 = GPUS[9, 0]
SMS = 132


@dataclass(frozen=True)
class Budget:
    """Times the least sectors of loads and of stores, times the least turns of shared memory's loads and stores, and
    thousands of instructions of all threads: what was counted, with a tenth more."""

    loads: float
    stores: float
    shared_loads: float
    shared_stores: float
    instructions: int


def product(tokens: int) -> Callable[[], object]:
    """512 outputs of 4096 inputs, by the plan of Llama-3-8B's gate and up."""

    def run() -> None:
        packed = pack(weight(512, 4096), "cpu")
        problem = gemm_plan.Problem(tokens, 1792, 32, 1072)
        plan = gemm_plan.best(problem, SMS, H200.block_shared, 1, 2 if tokens <= 16 else 1)[0]
        gemm.multiply(torch.randn(tokens, 4096).half(), packed, plan)

    return run


def wide_product() -> None:
    packed = pack(weight(512, 1024), "cpu")
    plan = gemm_wide.best(gemm_plan.Problem(128, 1792, 32, 1072), SMS, H200.block_shared)[0]
    gemm.multiply(torch.randn(128, 1024).half(), packed, plan)


def decoding(stored: KVDtype) -> Callable[[], object]:
    return lambda: decode(case((stored, stored), (32, 8), 128, 64, torch.float16, (512, 512)), 0, 0, "cpu")


def norm() -> None:
    elementwise.rms_norm(torch.randn(4, 4096).half(), Norm(torch.randn(4096), 1e-5))


CASES: dict[str, Callable[[], object]] = {
    "norm of 4 rows": norm,
    "product of 1 token": product(1),
    "product of 16 tokens": product(16),
    "product of 64 tokens": product(64),
    "product of 128 tokens": wide_product,
    "decoding, INT8": decoding(INT8),
}
QUICK = "norm of 4 rows", "product of 1 token"
BUDGETS: dict[tuple[str, str], Budget] = {
    ("norm of 4 rows", "norm_rows"): Budget(1.83, 1.1, 1.1, 1.1, 488),
    ("product of 1 token", "gemm"): Budget(1.1, 1.1, 1.1, 1.1, 6506),
    ("product of 16 tokens", "gemm"): Budget(1.1, 1.1, 1.1, 1.1, 6968),
    ("product of 64 tokens", "gemm"): Budget(1.1, 1.1, 1.1, 1.1, 13706),
    ("product of 128 tokens", "arrange"): Budget(8.8, 1.1, 1.1, 1.1, 1370),
    ("product of 128 tokens", "gemm_wide"): Budget(1.1, 1.1, 1.1, 1.1, 3494),
    ("decoding, INT8", "decode_attention"): Budget(1.1, 1.1, 1.25, 1.52, 10729),
}


@pytest.fixture
def backend() -> Iterator[PtxBackend]:
    backend = PtxBackend("90a", capability=(9, 0), overlap=False)
    backend.begin(7)
    module.BACKENDS["cpu"] = backend
    yield backend
    module.BACKENDS.pop("cpu")
    module.counters.cache_clear()


@pytest.mark.slow
@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=() if name in QUICK else pytest.mark.exhaustive) for name in CASES]
)
def test_kernels_stay_within_their_budgets(backend: PtxBackend, name: str) -> None:
    torch.manual_seed(0)
    with backend.counted() as launches:
        CASES[name]()
    found = joined(launches)
    assert {kernel for case, kernel in BUDGETS if case == name} == set(found)
    beyond = [line for kernel, traffic in found.items() for line in compared(traffic, BUDGETS[name, kernel])]
    assert not beyond, "\n".join(beyond)


def compared(traffic: Traffic, budget: Budget) -> list[str]:
    """What is beyond the budget, in words, with the lines of PTX that waste most."""
    found = []
    for kind in KINDS:
        waste, limit = traffic.of(kind).waste, getattr(budget, kind)
        if waste > limit:
            worst = max((key for key in traffic.lines if key[1] == kind), key=lambda key: traffic.lines[key].waste)
            found.append(
                f"{traffic.name}: {kind} take {waste:.2f} times the least, of {limit}; most at line {worst[0]}"
            )
    if traffic.instructions > 1000 * budget.instructions:
        found.append(f"{traffic.name}: {traffic.instructions} instructions, of {budget.instructions} thousand")
    return found


def test_waste_is_counted(backend: PtxBackend) -> None:
    """Of columns of a matrix, where each of 32 lanes takes 4 bytes of another row, and of one bank of shared memory."""
    text = """
.visible .entry mine(.param .u64 x, .param .u64 y)
{
.reg .b32 %r<4>;
.reg .b64 %rd<6>;
ld.param.u64 %rd1, [x];
ld.param.u64 %rd2, [y];
mov.u32 %r1, %tid.x;
mul.wide.u32 %rd3, %r1, 128;
add.s64 %rd4, %rd1, %rd3;
ld.global.u32 %r2, [%rd4];
shl.b32 %r3, %r1, 7;
st.shared.u32 [%r3+1024], %r2;
mul.wide.u32 %rd3, %r1, 4;
add.s64 %rd5, %rd2, %rd3;
st.global.u32 [%rd5], %r2;
ret;
}
"""
    with backend.counted() as launches:
        backend.run_ptx(text, "mine", 1, 32, [torch.zeros(32, 32), torch.zeros(32)], shared=4096)
    (traffic,) = launches
    assert [traffic.of(kind).waste for kind in KINDS] == [8, 1, 1, 32]
    assert traffic.of("loads").num_bytes == 128
    assert traffic.of("shared_stores").requests == 1
    assert traffic.instructions == 32 * 12
    assert compared(traffic, Budget(8, 1, 1, 32, 1)) == []
    over = compared(traffic, Budget(7.9, 1, 1, 16, 0))
    assert [line.split(": ")[1].split(" ")[0] for line in over] == ["loads", "shared_stores", "384"]
    assert "8.00 times the least, of 7.9; most at line 11" in over[0]
