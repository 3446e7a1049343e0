"""RMSNorm, RoPE and the gated activation on the CPU. Rows are independent; other dtypes than float32 are widened."""

from __future__ import annotations

from typing import Any

import numba
import numpy as np
import torch
from numba import carray
from torch import Tensor

from lmkit.kernels import ops
from lmkit.kernels.cpu import threads
from lmkit.kernels.cpu.intrinsics import bits_to_float, exp, pointer, unpack
from lmkit.kernels.cpu.jit import FASTMATH, Task, float_bits
from lmkit.kernels.cpu.kv import rows_of
from lmkit.kernels.cpu.panels import address, as_type
from lmkit.kernels.reference.elementwise import accepts_rope
from lmkit.kernels.registry import implements

SERIAL_VALUES = 1 << 17  # fewer than this stay on one thread


@numba.njit(forceinline=True, fastmath=FASTMATH | {"reassoc"})
def _sum_of_squares(x: Any, size: int) -> Any:
    """Lanes are added up in the order that the compiler fixes for a size."""
    total = np.float32(0)
    for i in range(size):
        total += x[i] * x[i]
    return total


def _rms_norm(args: int, scratch: int, index: int) -> None:
    """Row `index`: residual += x, if there is one; y = norm(residual or x) * weight."""
    x, residual, weight, y, size, eps_bits = unpack(args, 6)
    at = 4 * index * size
    row, out = carray(pointer(x + at), size, np.float32), carray(pointer(y + at), size, np.float32)
    if residual:
        stream = carray(pointer(residual + at), size, np.float32)
        for i in range(size):
            stream[i] += row[i]
        row = stream
    weights = carray(pointer(weight), size, np.float32)
    mean = _sum_of_squares(row, size) / np.float32(size)
    scale = np.float32(1) / np.sqrt(mean + bits_to_float(np.uint32(eps_bits)))
    for i in range(size):
        out[i] = row[i] * scale * weights[i]


def _silu_mul(args: int, scratch: int, index: int) -> None:
    """Row `index` of gate | up."""
    gate_up, y, size = unpack(args, 3)
    gate = carray(pointer(gate_up + 8 * index * size), size, np.float32)
    up = carray(pointer(gate_up + 8 * index * size + 4 * size), size, np.float32)
    out = carray(pointer(y + 4 * index * size), size, np.float32)
    for i in range(size):
        out[i] = gate[i] / (np.float32(1) + exp(-gate[i])) * up[i]


def _rope(args: int, scratch: int, index: int) -> None:
    """Token `index`: all heads of q, then of k, by the token's angles."""
    q, q_stride, q_heads, k, k_stride, k_heads, dim, cos, sin, half = unpack(args, 10)
    c = carray(pointer(cos + 4 * index * half), half, np.float32)
    s = carray(pointer(sin + 4 * index * half), half, np.float32)
    for h in range(q_heads + k_heads):
        head = q + index * q_stride + 4 * h * dim if h < q_heads else k + index * k_stride + 4 * (h - q_heads) * dim
        first = carray(pointer(head), half, np.float32)
        second = carray(pointer(head + 4 * half), half, np.float32)
        for i in range(half):
            a, b = first[i], second[i]
            first[i] = a * c[i] - b * s[i]
            second[i] = b * c[i] + a * s[i]


RMS_NORM, SILU_MUL, ROPE = Task(_rms_norm), Task(_silu_mul), Task(_rope)


@implements(ops.rms_norm, "cpu", device="cpu", priority=20)
def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    return as_type(_norm(as_type(x, torch.float32).contiguous(), None, weight, eps), x.dtype)


@implements(ops.add_rms_norm, "cpu", device="cpu", priority=20)
def add_rms_norm(x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    if x.dtype != torch.float32:
        total = x + residual
        return rms_norm(total, weight, eps), total
    residual = residual.contiguous()
    return _norm(x.contiguous(), residual, weight, eps), residual


def _norm(x: Tensor, residual: Tensor | None, weight: Tensor, eps: float) -> Tensor:
    y, size = torch.empty_like(x), x.shape[-1]
    weight = as_type(weight, torch.float32).contiguous()
    threads.run(
        RMS_NORM,
        x.numel() // size,
        (x.data_ptr(), address(residual), weight.data_ptr(), y.data_ptr(), size, float_bits(eps)),
        parallel=x.numel() > SERIAL_VALUES,
    )
    return y


@implements(ops.silu_mul, "cpu", device="cpu", priority=20)
def silu_mul(gate_up: Tensor) -> Tensor:
    wide = as_type(gate_up, torch.float32).contiguous()
    rows, size = wide.shape[0], wide.shape[1] // 2
    y = torch.empty(rows, size, dtype=torch.float32)
    threads.run(SILU_MUL, rows, (wide.data_ptr(), y.data_ptr(), size), parallel=2 * y.numel() > SERIAL_VALUES)
    return as_type(y, gate_up.dtype)


@implements(ops.rope, "cpu", device="cpu", accepts=accepts_rope, priority=20)
def rope(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> None:
    wide_q, wide_k, cos, sin = rows_of(q), rows_of(k), cos.contiguous(), sin.contiguous()
    rows, heads, dim = q.shape
    threads.run(
        ROPE,
        rows,
        (wide_q.data_ptr(), 4 * wide_q.stride(0), heads, wide_k.data_ptr(), 4 * wide_k.stride(0), k.shape[1], dim,
         cos.data_ptr(), sin.data_ptr(), cos.shape[1]),
        parallel=q.numel() > SERIAL_VALUES,
    )  # fmt: skip
    for x, wide in ((q, wide_q), (k, wide_k)):
        if wide is not x:  # widened or copied: the op works in place
            x.copy_(wide)
