"""Products by wgmma, against float64 products of the dequantized weight and the activations as they are."""

from __future__ import annotations

import shutil

import pytest
import torch

from lmkit.kernels.cuda import gemm, gemm_table, gemm_wide, module
from lmkit.kernels.cuda.gemm_pack import PackedWeight
from lmkit.kernels.cuda.gemm_plan import Plan, Problem
from lmkit.kernels.cuda.gemm_wide import WidePlan
from lmkit.kernels.cuda.gpus import GPUS
from lmkit.kernels.cuda.switches import Switches
from tests import emulator
from tests.kernels.cuda.test_linear import BF16, F16, F32, SCHEMES, assert_near, expected, pack, weight
from tests.kernels.cuda.test_overlap import normed

LIMIT = GPUS[gemm_wide.CAPABILITY].block_shared


@pytest.fixture
def device(device: str) -> str:
    """Emulated, or a GPU that has wgmma."""
    if device == "cuda" and torch.cuda.get_device_capability() != gemm_wide.CAPABILITY:
        pytest.skip("the GPU has no wgmma")
    return device


@pytest.mark.parametrize(
    ("scheme", "tokens", "inputs", "plan"),
    [
        ("int4", 50, 640, WidePlan(48, 1, 1, 3, 1)),  # two blocks of tokens, the shortest ring
        ("int4-256", 96, 520, WidePlan(96, 2, 1, 4, 2)),
        ("int4-row", 61, 392, WidePlan(64, 1, 2, 4, 1)),
        ("int4-64", 128, 264, WidePlan(128, 1, 1, 5, 3)),
        ("int4-32", 130, 136, WidePlan(128, 2, 2, 3, 1)),
        ("int8", 64, 640, WidePlan(64, 2, 2, 4, 5)),  # one stage a range
        ("mxfp4", 70, 264, WidePlan(96, 1, 2, 3, 2)),
        ("fp8-row", 48, 256, WidePlan(48, 2, 1, 8, 1)),  # rings longer than the inputs
    ],
)
def test_formats_and_plans(scheme: str, tokens: int, inputs: int, plan: WidePlan, device: str) -> None:
    q, bias = weight(168, inputs, SCHEMES[scheme]), torch.randn(168, device=device)
    for dtype in (F16, BF16) if scheme in ("int4-32", "int8", "fp8-row", "mxfp4") else (F16,):
        x = torch.randn(tokens, inputs, device=device).to(dtype)
        y = gemm.multiply(x, pack(q, device), plan, bias, F32)
        assert_near(y, expected(x, q, bias))


@pytest.mark.parametrize("ranges", [1, 2])
@pytest.mark.parametrize("activation", [None, "silu", "clamped_swish"])
def test_epilogues(ranges: int, activation: str | None, device: str) -> None:
    q, bias = weight(152, 384), torch.randn(152, device=device)
    x, plan = torch.randn(70, 384, device=device).half(), WidePlan(96, 1, 2, 4, ranges)
    packed, oracle = pack(q, device, activation), expected(x, q, bias, activation)
    y = gemm.multiply(x, packed, plan, bias)
    assert y.dtype == F16
    assert_near(y, oracle)
    stream = torch.randn(*oracle.shape, device=device)
    before = stream.cpu().double()
    assert gemm.multiply(x, packed, plan, bias, residual=stream) is stream
    assert_near(stream, before + oracle)
    assert_near(gemm.multiply(x, packed, plan, dtype=F32), expected(x, q, None, activation))


@pytest.mark.parametrize("plan", [WidePlan(48, 1, 1, 3, 2), WidePlan(64, 2, 2, 5, 1)])
def test_weights_are_read_before_the_kernel_waits(plan: WidePlan) -> None:
    if shutil.which("g++") is None:
        pytest.skip("kernels are emulated with g++")
    emulator.install(seed=5, overlap=True)
    q = weight(72, 640)
    packed = pack(q, "cpu")  # once: later it could lie where the sums of the first product were
    x, stream = normed(50, 640), torch.zeros(50, 72)
    for _ in range(2):
        gemm.multiply(x, packed, plan, residual=stream)
    assert_near(stream, 2 * expected(x, q))
    module.BACKENDS.pop("cpu")


def test_every_large_problem_has_plans_that_run() -> None:
    for tiles, stages in [(384, 32), (1792, 32), (256, 112), (1, 1), (8, 7)]:
        for tokens in (48, 57, 96, 128, 129, 256):
            problem = Problem(tokens, tiles, stages, 1072, 1)
            for plan in gemm_wide.best(problem, 132, LIMIT, 3):
                token_blocks, ranges, row_blocks = plan.grid(problem)
                assert gemm_wide.problem_with(plan, problem, LIMIT) is None
                assert token_blocks * plan.n_tokens >= tokens
                assert (ranges - 1) * plan.range_stages(problem) < stages <= ranges * plan.range_stages(problem)
                assert (row_blocks - 1) * plan.tiles < tiles <= row_blocks * plan.tiles


def test_impossible_plans_are_found() -> None:
    problem = Problem(64, 16, 4, 1072, 1)
    for plan in (
        WidePlan(40, 1, 1, 4, 1), WidePlan(64, 3, 1, 4, 1), WidePlan(64, 1, 1, 2, 1), WidePlan(64, 1, 1, 4, 5),
        WidePlan(64, 1, 1, 400, 1),
    ):  # fmt: skip
        assert gemm_wide.problem_with(plan, problem, LIMIT) is not None, plan


def test_chosen_for_many_tokens_where_it_can_run(monkeypatch: pytest.MonkeyPatch) -> None:
    if shutil.which("g++") is None:
        pytest.skip("kernels are emulated with g++")
    packed, odd = pack(weight(4096, 512), "cpu"), pack(weight(4094, 512), "cpu")

    def chosen(tokens: int, of: PackedWeight = packed) -> type:
        return type(gemm_table.choose(tokens, of, F16))

    emulator.install()
    assert [chosen(tokens) for tokens in (47, 256, 257)] == [Plan, WidePlan, type(None)]
    assert chosen(255, odd) == Plan
    monkeypatch.setattr(gemm_wide, "switches", lambda: Switches(wgmma=False))
    assert [chosen(tokens) for tokens in (255, 256)] == [Plan, type(None)]
    monkeypatch.undo()
    emulator.install(capability=(8, 0))
    assert [chosen(tokens) for tokens in (255, 256)] == [Plan, type(None)]
    module.BACKENDS.pop("cpu")
