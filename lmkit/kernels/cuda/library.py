"""Linears whose product is torch's library's (cuBLAS). Our kernels run before it (norm and rounding to codes,
csrc/norm.cu) and after it (scales, bias, gate and residual stream, csrc/epilogue.cu). For few tokens the product is a
kernel of our own that streams the weights, csrc/gemv.cu. With the switch `invariant` csrc/dense.cu has all products of
dense weights.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from lmkit.kernels import ops
from lmkit.kernels.cuda import elementwise
from lmkit.kernels.cuda.dense_shape import dense_shape
from lmkit.kernels.cuda.elementwise import ACTIVATIONS, BLOCK, MAX_COLUMNS, WIDTH, RowCodes, grid, is_aligned
from lmkit.kernels.cuda.gpus import FLOAT8_CAPABILITY, gpu_of, version
from lmkit.kernels.cuda.module import HALVES, backend, tensor_device
from lmkit.kernels.cuda.switches import off, switches
from lmkit.kernels.ops import Norm
from lmkit.kernels.reference.linear import Kept, keep
from lmkit.kernels.registry import implements
from lmkit.qtensor import QTensor

GEMV_TOKENS = 8  # up to this many tokens, a product is a stream of weights
FORMATS = {torch.float16: 0, torch.bfloat16: 0, torch.int8: 1, torch.float8_e4m3fn: 2}  # gemv.cu
GEMV_WARPS, GEMV_OUTPUTS = 8, 16
PRODUCT_ROWS = 32  # minimum; torch._int_mm wants more than 16


# ---- dense weights


def _accepts_dense(*, dtype: torch.dtype, **traits: Any) -> str | None:
    files = ("dense.cu",) if switches().invariant else ()
    reason = elementwise.accepts("epilogue.cu", *files)
    return reason or (None if dtype in HALVES else f"weights of {dtype}: torch has them")


def _pack_dense(weight: Tensor, activation: str | None = None) -> Kept:
    weight = weight.contiguous()
    return keep(weight if is_aligned(weight) else weight.clone(), activation)


@implements(
    ops.linear_dense, "cuda", device="cuda", accepts=_accepts_dense, pack=_pack_dense, priority=20, epilogue=True
)
def linear_dense(
    x: Tensor,
    packed: Kept,
    bias: Tensor | None,
    norm: Norm | None = None,
    *,
    dtype: torch.dtype | None = None,
    residual: Tensor | None = None,
) -> Tensor:
    weight: Tensor = packed.weight
    x = x if norm is None else elementwise.rms_norm(x, norm)
    reason = None
    if x.dtype != weight.dtype or dtype not in (None, x.dtype, torch.float32):
        reason = elementwise.dtypes_of(x, weight, dtype)
    elif switches().invariant and x.shape[1] % WIDTH:
        reason = f"{x.shape[1]} inputs, not a multiple of {WIDTH}"
    if reason is not None:
        y: Tensor = ops.linear_dense.fall_back("torch", reason)(x, packed, bias, dtype=dtype, residual=residual)
        return y
    dtype = dtype or x.dtype
    if switches().invariant:
        return invariant_product(x, weight, bias, packed.activation, dtype, residual)
    if len(x) <= GEMV_TOKENS and _streams(x, weight) and off("gemv.cu") is None:
        return _few_tokens(x, weight, bias, packed.activation, dtype, residual)
    if residual is None and dtype == x.dtype:
        y = torch.nn.functional.linear(x, weight, None if bias is None else bias.to(dtype))
        return y if packed.activation is None else elementwise.gated_activation(y, packed.activation)
    return _epilogue(wide_product(x, weight), len(x), bias, packed.activation, dtype, residual)


def invariant_product(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    activation: str | None,
    dtype: torch.dtype,
    residual: Tensor | None,
) -> Tensor:
    """The same result from csrc/dense.cu: a row's bits depend on that row alone. K is a multiple of WIDTH."""
    x = x if _streams(x, weight) else x.clone(memory_format=torch.contiguous_format)
    tokens, outputs = len(x), len(weight)
    out, add = _output(x, outputs, activation, dtype, residual)
    shape = dense_shape(tokens, gpu_of(backend(x.device.type).capability()).block_shared)
    args = [
        x, np.int64(x.stride(0)), weight, None if bias is None else bias.float(), out, np.int64(out.stride(0)), tokens,
        outputs, x.shape[1], out.dtype in HALVES, add,
    ]  # fmt: skip
    kernel = elementwise.kernel_for("dense.cu", "dense", x.dtype, **shape.defines)
    kernel((-(-tokens // shape.tokens), -(-outputs // shape.outputs)), shape.threads, args, shared=shape.shared_bytes)
    return _epilogue(out, tokens, None, activation, dtype, residual) if activation else out


def _output(
    x: Tensor, outputs: int, activation: str | None, dtype: torch.dtype, residual: Tensor | None
) -> tuple[Tensor, bool]:
    """Where a kernel writes the product of x, and whether it adds to what is there. An activation comes after it."""
    if residual is not None and activation is None:
        return residual, True
    return torch.empty(len(x), outputs, dtype=torch.float32 if activation else dtype, device=x.device), False


def wide_product(x: Tensor, weight: Tensor) -> Tensor:
    """x [T, K] W^T in float32, with W [N, K] of the same 16-bit type. Nothing is rounded at the end."""
    return torch.mm(x, weight.t(), out_dtype=torch.float32) if x.is_cuda else x.float() @ weight.float().t()


@implements(ops.linear_heads, "cuda", device="cuda", pack=Tensor.contiguous, priority=20)
def linear_heads(x: Tensor, packed: Tensor) -> Tensor:
    by_head, weight = x.transpose(0, 1), packed.transpose(1, 2)
    y = torch.bmm(by_head, weight) if x.is_cuda else torch.bmm(by_head.float(), weight.float()).to(x.dtype)
    return y.transpose(0, 1)


def _streams(x: Tensor, weight: Tensor) -> bool:
    """Whether gemv.cu can run: rows must be whole, aligned vectors of 16 bytes."""
    return x.shape[1] % WIDTH == 0 and x.stride(1) == 1 and x.stride(0) % WIDTH == 0 and is_aligned(x, weight)


# ---- weights and activations of 8 bits


@dataclass(frozen=True)
class CodedWeight:
    """A weight with one scale per output: value = (code - zero) * scale."""

    codes: Tensor  # [N, K] int8, code - 128; or float8_e4m3fn
    scales: Tensor  # float32 [N]
    zeros: Tensor | None  # int32 [N], zero - 128; None: all are 0
    one: Tensor  # float32 [1], a factor that torch._scaled_mm needs
    activation: str | None


def _pack_codes(weight: QTensor, activation: str | None = None) -> CodedWeight:
    is_float = weight.codes.is_floating_point()
    scales = weight.scales.flatten().float()
    zeros = None if weight.scheme.symmetric else weight.zeros.flatten().int() - 128
    codes = weight.codes if is_float else (weight.codes ^ 128).view(torch.int8)
    return CodedWeight(codes.contiguous(), scales, zeros, torch.ones_like(scales[:1]), activation)


def _accepts_codes(*, group_size: int, in_features: int, out_features: int, **traits: Any) -> str | None:
    if group_size != -1:
        return f"group_size {group_size}: one scale for each output"
    if in_features % 16 or out_features % 16:
        return f"{in_features} inputs, {out_features} outputs: multiples of 16"
    return f"{in_features} inputs: at most {MAX_COLUMNS}" if in_features > MAX_COLUMNS else None


def _accepts_int8(*, bits: int = 8, **traits: Any) -> str | None:
    return elementwise.accepts("norm.cu", "epilogue.cu") or (_accepts_codes(**traits) if bits == 8 else f"{bits} bits")


def _accepts_fp8(**traits: Any) -> str | None:
    if (reason := _accepts_int8(**traits)) is not None:
        return reason
    capability = backend(tensor_device("cuda")).capability()
    if not gpu_of(capability).float8:
        return f"float8 products need compute capability {version(FLOAT8_CAPABILITY)}, not {version(capability)}"
    return None


def _int8_product(x: RowCodes, weight: CodedWeight) -> Tensor:
    return torch._int_mm(x.codes, weight.codes.t())


def _fp8_product(x: RowCodes, weight: CodedWeight) -> Tensor:
    return torch._scaled_mm(x.codes, weight.codes.t(), weight.one, weight.one, out_dtype=torch.float32)


def _linear(product: Callable[[RowCodes, CodedWeight], Tensor], code: torch.dtype) -> Callable[..., Tensor]:
    """A linear on activations that are rounded to `code`. Its product is exact, or in float32."""

    def linear(
        x: Tensor,
        packed: CodedWeight,
        bias: Tensor | None,
        norm: Norm | None = None,
        *,
        dtype: torch.dtype | None = None,
        residual: Tensor | None = None,
    ) -> Tensor:
        few = len(x) <= GEMV_TOKENS and not switches().invariant and off("gemv.cu") is None
        rounded = elementwise.quantize_rows(x, code, norm, min_rows=0 if few else PRODUCT_ROWS)
        dtype = dtype or elementwise.result_dtype(x, norm)
        scales = Scales(rounded.scales, packed.scales, rounded.sums, packed.zeros)
        if few:
            return _few_tokens(rounded.codes, packed.codes, bias, packed.activation, dtype, residual, scales)
        return _epilogue(product(rounded, packed), len(x), bias, packed.activation, dtype, residual, scales)

    return linear


@dataclass(frozen=True)
class Scales:
    """The factors of a product of codes, and the terms subtracted before."""

    rows: Tensor
    outputs: Tensor
    sums: Tensor
    zeros: Tensor | None


def _factors(scales: Scales | None) -> tuple[Tensor | None, ...]:
    """The factors as kernel arguments."""
    return (None,) * 4 if scales is None else (scales.rows, scales.outputs, scales.sums, scales.zeros)


def _few_tokens(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    activation: str | None,
    dtype: torch.dtype,
    residual: Tensor | None,
    scales: Scales | None = None,
) -> Tensor:
    """csrc/gemv.cu: x [T <= GEMV_TOKENS, K], weight [N, K] of the same dtype -> [T, N], or N / 2 if gated."""
    (tokens, inputs), outputs, size = x.shape, len(weight), x.element_size()
    out, add = _output(x, outputs, activation, dtype, residual)
    half = elementwise.half_of(x if FORMATS[x.dtype] == 0 else out)
    assert half is not None
    args = [
        x, np.int64(x.stride(0) * size), weight, *_factors(scales), None if bias is None else bias.float(), out,
        np.int64(out.stride(0)), tokens, outputs, inputs * size, out.dtype in HALVES, add,
    ]  # fmt: skip
    blocks = -(-outputs // GEMV_OUTPUTS) if tokens else 0
    kernel = elementwise.kernel_for("gemv.cu", "gemv", half, FORMAT=FORMATS[x.dtype])
    kernel(blocks, 32 * GEMV_WARPS, args, shared=GEMV_WARPS * GEMV_TOKENS * GEMV_OUTPUTS * 4)
    return _epilogue(out, tokens, None, activation, dtype, residual) if activation else out


def _epilogue(
    product: Tensor,
    rows: int,
    bias: Tensor | None,
    activation: str | None,
    dtype: torch.dtype,
    residual: Tensor | None,
    scales: Scales | None = None,
) -> Tensor:
    """csrc/epilogue.cu: the first `rows` of product [.., N], int32 or float32 -> [rows, N], or N / 2 if gated."""
    outputs = product.shape[1]
    columns = outputs // 2 if activation else outputs
    out = product.new_empty(rows, columns, dtype=dtype) if residual is None else residual
    half = elementwise.half_of(out)
    assert half is not None
    factors = _factors(scales)
    bias = None if bias is None else bias.float()
    aligned = columns % WIDTH == 0 and out.stride(0) % WIDTH == 0 and is_aligned(product, *factors[1::2], bias, out)
    args = [
        product, *factors, bias, out, np.int64(out.stride(0)), outputs, product.dtype == torch.int32,
        ACTIVATIONS[activation], out.dtype in HALVES, residual is not None, aligned,
    ]  # fmt: skip
    elementwise.kernel_for("epilogue.cu", "epilogue", half)(grid(rows, columns), BLOCK, args)
    return out


for _op, _accepts, _product, _code in (
    (ops.linear_w8a8, _accepts_int8, _int8_product, torch.int8),
    (ops.linear_fp8_a8, _accepts_fp8, _fp8_product, torch.float8_e4m3fn),
):
    implements(_op, "cuda", device="cuda", accepts=_accepts, pack=_pack_codes, priority=20, epilogue=True)(
        _linear(_product, _code)
    )
