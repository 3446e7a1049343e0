"""Activations as int8 codes, each group with a scale, for products with quantized weights."""

from __future__ import annotations

import functools
from typing import NamedTuple

import numpy as np
import torch
from numba import carray
from torch import Tensor

from lmkit.kernels.cpu import threads, tiles, workspace
from lmkit.kernels.cpu.elementwise import SERIAL_VALUES, NormArgs, norm_arguments, normed_row
from lmkit.kernels.cpu.intrinsics import copy, fma, pointer, rint, tile, unpack
from lmkit.kernels.cpu.jit import Task
from lmkit.kernels.cpu.packed_weight import PackedWeight
from lmkit.kernels.cpu.structs import numbers, read
from lmkit.kernels.ops import Norm

SPACING = 64  # bytes between rows of codes: with power-of-two strides they would fall into few cache sets
PART = np.float32(2.0**-8)  # the scale of what the codes of an input left, beside theirs
SMALLEST_STEP = np.float32(2.0**-120)  # the inverse of a smaller step would not be finite


class Layout(NamedTuple):
    """Rows lie in blocks of `rows`: codes [blocks, K/piece, rows, piece], scales and sums [blocks, groups, rows].
    Blocks of one row are whole rows, one after the other; `piece` is then a group.
    """

    rows: int
    piece: int


class Activations(NamedTuple):
    """Addresses of rows of activations as codes."""

    codes: int
    row_bytes: int
    scales: int  # float32
    sums: int  # int32: see tiles.sum_pair


class QuantizeArgs(NamedTuple):
    x: int
    x_stride: int  # bytes
    num_rows: int
    norm: NormArgs
    quantized: Activations
    layout: Layout
    inputs: int
    groups: int
    group: int
    whole_row: int
    parts: int


@functools.cache
def quantize_task(wide: bool) -> Task:
    """The task of one block of rows: the norm, if any, then codes and each group's scale and sum."""
    find_peak, round_to_codes = tiles.peak_tile().name, tiles.codes_tile(wide=wide).name
    code_bytes, lanes = 2 if wide else 1, tiles.ACTIVATION_LANES

    def quantize(args: int, scratch: int, index: int) -> None:
        a = read(args, QuantizeArgs)
        num, groups, group, whole_row = a.inputs, a.groups, a.group, a.whole_row
        block, piece = a.layout.rows, a.layout.piece
        peak = carray(pointer(scratch), 1, np.int32)  # the bits of a float
        value = carray(pointer(scratch), 1, np.float32)
        row, padded = scratch + 64, groups * group
        carray(pointer(row + 4 * num), padded - num, np.float32)[:] = 0
        for r in range(min(block, a.num_rows - index * block)):
            at = index * block + r
            normed_row(a.norm, a.x + at * a.x_stride, at, row, num)
            largest = np.float32(0)
            for g in range(groups):
                source = row + 4 * g * group
                if g == 0 or not whole_row:
                    peak[0] = 0
                    tile(find_peak, 1, (source, (padded if whole_row else group) // lanes, scratch))
                    largest = value[0]
                step = largest / np.float32(127)
                for part in range(a.parts):
                    inverse = np.float32(1) / step if step > SMALLEST_STEP else np.float32(0)
                    value[0], target = inverse, index * a.parts + part
                    place = a.quantized.codes + target * block * a.quantized.row_bytes
                    out = place + (g * group * block + r * piece) * code_bytes
                    of_group = (target * groups + g) * block + r
                    pieces, stride = group // piece, block * piece * code_bytes
                    total = a.quantized.sums + 4 * of_group
                    tile(round_to_codes, 1, (source, out, pieces, piece // lanes, stride, scratch, total))
                    carray(pointer(a.quantized.scales + 4 * of_group), 1, np.float32)[0] = step
                    if part + 1 < a.parts:
                        left = carray(pointer(source), group, np.float32)
                        for i in range(group):
                            left[i] = fma(-rint(left[i] * inverse), step, left[i])
                        step *= PART

    return Task(quantize)


def _gather_codes(args: int, scratch: int, index: int) -> None:
    """Copy the row of place `index`: its codes, scales and sums."""
    tokens, row_bytes, group_bytes, codes, scales, sums, to_codes, to_scales, to_sums = unpack(args, 9)
    token = carray(pointer(tokens), index + 1, np.int64)[index]
    copy(codes + token * row_bytes, to_codes + index * row_bytes, row_bytes)
    copy(scales + token * group_bytes, to_scales + index * group_bytes, group_bytes)
    copy(sums + token * group_bytes, to_sums + index * group_bytes, group_bytes)


GATHER_CODES = Task(_gather_codes)


def gather_codes(x: Activations, tokens: Tensor, groups: int) -> tuple[Tensor, Activations]:
    """(the memory, the rows in it) of rows `tokens` int64 [P] of x, in blocks of one row."""
    count, group_bytes = len(tokens), 4 * groups
    memory = workspace.empty(count * (x.row_bytes + 2 * group_bytes), dtype=torch.uint8)
    codes = memory.data_ptr()
    scales = codes + count * x.row_bytes
    rows = Activations(codes, x.row_bytes, scales, scales + count * group_bytes)
    args = (
        tokens.data_ptr(), x.row_bytes, group_bytes, x.codes, x.scales, x.sums, rows.codes, rows.scales, rows.sums
    )  # fmt: skip
    threads.run(GATHER_CODES, count, args, parallel=memory.numel() > 4 * SERIAL_VALUES)
    return memory, rows


def quantize(
    x: Tensor, packed: PackedWeight, norm: Norm | None, layout: Layout, *, wide: bool, parts: int = 1
) -> tuple[Tensor, Activations]:
    """(the memory, which the caller keeps alive, the codes in it) of float32 x [rows, K], after `norm` if it is given.
    `wide` codes are in the layout of dots.PmaddWide. With several `parts` a block of rows of x becomes as many
    blocks, of which the second has what the codes of the first left, with PART of their scales."""
    rows, group, groups = parts * x.shape[0], packed.group_size, packed.groups
    blocks, padded = parts * -(-x.shape[0] // layout.rows), groups * group
    row_bytes = padded * (2 if wide else 1) + (SPACING if layout.rows == 1 else 0)
    scales_bytes = 4 * blocks * layout.rows * groups
    codes_bytes = blocks * layout.rows * row_bytes
    memory = workspace.empty(codes_bytes + 2 * scales_bytes, dtype=torch.uint8)
    codes = memory.data_ptr()
    quantized = Activations(codes, row_bytes, codes + codes_bytes, codes + codes_bytes + scales_bytes)
    _kept, normed = (None, NormArgs()) if norm is None else norm_arguments(norm, x)
    threads.run(
        quantize_task(wide),
        blocks // parts,
        numbers(
            QuantizeArgs(
                x.data_ptr(),
                4 * x.stride(0),
                x.shape[0],
                normed,
                quantized,
                layout,
                packed.in_features,
                groups,
                group,
                packed.whole_row,
                parts,
            )
        ),
        parallel=rows * padded > SERIAL_VALUES,
        scratch=64 + 4 * padded,
    )
    return memory, quantized
