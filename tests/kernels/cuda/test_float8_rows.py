"""Products of float8 weights with inputs rounded to float8, against the reference of ops.linear_fp8_a8 in float32."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from lmkit.kernels import ops
from lmkit.kernels.cuda import coded_rows, gemm, gemm_table, module
from lmkit.kernels.cuda.gemm_pack import PackedWeight
from lmkit.kernels.cuda.gemm_plan import Plan
from lmkit.kernels.cuda.switches import without
from lmkit.kernels.reference.linear import round_to_e4m3
from lmkit.qtensor import QTensor, float8_scheme
from tests import emulator
from tests.kernels.cuda import test_linear
from tests.kernels.cuda.test_int8_rows import inputs
from tests.kernels.cuda.test_linear import BF16, F16, F32, SMALL, WIDE, assert_near, weight
from tests.kernels.cuda.test_overlap import normed

poisoned, no_table = test_linear.poisoned, test_linear.no_table
SCHEMES = {"block": float8_scheme(128, 128), "block-64": float8_scheme(64, 32), "long": float8_scheme(256, 1)}


def packed(q: QTensor, device: str, activation: str | None = None) -> PackedWeight:
    outputs, columns = q.codes.shape
    traits = {"bits": 8, "group_size": q.scheme.group_size, "in_features": columns, "out_features": outputs}
    op = ops.linear_fp8_a8.select("cuda", **traits)
    assert op.name == "cuda.groups"
    result: PackedWeight = op.pack(q.to(device), activation)
    return result


def expected(x: Tensor, q: QTensor, bias: Tensor | None = None, activation: str | None = None) -> Tensor:
    reference = ops.linear_fp8_a8.named("reference")
    y: Tensor = reference(x.cpu().float(), reference.pack(q, activation), None if bias is None else bias.cpu())
    return y.double()


def run(x: Tensor, packed: PackedWeight, *args: Tensor | None, **options: Any) -> Tensor:
    y: Tensor = ops.linear_fp8_a8.named("cuda.groups")(x, packed, *args, **options)
    return y


@pytest.mark.parametrize("scheme", SCHEMES)
@pytest.mark.parametrize(("tokens", "plan"), [(11, WIDE), (3, SMALL)])
def test_formats(scheme: str, tokens: int, plan: Plan, device: str) -> None:
    q, bias = weight(72, 520, SCHEMES[scheme]), torch.randn(72, device=device)
    for dtype in (F16, BF16) if scheme == "block" else (F16,):
        x = inputs(tokens, 520, device, dtype)
        assert packed(q, device).float8_x
        assert_near(gemm.multiply(x, packed(q, device), plan, bias, F32), expected(x, q, bias))


@pytest.mark.parametrize(("tokens", "plan"), [(41, Plan(6, 1, 2, 2, 3, 3, False)), (67, Plan(8, 2, 4, 1, 3, 2))])
def test_numbers_of_tokens(tokens: int, plan: Plan, device: str) -> None:
    q, x = weight(152, 640, SCHEMES["block"]), inputs(tokens, 640, device)
    assert_near(gemm.multiply(x, packed(q, device), plan, dtype=F32), expected(x, q))


def test_inputs_are_rounded_as_deepseeks(device: str) -> None:
    """A code is the e4m3 number nearest to x / scale, halves to even, and the scale puts the greatest input at 448."""
    q = weight(16, 256, SCHEMES["block"])
    x = torch.randn(3, 256) * torch.logspace(-4, 1, 256)
    x[0, :4], x[1, 128:] = torch.tensor([448.0, 17.0, 19.0, 2**-10]), 0  # halves between two codes; a group of zeros
    parts = [round_to_e4m3(part) for part in x.split(128, 1)]
    got = coded_rows.rounded(x.to(device), packed(q, device)).cpu()
    assert torch.equal(got, torch.cat([codes * scale for codes, scale in parts], 1))
    codes, scales = coded_rows.coded_rows(x.to(device), packed(q, device))
    assert torch.equal(scales[:, :3].cpu(), torch.cat([scale for _, scale in parts], 1).T)
    mine = codes.cpu().view(3, -1, 4, 2, 8).transpose(2, 3).reshape(3, 256)  # as round_groups.cu says
    assert torch.equal(mine.view(torch.float8_e4m3fn).float(), torch.cat([codes for codes, _ in parts], 1))


def test_without_the_switch_or_the_instruction_values_are_multiplied(
    device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    q, x = weight(48, 256, SCHEMES["block"]), inputs(5, 256, device)
    weights, oracle = packed(q, device), expected(x, q)
    assert_near(run(x, weights, None, dtype=F32), oracle)

    def is_near() -> bool:
        y = run(x, weights, None, dtype=F32)
        return float((y.cpu().double() - oracle).abs().max()) < 1e-3 * oracle.abs().max()

    with without("float8"):
        assert not weights.float8_x
        assert is_near()
    monkeypatch.setattr(module.backend(device), "capability", lambda: (8, 0))
    assert not weights.float8_x
    assert is_near()


def test_op(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """With a residual, with float32 inputs, and with so many tokens that the library multiplies the rounded inputs."""
    q, x = weight(48, 256, SCHEMES["block"]), inputs(5, 256, device)
    weights, stream = packed(q, device, "silu"), torch.randn(5, 24, device=device)
    before = stream.cpu().double()
    assert_near(run(x, weights, None, residual=stream), before + expected(x, q, None, "silu"))
    assert_near(run(x.float(), packed(q, device), None), expected(x.float(), q))
    monkeypatch.setattr(gemm_table, "LIBRARY_FROM", 4)
    y, oracle = run(x, packed(q, device), None, dtype=F32), expected(x, q)
    assert float((y.cpu().double() - oracle).abs().max()) < 3e-3 * oracle.abs().max(), "the weight is rounded, too"


def test_measured_plans_are_its_own(device: str) -> None:
    """A time with exact inputs, or with rounded ones in 16 bits, says nothing about float8."""
    q = weight(32, 256, SCHEMES["block"])
    weights = packed(q, device)
    keys = [gemm_table.Key.of(weights, F16), gemm_table.Key.of(test_linear.pack(q, device), F16)]
    with without("float8"):
        keys.append(gemm_table.Key.of(weights, F16))
    assert [key.dtype for key in keys] == ["float8", "float16", "float16"]


def test_weights_are_read_before_the_kernel_waits() -> None:
    emulator.install(seed=5, overlap=True)
    q, x = weight(72, 640, SCHEMES["block"]), normed(9, 640)
    y = gemm.multiply(x, packed(q, "cpu"), Plan(2, 1, 2, 2, 4, 2), dtype=F32)
    assert_near(y, expected(x, q))
    module.BACKENDS.pop("cpu")
