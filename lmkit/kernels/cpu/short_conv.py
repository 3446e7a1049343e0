"""Causal convolution of each channel on the CPU: a task takes the tokens of a sequence in order, for TILE channels."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
import torch
from numba import carray
from torch import Tensor

from lmkit.kernels import recurrent_ops
from lmkit.kernels.cpu import threads, workspace
from lmkit.kernels.cpu.intrinsics import copy, exp, pointer
from lmkit.kernels.cpu.jit import Task, inline
from lmkit.kernels.cpu.structs import numbers, read
from lmkit.kernels.ops import BatchGeometry
from lmkit.kernels.recurrent import RecurrentStates
from lmkit.kernels.registry import implements
from lmkit.kernels.short_conv import ConvWeights

TILE = 128  # channels of a task
ONE = np.float32(1)


class ConvArgs(NamedTuple):
    y: int  # where the channels begin in row 0
    width: int  # of a row
    gated: int  # whether a row has b, gates and x side by side; otherwise it has x, and SiLU comes last
    query_start: int
    rows: int
    weights: int
    bias: int  # 0 = none
    windows: int
    drafted: int
    drafts: int  # that a row has room for
    kept: int  # numbers of a draft token
    kernel: int
    channels: int
    out: int
    again: int  # the row of `out` for the first draft token of the step before, of sequence 0; -1 = none is wanted


@inline
def floats(address: int, count: int) -> Any:
    return carray(pointer(address), count, np.float32)


@inline
def silu(x: Any) -> Any:
    return x / (ONE + exp(-x))


@inline
def _store(args: Any, past: int, row: int, first: int, count: int) -> None:
    """Write the last inputs of the tile's channels to a row of the states."""
    size = args.kernel - 1
    window = floats(args.windows + 4 * (row * args.channels + first) * size, count * size)
    for j in range(size):
        inputs = floats(past + 4 * j * TILE, count)
        for i in range(count):
            window[i * size + j] = inputs[i]


@inline
def _load(args: Any, past: int, taps: int, row: int, first: int, count: int) -> None:
    """Read the taps of the tile's channels, and their last inputs from a row of the states; row -1 has zeros."""
    kernel, size = args.kernel, args.kernel - 1
    weights = floats(args.weights + 4 * first * kernel, count * kernel)
    for j in range(kernel):
        column = floats(taps + 4 * j * TILE, count)
        for i in range(count):
            column[i] = weights[i * kernel + j]
    window = floats(args.windows + 4 * (max(row, 0) * args.channels + first) * size, count * size)
    for j in range(size):
        inputs = floats(past + 4 * j * TILE, count)
        if row < 0:
            inputs[:] = np.float32(0)
        else:
            for i in range(count):
                inputs[i] = window[i * size + j]


@inline
def _read(args: Any, line: int, kept: int, first: int, count: int, current: int) -> None:
    """The inputs of a token's channels: from a row of y, or what a draft token kept if `kept` is not 0."""
    if kept:
        copy(kept + 4 * first, current, 4 * count)
    elif args.gated:
        x, b, other = floats(current, count), floats(line, count), floats(line + 8 * args.channels, count)
        for i in range(count):
            x[i] = b[i] * other[i]
    else:
        copy(line, current, 4 * count)


@inline
def _mix(args: Any, past: int, taps: int, mixed: int, first: int, count: int) -> None:
    """The convolution of a token's channels. The window moves on."""
    kernel, total = args.kernel, floats(mixed, count)
    if args.bias:
        copy(args.bias + 4 * first, mixed, 4 * count)
    else:
        total[:] = np.float32(0)
    for j in range(kernel):
        inputs, weights = floats(past + 4 * j * TILE, count), floats(taps + 4 * j * TILE, count)
        for i in range(count):
            total[i] += inputs[i] * weights[i]
    for j in range(kernel - 1):
        copy(past + 4 * (j + 1) * TILE, past + 4 * j * TILE, 4 * count)


def _short_conv(arguments: int, scratch: int, index: int) -> None:
    args = read(arguments, ConvArgs)
    tiles = (args.channels + TILE - 1) // TILE
    b, begin = index // tiles, index % tiles * TILE
    count = min(TILE, args.channels - begin)
    places = carray(pointer(args.query_start), b + 2, np.int32)
    start, end = np.int64(places[b]), np.int64(places[b + 1])
    places = carray(pointer(args.rows + 24 * b), 6, np.int32)
    row, source, snapshot, after = np.int64(places[0]), np.int64(places[1]), np.int64(places[2]), np.int64(places[3])
    first, drafted = start - np.int64(places[4]), end - np.int64(places[5])
    past, taps = scratch, scratch + 4 * args.kernel * TILE
    mixed = taps + 4 * args.kernel * TILE
    _load(args, past, taps, source, begin, count)
    current = past + 4 * (args.kernel - 1) * TILE
    of_row = args.drafted + 4 * row * args.drafts * args.kept
    for t in range(first, end):
        line = args.y + 4 * (t * args.width + begin)
        _read(args, line, of_row + 4 * (t - first) * args.kept if t < start else 0, begin, count, current)
        if t == drafted:
            _store(args, past, row, begin, count)
        if t >= drafted:
            copy(current, of_row + 4 * ((t - drafted) * args.kept + begin), 4 * count)
        _mix(args, past, taps, mixed, begin, count)
        at = t if t >= start else args.again + b * args.drafts + t - first
        if args.again >= 0 or t >= start:
            total, out = floats(mixed, count), floats(args.out + 4 * (at * args.channels + begin), count)
            if args.gated:
                gates = floats(line + 4 * args.channels, count)
                for i in range(count):
                    out[i] = gates[i] * total[i]
            else:
                for i in range(count):
                    out[i] = silu(total[i])
        if snapshot >= 0 and t - first + 1 == after:
            _store(args, past, snapshot, begin, count)
    if drafted == end:
        _store(args, past, row, begin, count)


SHORT_CONV = Task(_short_conv)


def convolve(
    y: Tensor,
    weights: ConvWeights,
    states: RecurrentStates,
    rows: Tensor,
    geometry: BatchGeometry,
    *,
    gated: bool,
) -> Tensor:
    """The convolution of y [T, ...], rows at any stride: `gated` as in recurrent_ops.short_conv, [T, C]. Otherwise that
    of the first C columns, with SiLU; then the draft tokens that each sequence takes first follow, with room for
    `states.drafted.shape[1]` rows each."""
    assert (y.dtype, y.stride(1), rows.dtype, rows.is_contiguous()) == (torch.float32, 1, torch.int32, True)
    assert weights.conv.is_contiguous()
    channels, kernel = weights.conv.shape
    drafts, kept = states.drafted.shape[1:]
    out = workspace.empty(len(y) + (0 if gated else len(rows) * drafts), channels)
    args = ConvArgs(
        y.data_ptr(), y.stride(0), int(gated), geometry.query_start.data_ptr(), rows.data_ptr(),
        weights.conv.data_ptr(), 0 if weights.bias is None else weights.bias.data_ptr(), states.conv.data_ptr(),
        states.drafted.data_ptr(), drafts, kept, kernel, channels, out.data_ptr(), -1 if gated else len(y),
    )  # fmt: skip
    threads.run(SHORT_CONV, len(rows) * -(-channels // TILE), numbers(args), scratch=4 * (2 * kernel + 1) * TILE)
    return out


@implements(recurrent_ops.short_conv, "cpu", device="cpu", priority=20)
def short_conv(
    y: Tensor, weights: ConvWeights, states: RecurrentStates, rows: Tensor, geometry: BatchGeometry
) -> Tensor:
    return convolve(y, weights, states, rows, geometry, gated=True)
