"""Linears on exact activations on tiles: weights in bfloat16 and float16, codes of 4 and 8 bits, float8.

An activation is the sum of two bfloat16 and errs by 2^-17 of itself at most. Everything else is exact up to the float32
sums: weights are bfloat16, the sum of two bfloat16, integers or float8 (dense_products.py).

A task computes two panels for a block of tokens, segment by segment. All tokens of the block take a segment's weights
from the first-level cache, and their own halves from the second-level cache. If a block is too long for that cache, the
inputs are cut into spans, one job each, and the sums wait in memory. A sum takes its segments in the same order in any
case. One token runs the same micro-kernels, so its bits are those that it has in a batch.
"""

from __future__ import annotations

import functools
import math
from typing import NamedTuple

import numpy as np
import torch
from numba import carray
from torch import Tensor

from lmkit.kernels.cpu import threads, workspace
from lmkit.kernels.cpu.amx import dense_products
from lmkit.kernels.cpu.amx.dense_products import HIGH, LOW, SEGMENT, STEP, STEP_BYTES, SUM_ROW, WIDTH
from lmkit.kernels.cpu.amx.products import PRODUCTS
from lmkit.kernels.cpu.amx.tile_file import ROW_BYTES, ROWS, SLOTS, configure_tile, release_tile
from lmkit.kernels.cpu.elementwise import SERIAL_VALUES, NormArgs, norm_arguments, normed_row
from lmkit.kernels.cpu.intrinsics import bfloat_to_float, float_to_bfloat, pointer, tile
from lmkit.kernels.cpu.isa import Isa
from lmkit.kernels.cpu.jit import Task
from lmkit.kernels.cpu.packed_dense import BFLOAT16, CODE_BITS, PackedDense
from lmkit.kernels.cpu.panels import (
    Blocks,
    Results,
    address,
    block_of,
    results,
    run_blocks,
    store_panels,
)
from lmkit.kernels.cpu.structs import numbers, read
from lmkit.kernels.cpu.tiles import CACHE_LINE
from lmkit.kernels.ops import Norm

BLOCK_TOKENS = 128  # a panel is read once for so many
HALVES_BYTES = 1 << 20  # of a block and a span: half of a second-level cache
WIDENED = SEGMENT // STEP * STEP_BYTES  # bytes of a segment of a panel
BUFFERS = SLOTS + 2 * PRODUCTS + 4 * WIDENED  # of a task, before its sums
FLOAT16 = "float16"


class Halves(NamedTuple):
    """Activations [tokens / rows, K / 32, 2, rows, 32] in bfloat16: high, then low. The last tile of tokens is filled
    up with anything."""

    data: int
    rows: int  # tokens in a tile
    token_bytes: int


class SplitArgs(NamedTuple):
    x: int
    x_stride: int  # bytes
    norm: NormArgs
    halves: Halves
    inputs: int


class ProductArgs(NamedTuple):
    blocks: Blocks
    halves: Halves
    weight: int
    panel_bytes: int
    scales: int
    zeros: int
    groups: int  # in a row
    group: int  # inputs, a multiple of 32 if there are more groups than one
    inputs: int
    first: int  # input of the span
    last: int
    waiting: int  # float32 [panels / 2, tokens, 2 * 32], sums between spans, or 0
    results: Results


def fits(packed: PackedDense) -> bool:
    return packed.kind in (BFLOAT16, FLOAT16) or (
        packed.kind in CODE_BITS and (packed.groups == 1 or packed.group_size % STEP == 0)
    )


def _split(args: int, scratch: int, index: int) -> None:
    """Norm, if any, and split one token."""
    a = read(args, SplitArgs)
    padded = a.halves.token_bytes // 4
    row = carray(pointer(scratch), padded, np.float32)
    normed_row(a.norm, a.x + index * a.x_stride, index, scratch, a.inputs)
    row[a.inputs :] = 0
    rows, place = a.halves.rows, index % a.halves.rows
    out = a.halves.data + (index - place) * a.halves.token_bytes + place * ROW_BYTES
    for k in range(0, padded, STEP):
        high = carray(pointer(out), STEP, np.uint16)
        low = carray(pointer(out + rows * ROW_BYTES), STEP, np.uint16)
        for i in range(STEP):
            bits = float_to_bfloat(row[k + i])
            high[i] = bits
            low[i] = float_to_bfloat(row[k + i] - bfloat_to_float(bits))
        out += 2 * rows * ROW_BYTES


SPLIT = Task(_split)


@functools.cache
def product_task(isa: Isa, kind: str) -> Task:
    """The task of two panels and a block of tokens."""
    is_coded, is_split = kind in CODE_BITS, kind == FLOAT16
    multiply, finish = dense_products.product_tile(isa, coded=is_coded).name, dense_products.finish_tile().name
    widen = dense_products.widen_tile(isa, HIGH if is_split else kind).name  # not used for bfloat16
    widen_low = dense_products.widen_tile(isa, LOW).name
    configure, release = configure_tile(isa, ROW_BYTES).name, release_tile(isa).name
    input_bytes = CODE_BITS.get(kind, 16) * WIDTH // 8  # of a panel
    step_lines = STEP * input_bytes // CACHE_LINE

    def product(args: int, scratch: int, index: int) -> None:
        a = read(args, ProductArgs)
        first, row, num_panels, num_rows = block_of(a.blocks, index)
        rows, is_last = a.halves.rows, a.last == a.inputs
        tokens, x_tile = (num_rows + rows - 1) // rows, rows * ROW_BYTES
        new, widened = scratch + SLOTS, scratch + SLOTS + 2 * PRODUCTS
        old, sums = new + PRODUCTS, scratch + BUFFERS
        if a.waiting:
            padded_rows = (a.blocks.rows + rows - 1) // rows * rows
            sums = a.waiting + 2 * SUM_ROW * (first // 2 * padded_rows + row)
        if a.first == 0:
            carray(pointer(sums), 2 * WIDTH * rows * tokens, np.float32)[:] = 0
        tile(configure, 1, (scratch, rows))
        following = num_panels - 1  # a single panel is its own second one
        next_panel, next_group = following * a.panel_bytes, following * 4 * a.groups * WIDTH
        panel, scales = a.weight + first * a.panel_bytes, a.scales + 4 * first * a.groups * WIDTH
        late, late_rows = (new, sums, next_panel, scales, next_group), 0  # the epilogue of the tokens computed before
        k = a.first
        while k < a.last:
            group = k // a.group
            count = min(SEGMENT, (group + 1) * a.group - k, a.last - k)
            steps, of_group = (count + STEP - 1) // STEP, 4 * group * WIDTH
            source, w, next_w = panel + k * input_bytes, panel + k * input_bytes, next_panel
            if is_coded or is_split:
                w, next_w = widened, WIDENED
                for p in range(num_panels):
                    zeros = a.zeros + 4 * (first + p) * a.groups * WIDTH + of_group if a.zeros else scales
                    tile(widen, 1, (source + p * next_panel, widened + p * WIDENED, count, zeros))
                    if is_split:
                        tile(widen_low, 1, (source + p * next_panel, widened + (2 + p) * WIDENED, count, zeros))
            lines, ahead = (step_lines + tokens - 1) // tokens, source + count * input_bytes
            share = (rows + steps - 1) // steps
            for t in range(tokens):
                x = a.halves.data + (row + rows * t) * a.halves.token_bytes + k // STEP * 2 * x_tile
                c, next_c = sums + 2 * SUM_ROW * rows * t, SUM_ROW * min(rows, num_rows - rows * t)
                asked = lines if lines * t < step_lines else 0
                asking = (steps, ahead + lines * t * steps * CACHE_LINE, next_panel, asked)
                if is_coded:
                    given = (scratch, x, x_tile, w, next_w, new, ROWS * SUM_ROW, *asking)
                    tile(multiply, 1, (*given, *late, late_rows, share))
                    late = (new, c, next_c, scales + of_group, next_group)
                    late_rows = min(rows, num_rows - rows * t)
                    new, old = old, new
                else:
                    tile(multiply, 1, (scratch, x, x_tile, w, next_w, c, next_c, *asking))
                    if is_split:
                        unasked = (steps, ahead, next_panel, 0)
                        tile(multiply, 1, (scratch, x, x_tile, w + 2 * WIDENED, next_w, c, next_c, *unasked))
            k += count
        if is_coded:
            tile(finish, 1, (*late, late_rows))
        tile(release, 1, (scratch,))
        if is_last:
            for t in range(tokens):
                left = min(rows, num_rows - rows * t)
                store_panels(
                    a.results,
                    a.results.bias,
                    sums + 2 * SUM_ROW * rows * t,
                    WIDTH,
                    row + rows * t,
                    left,
                    first,
                    num_panels,
                )

    return Task(product)


def linear(isa: Isa, x: Tensor, packed: PackedDense, bias: Tensor | None, norm: Norm | None, out: Tensor) -> None:
    """out [T, N] = the product of x, float32 [T, K]."""
    (num_tokens, inputs), panels = x.shape, packed.data.shape[0]
    if not num_tokens:
        return
    rows, parts = min(num_tokens, ROWS), -(-num_tokens // BLOCK_TOKENS)
    blocks = Blocks(num_tokens, panels, 2, row_block=-(-num_tokens // (parts * rows)) * rows)
    span, block_sums = _span(packed, blocks.row_block), blocks.row_block * 2 * WIDTH
    _kept, halves = _halves(x, norm, rows)
    waiting = workspace.empty(-(-panels // 2) * parts, block_sums) if span < inputs else None
    for first in range(0, inputs, span):
        args = ProductArgs(
            blocks, halves, packed.data.data_ptr(), packed.data[0].nbytes,
            address(packed.scales), address(packed.zeros), packed.groups,
            packed.group_size if packed.groups else inputs, inputs, first, min(inputs, first + span), address(waiting),
            results(out, bias, packed.activation),
        )  # fmt: skip
        scratch = BUFFERS + 4 * block_sums
        run_blocks(product_task(isa, packed.kind), blocks, args, panel_size=WIDTH * inputs, scratch=scratch)


def _span(packed: PackedDense, row_block: int) -> int:
    """The inputs of a span. It ends where a segment ends, whatever the number of tokens."""
    unit = math.lcm(packed.group_size, SEGMENT) if packed.groups > 1 else SEGMENT
    return max(1, HALVES_BYTES // (4 * row_block * unit)) * unit


def _halves(x: Tensor, norm: Norm | None, rows: int) -> tuple[Tensor, Halves]:
    """(the memory, the halves) of the tokens of x, after the norm."""
    num_tokens, inputs = x.shape
    padded = -(-inputs // STEP) * STEP
    memory = workspace.empty(-(-num_tokens // rows) * rows, 2 * padded, dtype=torch.bfloat16)
    halves = Halves(memory.data_ptr(), rows, 4 * padded)
    _kept, normed = (None, NormArgs()) if norm is None else norm_arguments(norm, x)
    threads.run(
        SPLIT,
        num_tokens,
        numbers(SplitArgs(x.data_ptr(), 4 * x.stride(0), normed, halves, inputs)),
        parallel=num_tokens * inputs > SERIAL_VALUES,
        scratch=4 * padded,
    )
    return memory, halves
