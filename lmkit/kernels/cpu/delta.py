"""Gated delta-rule linear attention on the CPU: a task for each sequence and key head takes the tokens in order."""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import numpy as np
import torch
from numba import carray
from torch import Tensor

from lmkit.kernels import ops
from lmkit.kernels.cpu import threads, workspace
from lmkit.kernels.cpu.intrinsics import bits_to_float, copy, exp, pointer
from lmkit.kernels.cpu.jit import Task, float_bits, inline
from lmkit.kernels.cpu.structs import numbers, read
from lmkit.kernels.delta import DeltaStates, DeltaWeights
from lmkit.kernels.ops import BatchGeometry
from lmkit.kernels.registry import implements

ONE, UNIT_EPS = np.float32(1), np.float32(ops.UNIT_EPS)
LINEAR = np.float32(20)  # softplus(x) is x from here on


class DeltaArgs(NamedTuple):
    y: int
    width: int  # of a row
    gates: int
    flat: int
    query_start: int
    rows: int
    conv: int
    a_log: int
    dt_bias: int
    norm: int
    eps_bits: int
    windows: int
    matrices: int
    kernel: int
    key_heads: int
    value_heads: int
    key_dim: int
    value_dim: int
    out: int


@inline
def _floats(address: int, count: int) -> Any:
    return carray(pointer(address), count, np.float32)


@inline
def _silu(x: Any) -> Any:
    return x / (ONE + exp(-x))


@inline
def _unit(x: Any, start: int, count: int, factor: Any) -> None:
    """Scale `count` elements of x to length `factor`."""
    total = np.float32(0)
    for i in range(start, start + count):
        total += x[i] * x[i]
    factor = factor / np.float32(math.sqrt(total + UNIT_EPS))
    for i in range(start, start + count):
        x[i] *= factor


@inline
def _convolve(args: Any, line: int, row: int, head: int, mixed: Any) -> None:
    """The q, k and v of a key head, after convolution and SiLU. The window moves on."""
    kernel, dk, groups = args.kernel, args.key_dim, args.value_heads // args.key_heads * args.value_dim
    channels, past = 2 * args.key_heads * dk + args.value_heads * args.value_dim, kernel - 1
    x, start = _floats(line, channels + args.value_heads * args.value_dim), head * (2 * dk + 2 * groups)
    weights = _floats(args.conv, channels * kernel)
    window = _floats(args.windows + 4 * row * channels * past, channels * past)
    for i in range(2 * dk + groups):
        if i < dk:
            channel = head * dk + i
        elif i < 2 * dk:
            channel = (args.key_heads + head) * dk + i - dk
        else:
            channel = 2 * args.key_heads * dk + head * groups + i - 2 * dk
        new = x[channel] if args.flat else x[start + i]
        total = weights[channel * kernel + past] * new
        for j in range(past):
            total += weights[channel * kernel + j] * window[channel * past + j]
        for j in range(past - 1):
            window[channel * past + j] = window[channel * past + j + 1]
        if past:
            window[channel * past + past - 1] = new
        mixed[i] = _silu(total)


@inline
def _advance(
    state: Any, mixed: Any, value: int, dk: int, dv: int, beta: Any, decay: Any, change: Any, out: Any
) -> None:
    """One token of a value head: state [dk * dv] moves on, and out [dv] reads it."""
    change[:], out[:] = np.float32(0), np.float32(0)
    for i in range(dk):
        k = mixed[dk + i]
        for j in range(dv):
            state[i * dv + j] *= decay
            change[j] += state[i * dv + j] * k
    for j in range(dv):
        change[j] = (mixed[value + j] - change[j]) * beta
    for i in range(dk):
        q, k = mixed[i], mixed[dk + i]
        for j in range(dv):
            state[i * dv + j] += k * change[j]
            out[j] += state[i * dv + j] * q


@inline
def _fill(place: int, from_row: int, to_row: int, stride: int, size: int) -> None:
    """Copy `size` bytes at `place` of row 0 from row to row, `stride` bytes apart. Row -1 has zeros."""
    if from_row < 0:
        carray(pointer(place + to_row * stride), size, np.uint8)[:] = np.uint8(0)
    else:
        copy(place + from_row * stride, place + to_row * stride, size)


@inline
def _set(args: Any, from_row: int, to_row: int, head: int) -> None:
    """Copy the windows and matrices of a key head from row to row. Row -1 has zeros."""
    dk, past, per = args.key_dim, args.kernel - 1, args.value_heads // args.key_heads
    width, stride = per * args.value_dim, 4 * past * (2 * args.key_heads * dk + args.value_heads * args.value_dim)
    for part in range(2):
        at = args.windows + 4 * (part * args.key_heads + head) * dk * past
        _fill(at, from_row, to_row, stride, 4 * dk * past)
    at = args.windows + 4 * (2 * args.key_heads * dk + head * width) * past
    _fill(at, from_row, to_row, stride, 4 * width * past)
    size = 4 * width * dk
    _fill(args.matrices + head * size, from_row, to_row, args.key_heads * size, size)


def _gated_delta(arguments: int, scratch: int, index: int) -> None:
    args = read(arguments, DeltaArgs)
    heads, dk, dv, per = args.key_heads, args.key_dim, args.value_dim, args.value_heads // args.key_heads
    b, head = index // heads, index % heads
    start, end = carray(pointer(args.query_start), b + 2, np.int32)[b : b + 2]
    places = carray(pointer(args.rows + 16 * b), 4, np.int32)
    row, source, snapshot, after = np.int64(places[0]), np.int64(places[1]), np.int64(places[2]), np.int64(places[3])
    if source != row:
        _set(args, source, row, head)
    span = 2 * dk + per * dv
    mixed, change = _floats(scratch, span), _floats(scratch + 4 * span, dv)
    norm, eps = _floats(args.norm, dv), bits_to_float(np.uint32(args.eps_bits))
    a_log, dt_bias = _floats(args.a_log, args.value_heads), _floats(args.dt_bias, args.value_heads)
    for t in range(np.int64(start), np.int64(end)):
        line = args.y + 4 * t * args.width
        _convolve(args, line, row, head, mixed)
        _unit(mixed, 0, dk, ONE / np.float32(math.sqrt(np.float32(dk))))
        _unit(mixed, dk, dk, ONE)
        z = line + 4 * (heads * span + head * per * dv if args.flat else head * (span + per * dv) + span)
        gates, ba = _floats(z, per * dv), _floats(args.gates + 8 * t * args.value_heads, 2 * args.value_heads)
        for i in range(per):
            number = head * per + i
            b_at = number if args.flat else 2 * head * per + i
            a_at = b_at + (args.value_heads if args.flat else per)
            step = ba[a_at] + dt_bias[number]
            if step < LINEAR:
                step = np.float32(math.log1p(exp(step)))
            beta, decay = ONE / (ONE + exp(-ba[b_at])), exp(-exp(a_log[number]) * step)
            state = _floats(args.matrices + 4 * (row * args.value_heads + number) * dk * dv, dk * dv)
            out = _floats(args.out + 4 * (t * args.value_heads + number) * dv, dv)
            _advance(state, mixed, 2 * dk + i * dv, dk, dv, beta, decay, change, out)
            total = np.float32(0)
            for j in range(dv):
                total += out[j] * out[j]
            factor = ONE / np.float32(math.sqrt(total / np.float32(dv) + eps))
            for j in range(dv):
                out[j] = out[j] * factor * norm[j] * _silu(gates[i * dv + j])
        if snapshot >= 0 and t - start + 1 == after:
            _set(args, row, snapshot, head)


GATED_DELTA = Task(_gated_delta)


@implements(ops.gated_delta, "cpu", device="cpu", priority=20)
def gated_delta(
    y: Tensor, gates: Tensor, weights: DeltaWeights, states: DeltaStates, rows: Tensor, geometry: BatchGeometry
) -> Tensor:
    assert (y.dtype, y.is_contiguous(), rows.dtype, rows.is_contiguous()) == (torch.float32, True, torch.int32, True)
    assert weights.conv.is_contiguous()
    assert gates.is_contiguous()
    key_heads, value_heads, key_dim, value_dim = states.heads
    out = workspace.empty(len(y), value_heads * value_dim)
    args = DeltaArgs(
        y.data_ptr(), y.shape[1], gates.data_ptr(), int(weights.flat), geometry.query_start.data_ptr(), rows.data_ptr(),
        weights.conv.data_ptr(), weights.a_log.data_ptr(), weights.dt_bias.data_ptr(), weights.norm.data_ptr(),
        float_bits(weights.eps), states.conv.data_ptr(), states.matrix.data_ptr(), weights.conv.shape[1],
        key_heads, value_heads, key_dim, value_dim, out.data_ptr(),
    )  # fmt: skip
    scratch = 4 * (2 * key_dim + value_heads // key_heads * value_dim + value_dim)
    threads.run(GATED_DELTA, len(rows) * key_heads, numbers(args), scratch=scratch)
    return out
