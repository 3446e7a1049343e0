"""Norms, embedding, positions, gathered columns, activations, rotary angles, and rows as codes of 8 bits. The formulas
are in lmkit.kernels.ops and in the kernels themselves, csrc/norm.cu and elementwise.cu.

Activations are float32 or one of the 16-bit types. The kernels are compiled once for each 16-bit type. The launch tells
them which of a call's tensors have it.
"""

from __future__ import annotations

from functools import cache, partial
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from lmkit.attention_spec import Growth
from lmkit.kernels import ops, query_ops
from lmkit.kernels.cuda.module import HALVES, Kernel, is_available, missing
from lmkit.kernels.cuda.switches import off
from lmkit.kernels.ops import Norm
from lmkit.kernels.registry import implements

WIDTH = 8  # values of a thread: rows.cuh
WARP, BLOCK = 32, 256
# norm.cu: vectors of WIDTH columns that a thread keeps -> threads of a row, at most
VECTORS = {1: 512, 2: 512, 4: 512, 16: 256}
MAX_COLUMNS = max(vectors * threads for vectors, threads in VECTORS.items()) * WIDTH
# Activation of csrc/activation.cuh
ACTIVATIONS: dict[str | None, int] = {None: 0, "silu": 1, "gelu_tanh": 2, "clamped_swish": 3}
OUTPUTS = {torch.float32: 0, torch.float16: 1, torch.bfloat16: 1, torch.int8: 2, torch.float8_e4m3fn: 3}


def accepts(*files: str, **traits: Any) -> str | None:
    """Why kernels of these files cannot run, or None."""
    return off(*files) if is_available() else missing()


class RowCodes(NamedTuple):
    """Rows [T, K] as codes: values ~ codes * scales. There may be more rows than asked for; those hold anything."""

    codes: Tensor  # int8 or float8_e4m3fn [T, K]
    scales: Tensor  # float32 [T]
    sums: Tensor  # int32 [T], of int8 codes


@implements(ops.rms_norm, "cuda", device="cuda", accepts=partial(accepts, "norm.cu"), priority=20)
def rms_norm(x: Tensor, norm: Norm) -> Tensor:
    dtype = result_dtype(x, norm)
    if (reason := _norm_problem(x, norm, dtype)) is not None:
        y: Tensor = ops.rms_norm.fall_back("reference", reason)(x, norm)
        return y
    out = torch.empty(x.shape, dtype=dtype, device=x.device)
    _norm_rows(x, norm, out, dtype, None)
    return out


def quantize_rows(x: Tensor, codes: torch.dtype, norm: Norm | None = None, *, min_rows: int = 0) -> RowCodes:
    """x [T, K], or its rms_norm, as codes with a scale per row; int8 codes also get their sums. K up to MAX_COLUMNS.

    The scale is max|x| / 127 or / 448. Codes are rounded to the nearest, halves to even. A norm's result is first
    rounded to its dtype. At least `min_rows` rows are returned.
    """
    rows, columns = x.shape
    dtype = result_dtype(x, norm)
    if norm is not None and (reason := _norm_problem(x, norm, dtype)) is not None:
        x, norm = ops.rms_norm.fall_back("reference", reason)(x, norm), None
    if half_of(x, dtype) is None:
        x, dtype = x.float(), torch.float32
    padded = max(rows, min_rows)
    out = RowCodes(
        torch.empty(padded, columns, dtype=codes, device=x.device),
        torch.empty(padded, dtype=torch.float32, device=x.device),
        torch.empty(padded, dtype=torch.int32, device=x.device),
    )
    _norm_rows(x, norm, out.codes, dtype, out)
    return out


def _norm_problem(x: Tensor, norm: Norm, dtype: torch.dtype) -> str | None:
    """Why norm.cu cannot compute a norm, or None."""
    if half_of(x, norm.residual, dtype) is None:
        return dtypes_of(x, norm.residual, dtype)
    return f"{x.shape[-1]} columns, more than {MAX_COLUMNS}" if x.shape[-1] > MAX_COLUMNS else off("norm.cu")


def _norm_rows(x: Tensor, norm: Norm | None, out: Tensor, dtype: torch.dtype, codes: RowCodes | None) -> None:
    """Launch norm.cu. `dtype` is that of the normalized values, from which `codes` are made."""
    columns = x.shape[-1]
    x, outer, inner_stride, inner = _strided_rows(x)
    residual, weight, bias = None, None, None
    if norm is not None:
        residual, weight = norm.residual, norm.weight.float().contiguous()
        bias = None if norm.bias is None else norm.bias.float().contiguous()
    half = half_of(x, residual, dtype)
    assert half is not None
    if residual is not None and (residual.dim() != 2 or residual.stride(1) != 1):
        raise ValueError(f"a residual stream of shape {list(residual.shape)}, strides {residual.stride()}")
    residual_stride = 0 if residual is None else residual.stride(0)
    aligned = columns % WIDTH == 0 and all(stride % WIDTH == 0 for stride in (outer, inner_stride, residual_stride))
    aligned = aligned and is_aligned(x, residual, weight, bias, out)
    vectors = next(n for n, threads in VECTORS.items() if columns <= n * threads * WIDTH)
    threads = WARP * -(-columns // (WARP * WIDTH * vectors))
    rows, block_rows = x.numel() // max(columns, 1), BLOCK // WARP if threads == WARP else 1
    args = [
        x, np.int64(outer), np.int64(inner_stride), inner, residual, np.int64(residual_stride), weight, bias,
        0.0 if norm is None else norm.eps, out, *((None, None) if codes is None else codes[1:]), rows, columns,
        x.dtype in HALVES, residual is not None and residual.dtype in HALVES, OUTPUTS[out.dtype], dtype in HALVES,
        aligned,
    ]  # fmt: skip
    kernel = kernel_for("norm.cu", "norm_rows", half, VECTORS=vectors)
    kernel(-(-rows // block_rows), (threads, block_rows), args, shared=4 * WARP * 4)


@implements(ops.embedding, "cuda", device="cuda", accepts=partial(accepts, "elementwise.cu"), priority=20)
def embedding(table: Tensor, rows: Tensor, scale: float = 1.0) -> Tensor:
    half = half_of(table)
    if half is None or table.stride(1) != 1:
        reason = dtypes_of(table) if half is None else "a table whose rows are not contiguous"
        y: Tensor = ops.embedding.fall_back("reference", reason)(table, rows, scale)
        return y
    columns = table.shape[1]
    out = torch.empty(len(rows), columns, dtype=torch.float32, device=table.device)
    aligned = columns % WIDTH == 0 and table.stride(0) % WIDTH == 0 and is_aligned(table, out)
    args = [table, np.int64(table.stride(0)), rows.contiguous(), out, columns, scale, table.dtype in HALVES, aligned]
    kernel_for("elementwise.cu", "embedding", half)(grid(len(rows), columns), BLOCK, args)
    return out


@implements(ops.gather_columns, "cuda", device="cuda", accepts=partial(accepts, "elementwise.cu"), priority=20)
def gather_columns(x: Tensor, order: Tensor) -> Tensor:
    if half_of(x) is None or x.stride(1) != 1:
        reason = dtypes_of(x) if half_of(x) is None else "rows that are not contiguous"
        y: Tensor = ops.gather_columns.fall_back("reference", reason)(x, order)
        return y
    rows, columns = x.shape
    out = torch.empty(rows, columns, dtype=x.dtype, device=x.device)
    args = [x, np.int64(x.stride(0)), order, out, columns, x.dtype in HALVES]
    kernel = kernel_for("elementwise.cu", "gather_columns", torch.float16)
    kernel((rows, -(-columns // BLOCK)), BLOCK, args)
    return out


@implements(ops.add_positions, "cuda", device="cuda", accepts=partial(accepts, "elementwise.cu"), priority=20)
def add_positions(x: Tensor, table: Tensor, positions: Tensor) -> None:
    assert x.dtype == table.dtype == torch.float32
    assert x.stride(1) == 1
    assert table.is_contiguous()
    columns = x.shape[1]
    aligned = columns % WIDTH == 0 and x.stride(0) % WIDTH == 0 and is_aligned(x, table)
    args = [x, np.int64(x.stride(0)), table, positions.int().contiguous(), columns, aligned]
    kernel_for("elementwise.cu", "add_positions", torch.float16)(grid(len(x), columns), BLOCK, args)


@implements(ops.ungated_activation, "cuda", device="cuda", accepts=partial(accepts, "elementwise.cu"), priority=20)
def ungated_activation(x: Tensor, activation: str) -> Tensor:
    half = half_of(x)
    if half is None or not x.is_contiguous():
        reason = dtypes_of(x) if half is None else "rows that are not contiguous"
        y: Tensor = ops.ungated_activation.fall_back("reference", reason)(x, activation)
        return y
    blocks = -(-x.numel() // (WIDTH * BLOCK))
    args = [x, np.int64(x.numel()), ops.UNGATED.index(activation), x.dtype in HALVES, is_aligned(x)]
    kernel_for("elementwise.cu", "ungated_activation", half)(blocks, BLOCK, args)
    return x


@implements(query_ops.grown_queries, "cuda", device="cuda", accepts=partial(accepts, "elementwise.cu"), priority=20)
def grown_queries(q: Tensor, positions: Tensor, growth: Growth) -> Tensor:
    half, columns = half_of(q), q.shape[1] * q.shape[2]
    if half is None or q.stride()[1:] != (q.shape[2], 1):
        reason = dtypes_of(q) if half is None else "heads that are not contiguous"
        y: Tensor = query_ops.grown_queries.fall_back("reference", reason)(q, positions, growth)
        return y
    out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
    aligned = columns % WIDTH == 0 and q.stride(0) % WIDTH == 0 and is_aligned(q, out)
    args = [
        q, np.int64(q.stride(0)), positions.int().contiguous(), out, columns, float(growth.rate), growth.length,
        growth.shift, q.dtype in HALVES, aligned,
    ]  # fmt: skip
    kernel_for("elementwise.cu", "grown_queries", half)(grid(len(q), columns), BLOCK, args)
    return out


@implements(ops.softcap, "cuda", device="cuda", accepts=partial(accepts, "elementwise.cu"), priority=20)
def softcap(x: Tensor, cap: float) -> Tensor:
    assert (x.dtype, x.is_contiguous()) == (torch.float32, True)
    kernel = kernel_for("elementwise.cu", "softcap", torch.float16)
    kernel(-(-x.numel() // BLOCK), BLOCK, [x, cap, np.int64(x.numel())])
    return x


@implements(ops.gated_activation, "cuda", device="cuda", accepts=partial(accepts, "elementwise.cu"), priority=20)
def gated_activation(gate_up: Tensor, activation: str) -> Tensor:
    half = half_of(gate_up)
    if (reason := dtypes_of(gate_up) if half is None else off("elementwise.cu")) is not None:
        y: Tensor = ops.gated_activation.fall_back("reference", reason)(gate_up, activation)
        return y
    columns = gate_up.shape[-1] // 2
    rows = gate_up.reshape(-1, 2 * columns)
    rows = rows if rows.stride(1) == 1 else rows.contiguous()
    out = torch.empty(*gate_up.shape[:-1], columns, dtype=gate_up.dtype, device=gate_up.device)
    aligned = columns % WIDTH == 0 and rows.stride(0) % WIDTH == 0 and is_aligned(rows, out)
    args = [
        rows, np.int64(rows.stride(0)), out, columns, ACTIVATIONS[activation], gate_up.dtype in HALVES, aligned,
    ]  # fmt: skip
    kernel_for("elementwise.cu", "gated_activation", half)(grid(len(rows), columns), BLOCK, args)
    return out


@implements(ops.rope_angles, "cuda", device="cuda", accepts=partial(accepts, "elementwise.cu"), priority=20)
def rope_angles(positions: Tensor, inv_freq: Tensor, magnitude: float) -> tuple[Tensor, Tensor]:
    tokens, half_dim = len(positions), len(inv_freq)
    cos, sin = torch.empty(2, tokens, half_dim, device=positions.device)
    args = [positions.int().contiguous(), inv_freq.contiguous(), float(magnitude), cos, sin, tokens, half_dim]
    kernel_for("elementwise.cu", "rope_angles", torch.float16)(-(-tokens * half_dim // BLOCK), BLOCK, args)
    return cos, sin


@cache
def kernel_for(source: str, name: str, half: torch.dtype, **defines: int) -> Kernel:
    """The kernel for tensors of float32 and `half`."""
    return Kernel(source, name, **defines, **({"LM_BF16": 1} if half == torch.bfloat16 else {}))


def result_dtype(x: Tensor, norm: Norm | None) -> torch.dtype:
    """The dtype of x, or of its rms_norm."""
    if norm is None:
        return x.dtype
    return norm.dtype or (x if norm.residual is None else norm.residual).dtype


def half_of(*values: Tensor | torch.dtype | None) -> torch.dtype | None:
    """The 16-bit type among these, float16 if there is none. None if there are two, or any other type."""
    dtypes = {value.dtype if isinstance(value, Tensor) else value for value in values if value is not None}
    narrow = dtypes - {torch.float32}
    return None if len(narrow) > 1 or not narrow <= set(HALVES) else next(iter(narrow), torch.float16)


def dtypes_of(*values: Tensor | torch.dtype | None) -> str:
    """The dtypes for a message: "tensors of bfloat16 and float16"."""
    dtypes = {value.dtype if isinstance(value, Tensor) else value for value in values if value is not None}
    return "tensors of " + " and ".join(sorted(str(dtype).removeprefix("torch.") for dtype in dtypes))


def _strided_rows(x: Tensor) -> tuple[Tensor, int, int, int]:
    """(x or a copy, strides of x[i] and x[i][j], the number of j). Row r is x[r // number][r % number]."""
    if x.dim() == 3 and x.stride(2) == 1:
        return x, x.stride(0), x.stride(1), x.shape[1]
    x = x if x.dim() == 2 and x.stride(1) == 1 else x.reshape(-1, x.shape[-1]).contiguous()
    return x, x.stride(0), 0, 1


def is_aligned(*tensors: Tensor | None) -> bool:
    """Whether each tensor begins at a multiple of 16 bytes."""
    return all(tensor is None or tensor.data_ptr() % 16 == 0 for tensor in tensors)


def grid(rows: int, columns: int) -> tuple[int, int]:
    return rows, -(-columns // (WIDTH * BLOCK))
