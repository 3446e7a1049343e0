"""Weights of GGUF's types, which a CPU keeps in planes of bits, against float64 products of the dequantized weight."""

from __future__ import annotations

import pytest
import torch

from lmkit.kernels import plane_ops
from lmkit.kernels.cuda import gemm, gemm_pack
from lmkit.kernels.cuda.gemm_plan import Plan
from lmkit.qtensor import dequantize
from tests.kernels.cuda.test_linear import BF16, F16, F32, SMALL, WIDE, assert_near, expected, poisoned
from tests.kernels.planes import SCHEMES, random_weight

__all__ = ["poisoned"]

BITS = {
    "Q4_1": 5, "Q5_0": 6.75, "Q5_1": 7, "Q2_K": 5.25, "Q3_K": 4.625, "Q4_K": 4.75, "Q5_K": 6.75, "Q6_K": 6.625,
    "IQ4_NL": 8.75, "IQ4_XS": 8.375, "IQ1_S": 8.375, "IQ1_M": 8.625, "IQ2_XXS": 8.375, "IQ2_XS": 8.625, "IQ2_S": 8.625,
    "IQ3_XXS": 8.375, "IQ3_S": 8.375,
}  # fmt: skip  # of a weight: codes of 4, 6 or 8, with what their groups have


@pytest.mark.parametrize(
    "name", [name if name in ("Q4_K", "Q6_K") else pytest.param(name, marks=pytest.mark.exhaustive) for name in SCHEMES]
)
def test_types_of_gguf(name: str, device: str) -> None:
    """Packing loses nothing, and products of few and of several tokens are those of the weight."""
    torch.manual_seed(3)
    q = random_weight(SCHEMES[name], 48, 768)
    dense, packed = dequantize(q), gemm_pack.pack(q.to(device))
    assert (packed.codes.nbytes + packed.params.nbytes) * 8 == BITS[name] * 48 * 768
    for dtype in (F16, F32):
        assert torch.equal(gemm_pack.dequantize(packed, dtype).cpu(), dense.to(dtype))
    for dtype, plan in ((F16, SMALL), (BF16, WIDE)):
        x = (torch.randn(11, 768) + 0.5).to(device, dtype)
        assert_near(gemm.multiply(x, packed, plan, dtype=F32), expected(x, q))


@pytest.mark.parametrize("name", [pytest.param(name, marks=pytest.mark.exhaustive) for name in ("Q4_K", "Q6_K")])
def test_gated_weights_and_rounded_inputs(name: str, device: str) -> None:
    torch.manual_seed(4)
    q, x = random_weight(SCHEMES[name], 2 * 24, 512), torch.randn(3, 512, device=device).half()
    packed = gemm_pack.pack(q.to(device), "silu")
    assert_near(gemm.multiply(x, packed, Plan(1, 2, 2, 2, 3, 1)), expected(x, q, activation="silu"))
    op = plane_ops.linear_planes
    kernel, reference = op.named("cuda"), op.named("reference")
    got, wanted = kernel(x, kernel.pack(q.to(device)), None), reference(x.cpu(), reference.pack(q), None)
    assert float((got.cpu().float() - wanted.float()).norm() / wanted.float().norm()) < 2e-3
