"""Linears with packed weights on CUDA: 4 and 8 bits with exact activations (ops.linear_w4a16, linear_w8a16 and
linear_fp8), and with rounded activations 4 bits and groups of 8 bits (ops.linear_w4a8, linear_w8a8, linear_fp8_a8).
What a CPU keeps in planes of bits has 4, 6 or 8 bits here (ops.linear_split, linear_planes).

For few tokens csrc/gemm.cu multiplies the packed weight, or gemm_wide.cu. For many tokens, or float32 activations, the
weight is dequantized, a panel of outputs at a time, and torch's library multiplies. gemm_table.py decides, from shapes
alone. Weights of 4 bits multiply int8 activations as integers, and float8 weights multiply float8 ones as they are, if
the GPU can. All others take the values of their codes, in x's type.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import Tensor

from lmkit.kernels import ops, plane_ops
from lmkit.kernels.cuda import coded_rows, elementwise, gemm
from lmkit.kernels.cuda.gemm_experts import OF_EXPERTS
from lmkit.kernels.cuda.gemm_pack import PackedWeight, dequantize, group_problem, pack
from lmkit.kernels.cuda.gemm_plan import Plan
from lmkit.kernels.cuda.gemm_table import BUCKETS, choose
from lmkit.kernels.cuda.library import wide_product
from lmkit.kernels.cuda.module import HALVES
from lmkit.kernels.cuda.switches import off, switches
from lmkit.kernels.ops import Norm
from lmkit.kernels.registry import implements
from lmkit.qtensor import QuantScheme

PANEL_BYTES = 256 << 20  # of a weight dequantized at a time


def linear(
    x: Tensor,
    packed: PackedWeight,
    bias: Tensor | None,
    norm: Norm | None = None,
    *,
    dtype: torch.dtype | None = None,
    residual: Tensor | None = None,
) -> Tensor:
    """x [T, K] in float16, bfloat16 or float32 -> [T, N]; see ops.linear_w4a16."""
    if norm is not None:
        if (inside := _plan_with_norm(x, packed, norm, dtype, residual)) is not None:
            return gemm.multiply(x, packed, inside, None if bias is None else bias.float(), dtype, residual, norm)
        x = elementwise.rms_norm(x, norm)
    if x.shape[0] == 0:
        return x.new_empty(0, packed.num_results, dtype=dtype) if residual is None else residual
    x = x.contiguous()
    if x.data_ptr() % 16:  # a view that is not aligned to vectors
        x = x.clone()
    bias = None if bias is None else bias.float()
    if len(x) > BUCKETS[-1] and switches().invariant:
        return _in_parts(x, packed, bias, dtype, residual)
    plan = choose(x.shape[0], packed, x.dtype) if x.dtype in HALVES else None
    if plan is None:
        return library(x, packed, bias, dtype, residual)
    x = coded_rows.rounded(x, packed) if packed.rounds and not packed.coded_x else x
    if residual is not None and not residual.is_contiguous():
        return residual.add_(gemm.multiply(x, packed, plan, bias, torch.float32))
    if dtype in (None, x.dtype, torch.float32):
        return gemm.multiply(x, packed, plan, bias, dtype, residual)
    return gemm.multiply(x, packed, plan, bias, torch.float32).to(dtype)


def _in_parts(
    x: Tensor, packed: PackedWeight, bias: Tensor | None, dtype: torch.dtype | None, residual: Tensor | None
) -> Tensor:
    """The product of as many rows at a time as plans are for: no library's, whose order of sums depends on rows."""
    out = x.new_empty(len(x), packed.num_results, dtype=dtype) if residual is None else residual
    for part, rows in zip(x.split(BUCKETS[-1]), out.split(BUCKETS[-1]), strict=True):
        if residual is None:
            rows.copy_(linear(part, packed, bias, dtype=dtype))
        else:
            linear(part, packed, bias, residual=rows)
    return out


def _plan_with_norm(
    x: Tensor, packed: PackedWeight, norm: Norm, dtype: torch.dtype | None, residual: Tensor | None
) -> Plan | None:
    """The plan of a product whose kernel also computes the norm before it, if there is one."""
    plain = x.dtype == torch.float32 and x.is_contiguous() and elementwise.is_aligned(x) and len(x) > 0
    plain = plain and norm.residual is None and norm.bias is None and norm.dtype in HALVES
    if not plain or residual is not None or dtype not in (None, norm.dtype, torch.float32) or norm.dtype is None:
        return None
    plan = choose(len(x), packed, norm.dtype)
    return plan if isinstance(plan, Plan) and gemm.norms(len(x), plan, packed) else None


def library(
    x: Tensor,
    packed: PackedWeight,
    bias: Tensor | None = None,
    dtype: torch.dtype | None = None,
    residual: Tensor | None = None,
) -> Tensor:
    """The same result from torch's product of x with the dequantized weight."""
    x = coded_rows.rounded(x, packed) if packed.rounds else x
    exact = residual is not None or dtype not in (None, x.dtype)
    per_tile = 8 if packed.gated else 16
    copy = packed.copy if packed.copy is not None and packed.copy.dtype == x.dtype else None
    panel_tiles = max(1, PANEL_BYTES // (16 * packed.in_features * x.element_size()))
    tiles = panel_tiles if copy is None else packed.num_tiles
    out = residual
    for first in range(0, packed.num_tiles, tiles):
        panel = packed.slice(first, min(first + tiles, packed.num_tiles))
        columns = slice(first * per_tile, first * per_tile + panel.num_results)
        weight = dequantize(panel, x.dtype) if copy is None else copy
        y = _product(x, weight, _bias_of(bias, columns, packed), torch.float32 if exact else x.dtype)
        y = y if packed.activation is None else elementwise.gated_activation(y, packed.activation)
        if residual is not None:
            residual[:, columns] += y
        elif panel.num_tiles == packed.num_tiles:
            return y if dtype is None else y.to(dtype)
        else:
            out = x.new_empty(x.shape[0], packed.num_results, dtype=dtype) if out is None else out
            out[:, columns] = y
    assert out is not None
    return out


def _bias_of(bias: Tensor | None, columns: slice, packed: PackedWeight) -> Tensor | None:
    if bias is None or not packed.gated:
        return None if bias is None else bias[columns]
    return bias.view(2, -1)[:, columns].reshape(-1)


def _product(x: Tensor, weight: Tensor, bias: Tensor | None, dtype: torch.dtype) -> Tensor:
    """x W^T + bias in x's dtype or float32, summed in float32."""
    if dtype == x.dtype and (x.is_cuda or dtype == torch.float32):
        return torch.nn.functional.linear(x, weight, None if bias is None else bias.to(dtype))
    y = wide_product(x, weight)
    return (y if bias is None else y.add_(bias)).to(dtype)


def _accepts(
    code_bits: int | None, /, *, group_size: int = -1, bits: int | None = None, in_features: int = 8,
    values: tuple[int, ...] = (), scheme: QuantScheme | None = None, **traits: Any,
) -> str | None:  # fmt: skip
    """`code_bits`: the bits of weights that an op is for; None: of any with planes."""
    if (reason := elementwise.accepts("dequantize.cu", *(("gemm.cu",) if switches().invariant else ()))) is not None:
        return reason
    if code_bits is not None and bits not in (None, code_bits):
        return f"{bits} bits"
    if in_features % 8:
        return f"in_features {in_features} is not a multiple of 8"
    return group_problem(group_size, values, scheme)


def _accepts_4(**traits: Any) -> str | None:
    return _accepts(4, **traits)


def _accepts_8(**traits: Any) -> str | None:
    return _accepts(8, **traits)


def _accepts_planes(**traits: Any) -> str | None:
    return _accepts(None, **traits)


def _accepts_rounded(code_bits: int | None, /, **traits: Any) -> str | None:
    return off("round_groups.cu") or _accepts(code_bits, **traits)


for _op, _accept in (
    (ops.linear_w4a16, _accepts_4), (ops.linear_w8a16, _accepts_8), (ops.linear_fp8, _accepts_8),
    (plane_ops.linear_split, _accepts_planes),
):  # fmt: skip
    implements(
        _op, "cuda", device="cuda", accepts=_accept, pack=pack, priority=20, epilogue=True, of_experts=OF_EXPERTS
    )(linear)
# library.py has 8 bits with one scale for each output.
for _op, _name, _bits in (
    (ops.linear_w4a8, "cuda", 4), (ops.linear_w8a8, "cuda.groups", 8), (ops.linear_fp8_a8, "cuda.groups", 8),
    (plane_ops.linear_planes, "cuda", None),
):  # fmt: skip
    _pack, _accept = partial(pack, rounds=True), partial(_accepts_rounded, _bits)
    implements(
        _op, _name, device="cuda", accepts=_accept, pack=_pack, priority=19, epilogue=True, of_experts=OF_EXPERTS
    )(linear)
