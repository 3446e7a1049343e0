"""The scan of Mamba-2 on the CPU.

A task for each sequence and head takes the tokens in order. Each tile of a state stays in registers for all tokens of
a stretch, so that a prompt reads and writes a state once for STRETCH tokens. A new token is a stretch of one. The order
of sums is the same in both, so a result does not depend on how a sequence is cut. The form with products of matrices of
tokens has a quarter fewer multiplications at these sizes, and its sums would depend on the cuts.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import numpy as np
from numba import carray, types
from numba.core import cgutils
from numba.extending import intrinsic
from torch import Tensor

from lmkit.kernels import recurrent_ops
from lmkit.kernels.cpu import isa, threads, workspace
from lmkit.kernels.cpu.emit import F32, Emitter
from lmkit.kernels.cpu.intrinsics import bits_to_float, copy, exp, pointer
from lmkit.kernels.cpu.jit import Task, float_bits, inline
from lmkit.kernels.cpu.short_conv import convolve, floats, silu
from lmkit.kernels.cpu.structs import numbers, read
from lmkit.kernels.ops import BatchGeometry
from lmkit.kernels.recurrent import RecurrentStates
from lmkit.kernels.registry import implements
from lmkit.kernels.selective_scan import ScanWeights

STRETCH = 64  # tokens
LANES = isa.host().lanes
TILE_ROWS = 8 if isa.host().registers == 32 else 4  # of a state; a tile has twice LANES columns
ONE, LINEAR = np.float32(1), np.float32(20)  # softplus(x) is x from LINEAR on


class ScanArgs(NamedTuple):
    gates: int  # dt of row 0
    width: int  # of a row of y
    mixed: int
    channels: int
    query_start: int
    rows: int
    a_log: int
    dt_bias: int
    d: int
    low_bits: int
    high_bits: int
    matrices: int
    drafted: int
    drafts: int  # that a row has room for
    heads: int
    groups: int
    size: int  # N
    dim: int  # P
    tokens: int  # of the step
    out: int


class GateArgs(NamedTuple):
    z: int
    width: int  # of a row
    inner: int
    groups: int
    norm: int
    eps_bits: int
    out: int


class Stretch(NamedTuple):
    """Tokens side by side, as a tile reads them. Addresses, and bytes from a token to the next."""

    b: int
    c: int
    bc_step: int
    x: int  # dt x
    x_step: int
    decays: int
    out: int
    out_step: int
    num_tokens: int


@intrinsic(prefer_literal=True)
def _tile(typing: Any, rows: Any, vectors: Any, lanes: Any, state: Any, row_step: Any, stretch: Any) -> Any:
    """Take the tokens of a stretch: `rows` rows and `vectors * lanes` columns of a state move on, in registers. What
    the rows give is added to `out`."""
    num_rows, num_vectors, width = rows.literal_value, vectors.literal_value, lanes.literal_value

    def codegen(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        place, step = arguments[3:5]
        b, c, bc_step, x, x_step, decays, out, out_step, count = cgutils.unpack_tuple(builder, arguments[5])
        e = Emitter(builder, width)
        kind = e.vector(F32)
        tile = e.variables(num_rows, num_vectors, kind)

        def of_state(i: int, j: int) -> Any:
            return e.offset(place, e.times(step, i), 4 * width * j)

        for i in range(num_rows):
            for j in range(num_vectors):
                builder.store(e.load(of_state(i, j), kind), tile[i][j])
        with e.loop(count, unroll=False) as t:
            at_b, at_c = (e.offset(start, e.times(t, bc_step)) for start in (b, c))
            at_x, at_out = e.offset(x, e.times(t, x_step)), e.offset(out, e.times(t, out_step))
            decay = e.splat(e.load(e.offset(decays, e.times(t, 4)), F32))
            given = [e.load(e.offset(at_x, 4 * width * j), kind) for j in range(num_vectors)]
            sums = [e.load(e.offset(at_out, 4 * width * j), kind) for j in range(num_vectors)]
            for i in range(num_rows):
                gives, takes = (e.splat(e.load(e.offset(at, 4 * i), F32)) for at in (at_b, at_c))
                for j in range(num_vectors):
                    kept = builder.fmul(builder.load(tile[i][j]), decay)
                    moved = e.fma(gives, given[j], kept)
                    builder.store(moved, tile[i][j])
                    sums[j] = e.fma(takes, moved, sums[j])
            for j in range(num_vectors):
                e.store(sums[j], e.offset(at_out, 4 * width * j))
        for i in range(num_rows):
            for j in range(num_vectors):
                e.store(builder.load(tile[i][j]), of_state(i, j))
        return context.get_dummy_value()

    return types.void(rows, vectors, lanes, types.int64, types.int64, stretch), codegen


def _rows_of(rows: int) -> Any:
    """Lets `rows` rows of a state take the tokens of a stretch, tile by tile."""

    @inline
    def take(state: int, dim: int, b: int, c: int, stretch: Any) -> None:
        step, at = 4 * dim, 0
        while at < dim:
            moved = Stretch(
                b, c, stretch.bc_step, stretch.x + 4 * at, stretch.x_step, stretch.decays, stretch.out + 4 * at,
                stretch.out_step, stretch.num_tokens,
            )  # fmt: skip
            if at + 2 * LANES <= dim:
                _tile(rows, 2, LANES, state + 4 * at, step, moved)
                at += 2 * LANES
            elif at + LANES <= dim:
                _tile(rows, 1, LANES, state + 4 * at, step, moved)
                at += LANES
            else:
                _tile(rows, 1, 1, state + 4 * at, step, moved)
                at += 1

    return take


_take_rows, _take_row = _rows_of(TILE_ROWS), _rows_of(1)


@inline
def _advance(args: Any, state: int, stretch: Any) -> None:
    """A state takes the tokens of a stretch."""
    i, step = 0, 4 * args.dim
    while i < args.size:
        b, c = stretch.b + 4 * i, stretch.c + 4 * i
        if i + TILE_ROWS <= args.size:
            _take_rows(state + i * step, args.dim, b, c, stretch)
            i += TILE_ROWS
        else:
            _take_row(state + i * step, args.dim, b, c, stretch)
            i += 1


@inline
def _prepare(args: Any, head: int, steps: int, step_stride: int, stretch: Any, x: int) -> None:
    """Fill decays, dt x, and `out` with d x. `steps`: where dt of the first token is."""
    dt_bias, a_log = floats(args.dt_bias, args.heads)[head], floats(args.a_log, args.heads)[head]
    low, high = bits_to_float(np.uint32(args.low_bits)), bits_to_float(np.uint32(args.high_bits))
    d, rate, decays = floats(args.d, args.heads)[head], -exp(a_log), floats(stretch.decays, stretch.num_tokens)
    for t in range(stretch.num_tokens):
        step = floats(steps + t * step_stride, 1)[0] + dt_bias
        if step < LINEAR:
            step = np.float32(math.log1p(exp(step)))
        step = min(max(step, low), high)
        decays[t] = exp(rate * step)
        values = floats(x + t * stretch.bc_step, args.dim)
        scaled = floats(stretch.x + t * stretch.x_step, args.dim)
        out = floats(stretch.out + t * stretch.out_step, args.dim)
        for i in range(args.dim):
            scaled[i] = step * values[i]
            out[i] = d * values[i]


def _selective_scan(arguments: int, scratch: int, index: int) -> None:
    args = read(arguments, ScanArgs)
    b, head = index // args.heads, index % args.heads
    places = carray(pointer(args.query_start), b + 2, np.int32)
    start, end = np.int64(places[b]), np.int64(places[b + 1])
    places = carray(pointer(args.rows + 24 * b), 6, np.int32)
    row, source, snapshot, after = np.int64(places[0]), np.int64(places[1]), np.int64(places[2]), np.int64(places[3])
    first, drafted = start - np.int64(places[4]), end - np.int64(places[5])
    dim, inner, size = args.dim, args.heads * args.dim, 4 * args.size * args.dim
    row_size, kept_size = args.heads * size, 4 * (args.channels + args.heads)
    decays, scaled = scratch, scratch + 4 * STRETCH
    unused = scaled + 4 * STRETCH * dim
    loose = unused + 4 * STRETCH * dim  # the state of draft tokens
    of_head = args.matrices + head * size
    state, of_row = of_head + row * row_size, args.drafted + row * args.drafts * kept_size
    if source == -1:
        carray(pointer(state), size, np.uint8)[:] = np.uint8(0)
    elif source != row:
        copy(of_head + source * row_size, state, size)
    group = head // (args.heads // args.groups)
    b_at = args.mixed + 4 * (inner + group * args.size)
    begin, snapshot_at = first, first + after if snapshot >= 0 else first
    while begin < end:
        again = begin < start
        stop = min(begin + STRETCH, end)
        if begin < start:
            stop = min(stop, start)
        if begin < drafted:
            stop = min(stop, drafted)
        if begin < snapshot_at:
            stop = min(stop, snapshot_at)
        at = args.tokens + b * args.drafts + begin - first if again else begin
        line = 4 * args.channels
        out, out_step = args.out + 4 * (begin * inner + head * dim), 4 * inner
        if again:
            out, out_step = unused, 4 * dim
        stretch = Stretch(
            b_at + at * line, b_at + at * line + 4 * args.groups * args.size, line, scaled, 4 * dim, decays, out,
            out_step, int(stop - begin),
        )  # fmt: skip
        steps, step_stride = args.gates + 4 * (begin * args.width + head), 4 * args.width
        if again:
            steps, step_stride = of_row + (begin - first) * kept_size + 4 * (args.channels + head), kept_size
        if begin >= drafted:
            if begin == drafted:
                copy(state, loose, size)
                state = loose
            for t in range(stop - begin):
                kept = of_row + (begin - drafted + t) * kept_size + 4 * (args.channels + head)
                copy(steps + t * step_stride, kept, 4)
        _prepare(args, head, steps, step_stride, stretch, args.mixed + at * line + 4 * head * dim)
        _advance(args, state, stretch)
        if stop == snapshot_at and snapshot >= 0:
            copy(state, of_head + snapshot * row_size, size)
        begin = stop


def _gate(arguments: int, scratch: int, index: int) -> None:
    """out = out silu(z), over the root of its mean square in each group, times norm."""
    args = read(arguments, GateArgs)
    size = args.inner // args.groups
    eps = bits_to_float(np.uint32(args.eps_bits))
    for group in range(args.groups):
        at = 4 * group * size
        out = floats(args.out + 4 * index * args.inner + at, size)
        z = floats(args.z + 4 * index * args.width + at, size)
        norm, total = floats(args.norm + at, size), np.float32(0)
        for i in range(size):
            out[i] *= silu(z[i])
        for i in range(size):
            total += out[i] * out[i]
        factor = ONE / np.float32(math.sqrt(total / np.float32(size) + eps))
        for i in range(size):
            out[i] *= factor * norm[i]


SELECTIVE_SCAN, GATE = Task(_selective_scan), Task(_gate)


@implements(recurrent_ops.selective_scan, "cpu", device="cpu", priority=20)
def selective_scan(
    y: Tensor, weights: ScanWeights, states: RecurrentStates, rows: Tensor, geometry: BatchGeometry
) -> Tensor:
    _, heads, size, dim = states.matrix.shape
    inner, channels, tokens = heads * dim, states.conv.shape[1], len(y)
    assert all(x.is_contiguous() for x in (states.matrix, weights.a_log, weights.dt_bias, weights.d, weights.norm))
    mixed = convolve(y[:, inner:], weights.taps, states, rows, geometry, gated=False)
    out = workspace.empty(tokens, inner)
    low, high = map(float_bits, weights.limits)
    args = ScanArgs(
        y.data_ptr() + 4 * (inner + channels), y.stride(0), mixed.data_ptr(), channels, geometry.query_start.data_ptr(),
        rows.data_ptr(), weights.a_log.data_ptr(), weights.dt_bias.data_ptr(), weights.d.data_ptr(), low, high,
        states.matrix.data_ptr(), states.drafted.data_ptr(), states.drafted.shape[1], heads, weights.groups, size, dim,
        tokens, out.data_ptr(),
    )  # fmt: skip
    scratch = 4 * (STRETCH * (2 * dim + 1) + (size * dim if states.drafted.numel() else 0))
    threads.run(SELECTIVE_SCAN, len(rows) * heads, numbers(args), scratch=scratch)
    gate = GateArgs(
        y.data_ptr(), y.stride(0), inner, weights.groups, weights.norm.data_ptr(), float_bits(weights.eps),
        out.data_ptr(),
    )  # fmt: skip
    threads.run(GATE, tokens, numbers(gate))
    return out
