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
from lmkit.kernels.delta import DeltaWeights, heads_of
from lmkit.kernels.ops import BatchGeometry
from lmkit.kernels.recurrent import RecurrentStates
from lmkit.kernels.registry import implements

ONE, UNIT_EPS = np.float32(1), np.float32(ops.UNIT_EPS)
LINEAR = np.float32(20)  # softplus(x) is x from here on
USUAL_KERNEL = 4
ROWS = 4  # of a state that are taken together
SAVED = -2  # in place of a row: the scratch memory where the state before draft tokens is kept meanwhile


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
    rate_bits: int
    floor_bits: int
    sigmoid: int
    decays: int  # of a head: 1, or one for each row of a state
    windows: int
    matrices: int
    drafted: int
    drafts: int  # that a row has room for
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
def _channels(args: Any) -> Any:
    return 2 * args.key_heads * args.key_dim + args.value_heads * args.value_dim


@inline
def _convolve(args: Any, line: int, flat: Any, row: int, head: int, kept: int, mixed: Any) -> None:
    """The q, k and v of a key head, after convolution and SiLU. The window moves on. The inputs go to `kept`, unless it
    is 0."""
    dk, width = args.key_dim, args.value_heads // args.key_heads * args.value_dim
    start = head * (2 * dk + 2 * width)
    for part in range(3):
        offset, count = part * dk, width if part == 2 else dk
        first = part * args.key_heads * dk + head * count
        source = line + 4 * (first if flat else start + offset)
        _convolve_part(args, source, row, first, count, kept, offset, mixed)
    for i in range(2 * dk + width):
        mixed[i] = _silu(mixed[i])


@inline
def _convolve_part(
    args: Any, source: int, row: int, first: int, count: int, kept: int, offset: int, mixed: Any
) -> None:
    """The convolution of `count` channels from channel `first` on. Its results stand in mixed from `offset` on."""
    kernel, past, x = args.kernel, args.kernel - 1, _floats(source, count)
    weights = _floats(args.conv + 4 * first * kernel, count * kernel)
    window = _floats(args.windows + 4 * (row * _channels(args) + first) * past, count * past)
    if kept:
        copy(source, kept + 4 * first, 4 * count)
    if kernel == USUAL_KERNEL:
        for i in range(count):
            total = weights[4 * i + 3] * x[i]
            total += weights[4 * i] * window[3 * i]
            total += weights[4 * i + 1] * window[3 * i + 1]
            mixed[offset + i] = total + weights[4 * i + 2] * window[3 * i + 2]
            window[3 * i] = window[3 * i + 1]
            window[3 * i + 1] = window[3 * i + 2]
            window[3 * i + 2] = x[i]
        return
    for i in range(count):
        total = weights[i * kernel + past] * x[i]
        for j in range(past):
            total += weights[i * kernel + j] * window[i * past + j]
        mixed[offset + i] = total
        for j in range(past - 1):
            window[i * past + j] = window[i * past + j + 1]
        if past:
            window[i * past + past - 1] = x[i]


@inline
def _advance(
    state: int, mixed: Any, value: int, dk: int, dv: int, beta: Any, decay: Any, change: Any, out: Any
) -> None:
    """One token of a value head: the floats [dk, dv] at `state` move on, and out [dv] reads them. decay [dk].

    Rows are taken ROWS at a time, each as an array of its own, so that sums stay in registers meanwhile. The order of
    additions is that of the rows.
    """
    change[:], out[:] = np.float32(0), np.float32(0)
    whole = dk // ROWS * ROWS
    for i in range(0, whole, ROWS):
        a, b, c, d = _rows(state, i, dv)
        ka, kb, kc, kd = mixed[dk + i], mixed[dk + i + 1], mixed[dk + i + 2], mixed[dk + i + 3]
        fa, fb, fc, fd = decay[i], decay[i + 1], decay[i + 2], decay[i + 3]
        for j in range(dv):
            total = change[j] + fa * a[j] * ka
            total += fb * b[j] * kb
            total += fc * c[j] * kc
            change[j] = total + fd * d[j] * kd
    for i in range(whole, dk):
        a, ka, fa = _floats(state + 4 * i * dv, dv), mixed[dk + i], decay[i]
        for j in range(dv):
            change[j] += fa * a[j] * ka
    for j in range(dv):
        change[j] = (mixed[value + j] - change[j]) * beta
    for i in range(0, whole, ROWS):
        a, b, c, d = _rows(state, i, dv)
        ka, kb, kc, kd = mixed[dk + i], mixed[dk + i + 1], mixed[dk + i + 2], mixed[dk + i + 3]
        qa, qb, qc, qd = mixed[i], mixed[i + 1], mixed[i + 2], mixed[i + 3]
        fa, fb, fc, fd = decay[i], decay[i + 1], decay[i + 2], decay[i + 3]
        for j in range(dv):
            step = change[j]
            a[j] = fa * a[j] + ka * step
            b[j] = fb * b[j] + kb * step
            c[j] = fc * c[j] + kc * step
            d[j] = fd * d[j] + kd * step
            total = out[j] + a[j] * qa
            total += b[j] * qb
            total += c[j] * qc
            out[j] = total + d[j] * qd
    for i in range(whole, dk):
        a, ka, qa, fa = _floats(state + 4 * i * dv, dv), mixed[dk + i], mixed[i], decay[i]
        for j in range(dv):
            a[j] = fa * a[j] + ka * change[j]
            out[j] += a[j] * qa


@inline
def _rows(state: int, i: int, dv: int) -> Any:
    """ROWS rows of a state from row i on."""
    at, size = state + 4 * i * dv, 4 * dv
    return _floats(at, dv), _floats(at + size, dv), _floats(at + 2 * size, dv), _floats(at + 3 * size, dv)


@inline
def _fill(place: int, from_row: int, to_row: int, stride: int, size: int, saved: int) -> None:
    """Copy `size` bytes at `place` of row 0 from row to row, `stride` bytes apart. Row -1 has zeros, and row SAVED is
    at `saved`."""
    target = saved if to_row == SAVED else place + to_row * stride
    if from_row == -1:
        carray(pointer(target), size, np.uint8)[:] = np.uint8(0)
    else:
        copy(saved if from_row == SAVED else place + from_row * stride, target, size)


@inline
def _set(args: Any, from_row: int, to_row: int, head: int, saved: int) -> None:
    """Copy the windows and matrices of a key head from row to row. See `_fill`."""
    dk, past, per = args.key_dim, args.kernel - 1, args.value_heads // args.key_heads
    width, stride = per * args.value_dim, 4 * past * _channels(args)
    for part in range(2):
        at = args.windows + 4 * (part * args.key_heads + head) * dk * past
        _fill(at, from_row, to_row, stride, 4 * dk * past, saved + 4 * part * dk * past)
    at = args.windows + 4 * (2 * args.key_heads * dk + head * width) * past
    _fill(at, from_row, to_row, stride, 4 * width * past, saved + 8 * dk * past)
    size = 4 * width * dk
    at = args.matrices + head * size
    _fill(at, from_row, to_row, args.key_heads * size, size, saved + 4 * (2 * dk + width) * past)


@inline
def _kept(args: Any, row: int, draft: int) -> Any:
    """The address of what a draft token gives to the state."""
    return args.drafted + 4 * (row * args.drafts + draft) * (_channels(args) + (1 + args.decays) * args.value_heads)


@inline
def _decay(args: Any, number: int, a: Any, decay: Any) -> None:
    """What the rows of value head `number` are multiplied with, from a [decays], or [1] for all: decay [dk]."""
    speed = exp(_floats(args.a_log, args.value_heads)[number])
    dt_bias = _floats(args.dt_bias + 4 * number * args.decays, args.decays)
    floor = bits_to_float(np.uint32(args.floor_bits))
    for i in range(args.decays):
        step = a[i] + dt_bias[i]
        if floor < 0:
            decay[i] = exp(floor / (ONE + exp(-speed * step)))
            continue
        if step < LINEAR:
            step = np.float32(math.log1p(exp(step)))
        decay[i] = exp(-speed * step)
    if args.decays == 1:
        decay[:] = decay[0]


@inline
def _finish(args: Any, out: Any, gates: Any, dv: int) -> None:
    """Normalize what a value head reads, and gate it."""
    norm, eps = _floats(args.norm, dv), bits_to_float(np.uint32(args.eps_bits))
    total = np.float32(0)
    for j in range(dv):
        total += out[j] * out[j]
    factor = ONE / np.float32(math.sqrt(total / np.float32(dv) + eps))
    if args.sigmoid:
        for j in range(dv):
            out[j] = out[j] * factor * norm[j] / (ONE + exp(-gates[j]))
    else:
        for j in range(dv):
            out[j] = out[j] * factor * norm[j] * _silu(gates[j])


def _gated_delta(arguments: int, scratch: int, index: int) -> None:
    args = read(arguments, DeltaArgs)
    heads, dk, dv, per = args.key_heads, args.key_dim, args.value_dim, args.value_heads // args.key_heads
    b, head = index // heads, index % heads
    places = carray(pointer(args.query_start), b + 2, np.int32)
    start, end = np.int64(places[b]), np.int64(places[b + 1])
    places = carray(pointer(args.rows + 24 * b), 6, np.int32)
    row, source, snapshot, after = np.int64(places[0]), np.int64(places[1]), np.int64(places[2]), np.int64(places[3])
    first, drafted = start - np.int64(places[4]), end - np.int64(places[5])
    span = 2 * dk + per * dv
    mixed, change, unused = _floats(scratch, span), _floats(scratch + 4 * span, dv), scratch + 4 * (span + dv)
    decay, saved = _floats(unused + 4 * dv, dk), unused + 4 * (dv + dk)
    if source != row:
        _set(args, source, row, head, saved)
    rate, decays, width = bits_to_float(np.uint32(args.rate_bits)), args.decays, (1 + args.decays) * args.value_heads
    for t in range(first, end):
        again, kept = t < start, 0
        line, at = args.y + 4 * t * args.width, args.gates + 4 * t * width
        if again:
            line = _kept(args, row, t - first)
            at = line + 4 * _channels(args)
        if t >= drafted:
            kept = _kept(args, row, t - drafted)
            if t == drafted:
                _set(args, row, SAVED, head, saved)
        flat = again or args.flat != 0
        _convolve(args, line, flat, row, head, kept, mixed)
        _unit(mixed, 0, dk, ONE / np.float32(math.sqrt(np.float32(dk))))
        _unit(mixed, dk, dk, ONE)
        z = line + 4 * (heads * span + head * per * dv if args.flat else head * (span + per * dv) + span)
        ba, ba_kept = _floats(at, width), _floats(kept + 4 * _channels(args), width)
        for i in range(per):
            number = head * per + i
            b_at = number if flat else 2 * head * per + i
            a_at = args.value_heads + number * decays if flat else b_at + per
            if kept:
                ba_kept[number] = ba[b_at]
                copy(at + 4 * a_at, kept + 4 * (_channels(args) + args.value_heads + number * decays), 4 * decays)
            _decay(args, number, ba[a_at:], decay)
            beta = rate / (ONE + exp(-ba[b_at]))
            state = args.matrices + 4 * (row * args.value_heads + number) * dk * dv
            out = _floats(unused if again else args.out + 4 * (t * args.value_heads + number) * dv, dv)
            _advance(state, mixed, 2 * dk + i * dv, dk, dv, beta, decay, change, out)
            if not again:
                _finish(args, out, _floats(z + 4 * i * dv, dv), dv)
        if snapshot >= 0 and t - first + 1 == after:
            _set(args, row, snapshot, head, saved)
    if drafted < end:
        _set(args, SAVED, row, head, saved)


GATED_DELTA = Task(_gated_delta)


@implements(ops.gated_delta, "cpu", device="cpu", priority=20)
def gated_delta(
    y: Tensor, gates: Tensor, weights: DeltaWeights, states: RecurrentStates, rows: Tensor, geometry: BatchGeometry
) -> Tensor:
    assert (y.dtype, y.is_contiguous(), rows.dtype, rows.is_contiguous()) == (torch.float32, True, torch.int32, True)
    assert weights.conv.is_contiguous()
    assert gates.is_contiguous()
    assert weights.flat or weights.decays == 1
    key_heads, value_heads, key_dim, value_dim = heads_of(states)
    out = workspace.empty(len(y), value_heads * value_dim)
    args = DeltaArgs(
        y.data_ptr(), y.shape[1], gates.data_ptr(), int(weights.flat), geometry.query_start.data_ptr(), rows.data_ptr(),
        weights.conv.data_ptr(), weights.a_log.data_ptr(), weights.dt_bias.data_ptr(), weights.norm.data_ptr(),
        float_bits(weights.eps), float_bits(weights.rate), float_bits(weights.floor), int(weights.sigmoid),
        weights.decays,
        states.conv.data_ptr(), states.matrix.data_ptr(), states.drafted.data_ptr(),
        states.drafted.shape[1], weights.conv.shape[1],
        key_heads, value_heads, key_dim, value_dim, out.data_ptr(),
    )  # fmt: skip
    span = 2 * key_dim + value_heads // key_heads * value_dim
    scratch = 4 * (span + 2 * value_dim + key_dim)
    if states.drafted.numel():
        scratch += 4 * (span * (weights.conv.shape[1] - 1) + (span - 2 * key_dim) * key_dim)
    threads.run(GATED_DELTA, len(rows) * key_heads, numbers(args), scratch=scratch)
    return out
