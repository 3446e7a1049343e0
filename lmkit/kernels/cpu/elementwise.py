"""Norms, the gated activation, embedding, gathered columns and RoPE's angles on the CPU. Rows are independent. Other
dtypes than float32 are widened.
"""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any, NamedTuple

import numba
import numpy as np
import torch
from numba import carray
from torch import Tensor

from lmkit.attention_spec import Growth
from lmkit.kernels import ops, query_ops
from lmkit.kernels.cpu import threads, workspace
from lmkit.kernels.cpu.intrinsics import bfloat_to_float, bits_to_float, copy, exp, fma, half_to_float, pointer, unpack
from lmkit.kernels.cpu.jit import FASTMATH, Task, float_bits, inline
from lmkit.kernels.cpu.panels import ACTIVATION_NUMBERS, address, as_type
from lmkit.kernels.cpu.panels import multiply_gates as activate
from lmkit.kernels.cpu.structs import numbers, read
from lmkit.kernels.ops import Norm
from lmkit.kernels.registry import implements

SERIAL_VALUES = 1 << 17  # work on fewer values stays on one thread
GELU_EXACT = -1
GATE_NUMBERS = ACTIVATION_NUMBERS | {"sigmoid": 0, "gelu_exact": GELU_EXACT}
FLOATS = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2}


@numba.njit(forceinline=True, fastmath=FASTMATH | {"reassoc"})
def _sum_of_squares(x: Any, size: int) -> Any:
    """Lanes are added up in an order that the compiler fixes for each size."""
    total = np.float32(0)
    for i in range(size):
        total += x[i] * x[i]
    return total


@numba.njit(forceinline=True, fastmath=FASTMATH | {"reassoc"})
def _centred(x: Any, y: Any, size: int) -> None:
    """y = x - mean(x)."""
    total = np.float32(0)
    for i in range(size):
        total += x[i]
    mean = total / np.float32(size)
    for i in range(size):
        y[i] = x[i] - mean


class NormArgs(NamedTuple):
    """All fields 0: there is no norm."""

    weight: int = 0
    residual: int = 0  # or 0
    eps_bits: int = 0
    bias: int = 0  # or 0


@inline
def normed_row(norm: NormArgs, x: int, index: int, y: int, size: int) -> None:
    """Write a row, float32 [size] at x, to y. If there is a norm, residual += x (row `index` of the residual, if there
    is one), and y = norm(residual or x) * weight, + bias if there is one.
    """
    if not norm.weight:
        copy(x, y, 4 * size)
        return
    row, out = carray(pointer(x), size, np.float32), carray(pointer(y), size, np.float32)
    if norm.residual:
        stream = carray(pointer(norm.residual + 4 * index * size), size, np.float32)
        for i in range(size):
            stream[i] += row[i]
        row = stream
    if norm.bias:
        _centred(row, out, size)
        row = out
    weights = carray(pointer(norm.weight), size, np.float32)
    mean = _sum_of_squares(row, size) / np.float32(size)
    scale = np.float32(1) / np.sqrt(mean + bits_to_float(np.uint32(norm.eps_bits)))
    for i in range(size):
        out[i] = row[i] * scale * weights[i]
    if norm.bias:
        biases = carray(pointer(norm.bias), size, np.float32)
        for i in range(size):
            out[i] += biases[i]


class NormRowsArgs(NamedTuple):
    x: int
    stride: int  # bytes between tokens
    inner: int  # vectors of a token
    norm: NormArgs
    y: int
    size: int


def _rms_norm(args: int, scratch: int, index: int) -> None:
    """Normalize row `index`: vector index % inner of token index // inner."""
    a = read(args, NormRowsArgs)
    source = a.x + index // a.inner * a.stride + 4 * (index % a.inner) * a.size
    normed_row(a.norm, source, index, a.y + 4 * index * a.size, a.size)


def _gated_activation(args: int, scratch: int, index: int) -> None:
    """Compute row `index` of gate | up."""
    gate_up, y, size, activation = unpack(args, 4)
    gate = carray(pointer(gate_up + 8 * index * size), size, np.float32)
    up = carray(pointer(gate_up + 8 * index * size + 4 * size), size, np.float32)
    out = carray(pointer(y + 4 * index * size), size, np.float32)
    activate(gate, up, out, size, activation)


def _embedding(args: int, scratch: int, index: int) -> None:
    table, stride, kind, rows, y, size, scale_bits = unpack(args, 7)
    scale = bits_to_float(np.uint32(scale_bits))
    row = carray(pointer(rows), index + 1, np.int64)[index]
    out = carray(pointer(y + 4 * index * size), size, np.float32)
    if kind == 0:
        values = carray(pointer(table + row * stride), size, np.float32)
        for i in range(size):
            out[i] = values[i] * scale
        return
    bits = carray(pointer(table + row * stride), size, np.uint16)
    if kind == 1:
        for i in range(size):
            out[i] = bfloat_to_float(np.uint32(bits[i])) * scale
    else:
        for i in range(size):
            out[i] = half_to_float(np.uint32(bits[i])) * scale


def _gather_columns(args: int, scratch: int, index: int) -> None:
    x, order, y, size = unpack(args, 4)
    row, places = carray(pointer(x + 4 * index * size), size, np.float32), carray(pointer(order), size, np.int32)
    out = carray(pointer(y + 4 * index * size), size, np.float32)
    for i in range(size):
        out[i] = row[places[i]]


def _add_positions(args: int, scratch: int, index: int) -> None:
    x, table, positions, size = unpack(args, 4)
    row = carray(pointer(positions), index + 1, np.int32)[index]
    values = carray(pointer(table + 4 * row * size), size, np.float32)
    out = carray(pointer(x + 4 * index * size), size, np.float32)
    for i in range(size):
        out[i] += values[i]


def _keep(args: int, scratch: int, index: int) -> None:
    x, residual, out, stride, size, scale_bits = unpack(args, 6)
    scale = bits_to_float(np.uint32(scale_bits))
    row = carray(pointer(x + 4 * index * size), size, np.float32)
    kept = carray(pointer(out + index * stride), size, np.float32)
    if residual:
        added = carray(pointer(residual + 4 * index * size), size, np.float32)
        for i in range(size):
            kept[i] = (row[i] + added[i]) * scale
    else:
        for i in range(size):
            kept[i] = row[i] * scale


@inline
def _erf(x: Any) -> Any:
    """A quotient of polynomials in x^2, as Eigen has it, within 5e-7."""
    x = min(max(x, np.float32(-4)), np.float32(4))
    s = x * x
    above = fma(s, np.float32(-2.72614225801306e-10), np.float32(2.77068142495902e-08))
    above = fma(s, above, np.float32(-2.10102402082508e-06))
    above = fma(s, above, np.float32(-5.69250639462346e-05))
    above = fma(s, above, np.float32(-7.34990630326855e-04))
    above = fma(s, above, np.float32(-2.95459980854025e-03))
    above = fma(s, above, np.float32(-1.60960333262415e-02))
    below = fma(s, np.float32(-1.45660718464996e-05), np.float32(-2.13374055278905e-04))
    below = fma(s, below, np.float32(-1.68282697438203e-03))
    below = fma(s, below, np.float32(-7.37332916720468e-03))
    below = fma(s, below, np.float32(-1.42647390514189e-02))
    return x * above / below


@inline
def _gelu(x: Any) -> Any:
    return np.float32(0.5) * x * (np.float32(1) + _erf(x * np.float32(0.70710678)))


def _ungated_activation(args: int, scratch: int, index: int) -> None:
    """`activation` is the place of one in ops.UNGATED."""
    x, size, activation = unpack(args, 3)
    row = carray(pointer(x + 4 * index * size), size, np.float32)
    if activation == 1:
        for i in range(size):
            row[i] = _gelu(row[i])
    elif activation == 2:
        for i in range(size):
            above = max(row[i], np.float32(0))
            row[i] = above * above
    else:
        for i in range(size):
            row[i] = max(row[i], np.float32(0))


def _multiply_gates(args: int, scratch: int, index: int) -> None:
    """`activation` is one of GATE_NUMBERS."""
    x, stride, gates, gate_stride, y, size, activation = unpack(args, 7)
    row = carray(pointer(x + index * stride), size, np.float32)
    factors = carray(pointer(gates + index * gate_stride), size, np.float32)
    out = carray(pointer(y + 4 * index * size), size, np.float32)
    if activation == GELU_EXACT:
        for i in range(size):
            out[i] = _gelu(factors[i]) * row[i]
    elif activation:
        activate(factors, row, out, size, activation)
    else:
        for i in range(size):
            out[i] = row[i] / (np.float32(1) + exp(-factors[i]))


def _grown_queries(args: int, scratch: int, index: int) -> None:
    x, stride, positions, y, size, rate_bits, length, shift = unpack(args, 8)
    position = carray(pointer(positions), index + 1, np.int32)[index]
    steps = np.float64((position + shift) // length)
    factor = np.float32(1) + bits_to_float(np.uint32(rate_bits)) * np.float32(math.log1p(steps))
    row = carray(pointer(x + index * stride), size, np.float32)
    out = carray(pointer(y + 4 * index * size), size, np.float32)
    for i in range(size):
        out[i] = row[i] * factor


def _softcap(args: int, scratch: int, index: int) -> None:
    """Cap row `index` of logits. `cap_bits` holds the bits of the cap."""
    x, size, cap_bits = unpack(args, 3)
    cap = bits_to_float(np.uint32(cap_bits))
    row = carray(pointer(x + 4 * index * size), size, np.float32)
    for i in range(size):
        doubled = row[i] / cap * np.float32(2)
        row[i] = cap * (np.float32(1) - np.float32(2) / (exp(doubled) + np.float32(1)))  # tanh(t)


def _rope_angles(args: int, scratch: int, index: int) -> None:
    positions, inv_freq, magnitude_bits, cos, sin, half = unpack(args, 6)
    position = np.float32(carray(pointer(positions), index + 1, np.int32)[index])
    magnitude = bits_to_float(np.uint32(magnitude_bits))
    frequencies = carray(pointer(inv_freq), half, np.float32)
    c = carray(pointer(cos + 4 * index * half), half, np.float32)
    s = carray(pointer(sin + 4 * index * half), half, np.float32)
    for i in range(half):
        angle = np.float64(position * frequencies[i])
        c[i] = np.float32(math.cos(angle)) * magnitude
        s[i] = np.float32(math.sin(angle)) * magnitude


RMS_NORM, GATED_ACTIVATION, EMBEDDING, GATHER_COLUMNS = (
    Task(f) for f in (_rms_norm, _gated_activation, _embedding, _gather_columns)
)
GROWN_QUERIES = Task(_grown_queries)
ADD_POSITIONS, KEEP, UNGATED_ACTIVATION, MULTIPLY_GATES, SOFTCAP, ROPE_ANGLES = (
    Task(f) for f in (_add_positions, _keep, _ungated_activation, _multiply_gates, _softcap, _rope_angles)
)


def norm_arguments(norm: Norm, x: Tensor) -> tuple[tuple[Tensor, ...], NormArgs]:
    """(tensors that the caller keeps alive, and the arguments) for rows of float32 x."""
    weight = as_type(norm.weight, torch.float32).contiguous()
    bias = None if norm.bias is None else as_type(norm.bias, torch.float32).contiguous()
    if norm.residual is not None:
        assert norm.residual.is_contiguous()
        assert (norm.residual.dtype, norm.residual.shape) == (torch.float32, x.shape)
    kept = (weight,) if bias is None else (weight, bias)
    return kept, NormArgs(weight.data_ptr(), address(norm.residual), float_bits(norm.eps), address(bias))


@implements(ops.rms_norm, "cpu", device="cpu", priority=20)
def rms_norm(x: Tensor, norm: Norm) -> Tensor:
    """ops.rms_norm of x [T, H], or [T, heads, D] with any stride between tokens."""
    if x.dtype != torch.float32 and norm.residual is not None:
        total: Tensor = rms_norm(norm.residual.add_(x), replace(norm, residual=None))
        return total
    wide, size = as_type(x, torch.float32), x.shape[-1]
    inner = wide[0].numel() // size if len(wide) else 1
    if wide.numel() and not wide[0].is_contiguous():
        wide = wide.contiguous()
    _kept, normed = norm_arguments(norm, wide)
    y = workspace.empty(*wide.shape)
    threads.run(
        RMS_NORM,
        wide.numel() // size,
        numbers(NormRowsArgs(wide.data_ptr(), 4 * wide.stride(0), inner, normed, y.data_ptr(), size)),
        parallel=wide.numel() > SERIAL_VALUES,
    )
    return as_type(y, norm.dtype or x.dtype)


@implements(ops.gated_activation, "cpu", device="cpu", priority=20)
def gated_activation(gate_up: Tensor, activation: str) -> Tensor:
    wide = as_type(gate_up, torch.float32).contiguous()
    rows, size = wide.shape[0], wide.shape[1] // 2
    y = workspace.empty(rows, size)
    args = (wide.data_ptr(), y.data_ptr(), size, ACTIVATION_NUMBERS[activation])
    threads.run(GATED_ACTIVATION, rows, args, parallel=2 * y.numel() > SERIAL_VALUES)
    return as_type(y, gate_up.dtype)


@implements(ops.embedding, "cpu", device="cpu", priority=20)
def embedding(table: Tensor, rows: Tensor, scale: float = 1.0) -> Tensor:
    table, rows = table if table.stride(1) == 1 else table.contiguous(), rows.contiguous()
    assert rows.dtype == torch.int64
    y = workspace.empty(len(rows), table.shape[1])
    size, kind, stride = table.shape[1], FLOATS[table.dtype], table.stride(0) * table.element_size()
    args = (table.data_ptr(), stride, kind, rows.data_ptr(), y.data_ptr(), size, float_bits(scale))
    threads.run(EMBEDDING, len(rows), args, parallel=y.numel() > SERIAL_VALUES)
    return y


@implements(ops.gather_columns, "cpu", device="cpu", priority=20)
def gather_columns(x: Tensor, order: Tensor) -> Tensor:
    wide = as_type(x, torch.float32).contiguous()
    assert (order.dtype, order.shape) == (torch.int32, x.shape[1:])
    y = workspace.empty(*wide.shape)
    args = (wide.data_ptr(), order.data_ptr(), y.data_ptr(), wide.shape[1])
    threads.run(GATHER_COLUMNS, len(wide), args, parallel=y.numel() > SERIAL_VALUES)
    return as_type(y, x.dtype)


@implements(ops.add_positions, "cpu", device="cpu", priority=20)
def add_positions(x: Tensor, table: Tensor, positions: Tensor) -> None:
    assert (x.dtype, table.dtype, positions.dtype) == (torch.float32, torch.float32, torch.int32)
    assert all(tensor.is_contiguous() for tensor in (x, table, positions))
    args = (x.data_ptr(), table.data_ptr(), positions.data_ptr(), x.shape[1])
    threads.run(ADD_POSITIONS, len(x), args, parallel=x.numel() > SERIAL_VALUES)


@implements(ops.keep, "cpu", device="cpu", priority=20)
def keep(x: Tensor, residual: Tensor | None, out: Tensor, scale: float = 1.0) -> None:
    assert (x.dtype, out.dtype, x.shape) == (torch.float32, torch.float32, out.shape)
    assert x.is_contiguous()
    assert residual is None or (residual.dtype == torch.float32 and residual.is_contiguous())
    args = (x.data_ptr(), address(residual), out.data_ptr(), 4 * out.stride(0), x.shape[1], float_bits(scale))
    threads.run(KEEP, len(x), args, parallel=x.numel() > SERIAL_VALUES)


@implements(ops.ungated_activation, "cpu", device="cpu", priority=20)
def ungated_activation(x: Tensor, activation: str) -> Tensor:
    assert (x.dtype, x.is_contiguous()) == (torch.float32, True)
    args = x.data_ptr(), x.shape[1], ops.UNGATED.index(activation)
    threads.run(UNGATED_ACTIVATION, len(x), args, parallel=x.numel() > SERIAL_VALUES)
    return x


@implements(ops.multiply_gates, "cpu", device="cpu", priority=20)
def multiply_gates(x: Tensor, gates: Tensor, activation: str) -> Tensor:
    assert x.dtype == gates.dtype == torch.float32
    assert (x.stride(1), gates.stride(1), gates.shape) == (1, 1, x.shape)
    y = workspace.empty(*x.shape)
    rows = x.data_ptr(), 4 * x.stride(0), gates.data_ptr(), 4 * gates.stride(0)
    args = *rows, y.data_ptr(), x.shape[1], GATE_NUMBERS[activation]
    threads.run(MULTIPLY_GATES, len(x), args, parallel=x.numel() > SERIAL_VALUES >> 4)
    return y


@implements(query_ops.grown_queries, "cpu", device="cpu", priority=20)
def grown_queries(q: Tensor, positions: Tensor, growth: Growth) -> Tensor:
    q = q if q.dtype == torch.float32 and (not len(q) or q[0].is_contiguous()) else q.float().contiguous()
    assert positions.dtype == torch.int32
    y, positions = workspace.empty(*q.shape), positions.contiguous()
    size = q.shape[1] * q.shape[2]
    rows = q.data_ptr(), 4 * q.stride(0), positions.data_ptr(), y.data_ptr(), size
    args = *rows, float_bits(growth.rate), growth.length, growth.shift
    threads.run(GROWN_QUERIES, len(q), args, parallel=y.numel() > SERIAL_VALUES)
    return y


@implements(ops.softcap, "cpu", device="cpu", priority=20)
def softcap(x: Tensor, cap: float) -> Tensor:
    assert (x.dtype, x.is_contiguous()) == (torch.float32, True)
    rows, size = x.shape
    threads.run(SOFTCAP, rows, (x.data_ptr(), size, float_bits(cap)), parallel=x.numel() > SERIAL_VALUES >> 4)
    return x


@implements(ops.rope_angles, "cpu", device="cpu", priority=20)
def rope_angles(positions: Tensor, inv_freq: Tensor, magnitude: float) -> tuple[Tensor, Tensor]:
    positions, inv_freq, half = positions.contiguous(), inv_freq.contiguous(), len(inv_freq)
    assert (positions.dtype, inv_freq.dtype) == (torch.int32, torch.float32)
    cos, sin = workspace.empty(len(positions), half), workspace.empty(len(positions), half)
    args = (positions.data_ptr(), inv_freq.data_ptr(), float_bits(magnitude), cos.data_ptr(), sin.data_ptr(), half)
    threads.run(ROPE_ANGLES, len(positions), args, parallel=cos.numel() > SERIAL_VALUES >> 4)
    return cos, sin
