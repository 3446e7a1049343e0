"""Products of 4-bit weights with inputs rounded to int8, against the reference of ops.linear_w4a8 in float32."""

from __future__ import annotations

import shutil

import pytest
import torch
from torch import Tensor

from lmkit.kernels import ops
from lmkit.kernels.cuda import gemm, gemm_table, module
from lmkit.kernels.cuda.gemm_pack import PackedWeight
from lmkit.kernels.cuda.gemm_plan import Plan
from lmkit.kernels.ops import Norm
from lmkit.qtensor import QTensor
from tests import emulator
from tests.kernels.cuda import test_linear
from tests.kernels.cuda.test_linear import BF16, F16, F32, SCHEMES, SMALL, WIDE, assert_near, run, weight
from tests.kernels.cuda.test_overlap import normed

poisoned, no_table = test_linear.poisoned, test_linear.no_table


def packed(q: QTensor, device: str, activation: str | None = None) -> PackedWeight:
    moved = QTensor(q.codes.to(device), q.scales.to(device), q.zeros.to(device), q.scheme)
    result: PackedWeight = ops.linear_w4a8.named("cuda").pack(moved, activation)
    return result


def expected(x: Tensor, q: QTensor, bias: Tensor | None = None, activation: str | None = None) -> Tensor:
    reference = ops.linear_w4a8.named("reference")
    y: Tensor = reference(x.cpu().float(), reference.pack(q, activation), None if bias is None else bias.cpu())
    return y.double()


def inputs(tokens: int, columns: int, device: str, dtype: torch.dtype = F16) -> Tensor:
    """Groups of different sizes, and one of zeros."""
    x = torch.randn(tokens, columns) * torch.logspace(-1, 1, columns)
    x[0, :128] = 0
    return x.to(device, dtype)


@pytest.mark.parametrize("scheme", [name for name in SCHEMES if name.startswith("int4")])
@pytest.mark.parametrize(("tokens", "plan"), [(11, WIDE), (3, SMALL)])
def test_formats(scheme: str, tokens: int, plan: Plan, device: str) -> None:
    q, bias = weight(72, 520, SCHEMES[scheme]), torch.randn(72, device=device)
    for dtype in (F16, BF16) if scheme == "int4-32" else (F16,):
        x = inputs(tokens, 520, device, dtype)
        assert_near(gemm.multiply(x, packed(q, device), plan, bias, F32), expected(x, q, bias))


@pytest.mark.parametrize(
    ("tokens", "plan"), [(41, Plan(6, 1, 2, 2, 3, 3, False)), (67, Plan(8, 2, 4, 1, 3, 2)), (9, SMALL)]
)
def test_numbers_of_tokens(tokens: int, plan: Plan, device: str) -> None:
    q, x = weight(152, 640), inputs(tokens, 640, device)
    assert_near(gemm.multiply(x, packed(q, device), plan, dtype=F32), expected(x, q))


@pytest.mark.parametrize("plan", [SMALL, WIDE])
def test_epilogues(plan: Plan, device: str) -> None:
    q, bias, x = weight(88, 1000), torch.randn(88, device=device), inputs(7, 1000, device)
    gated, oracle = packed(q, device, "silu"), expected(x, q, bias, "silu")
    assert_near(gemm.multiply(x, gated, plan, bias), oracle)
    stream = torch.randn(7, 44, device=device)
    before = stream.cpu().double()
    assert gemm.multiply(x, gated, plan, bias, residual=stream) is stream
    assert_near(stream, before + oracle)


def test_codes_are_the_most_extreme(device: str) -> None:
    """All codes minus zeros are 15 or -15, and all inputs are the greatest of their group."""
    q, x = weight(32, 256), torch.full((2, 256), 3.0, device=device).half()
    for code, zero in ((15, 0), (0, 15)):
        q.codes[:], q.zeros[:] = code, zero
        assert_near(gemm.multiply(x, packed(q, device), SMALL, dtype=F32), expected(x, q))


def test_op(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """After a norm, with float32 inputs, and with so many tokens that the library multiplies the rounded inputs."""
    q, x = weight(48, 256), inputs(5, 256, device)
    weights = packed(q, device)
    assert_near(run(ops.linear_w4a8, x, weights, None, dtype=F32), expected(x, q))
    norm = Norm(torch.rand(256, device=device), 1e-5, dtype=F16)
    stream = 3 * torch.randn(5, 256, device=device)
    of_norm = ops.rms_norm.named("cuda")(stream, norm)
    assert_near(run(ops.linear_w4a8, stream, weights, None, norm), expected(of_norm, q))
    exact = x.float()
    assert_near(run(ops.linear_w4a8, exact, weights, None), expected(exact, q))
    monkeypatch.setattr(gemm_table, "LIBRARY_FROM", 4)
    y, oracle = run(ops.linear_w4a8, x, weights, None, dtype=F32), expected(x, q)
    assert float((y.cpu().double() - oracle).abs().max()) < 3e-3 * oracle.abs().max(), "the weight is rounded, too"


def test_eight_bits_in_groups(device: str) -> None:
    """The values of x's codes are multiplied, each rounded to x's type."""
    q, x = weight(48, 520, SCHEMES["int8"]), inputs(5, 520, device)
    op = ops.linear_w8a8.select("cuda", bits=8, group_size=128, in_features=520, out_features=48)
    reference = ops.linear_w8a8.named("reference")
    oracle = reference(x.cpu().float(), reference.pack(q), None).double()
    y = op(x, op.pack(QTensor(q.codes.to(device), q.scales.to(device), q.zeros.to(device), q.scheme)), None, dtype=F32)
    assert op.name == "cuda.groups"
    assert float((y.cpu().double() - oracle).abs().max()) < 1e-3 * oracle.abs().max()
    exact = test_linear.expected(x, q)
    assert float((exact - oracle).abs().max()) > 2e-3 * oracle.abs().max(), "rounding shows"


def test_weights_are_read_before_the_kernel_waits() -> None:
    if shutil.which("g++") is None:
        pytest.skip("kernels are emulated with g++")
    emulator.install(seed=5, overlap=True)
    q, x = weight(72, 640), normed(9, 640)
    y = gemm.multiply(x, packed(q, "cpu"), Plan(2, 1, 2, 2, 4, 2), dtype=F32)
    assert_near(y, expected(x, q))
    module.BACKENDS.pop("cpu")


def test_measured_plans_are_its_own(device: str) -> None:
    """A time with exact inputs says nothing about rounded ones."""
    q = weight(32, 256)
    rounding, exact = packed(q, device), test_linear.pack(q, device)
    plan = gemm_table.choose(4, rounding, F16)
    table = gemm_table.table(device)
    table.add(gemm_table.Entry(gemm_table.Key.of(exact, F16), 4, None, 1.0))
    assert gemm_table.choose(4, exact, F16) is None
    assert gemm_table.choose(4, rounding, F16) == plan
    table.add(gemm_table.Entry(gemm_table.Key.of(rounding, F16), 4, SMALL, 1.0))
    assert gemm_table.choose(4, rounding, F16) == SMALL
