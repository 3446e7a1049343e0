"""Products of int8 activations with 4- and 8-bit weights on tiles. The results are those of quantized.py, bit for bit.

A task computes one panel, or a few, for a block of tokens whose codes stay in the second-level cache. It walks through
the panel chunk by chunk (products.Grouping). All tokens of the block take a chunk from the first-level cache. Products
of 16 tokens wait in one of two buffers for their epilogue, or, while their group is incomplete, in one of their own.
"""

from __future__ import annotations

import functools
from typing import NamedTuple

import numpy as np
import torch
from numba import carray
from torch import Tensor

from lmkit.kernels.cpu.activations import Activations, Layout
from lmkit.kernels.cpu.amx import products
from lmkit.kernels.cpu.amx.products import COLUMNS, PRODUCTS, WIDTH, Grouping, grouping
from lmkit.kernels.cpu.amx.tile_file import ROWS, SLOTS, configure_tile, release_tile
from lmkit.kernels.cpu.intrinsics import pointer, tile
from lmkit.kernels.cpu.isa import Isa
from lmkit.kernels.cpu.jit import Task
from lmkit.kernels.cpu.packed_weight import PackedWeight
from lmkit.kernels.cpu.panels import (
    Blocks,
    Results,
    block_of,
    panels_per_task,
    results,
    run_blocks,
    store_panels,
)
from lmkit.kernels.cpu.structs import read
from lmkit.kernels.cpu.tiles import CACHE_LINE

TOKEN_BYTES = 768 << 10  # of a block's codes


class ProductArgs(NamedTuple):
    blocks: Blocks
    activations: Activations
    codes: int
    scales: int
    zeros: int
    groups: int
    results: Results


def layout(group_size: int) -> Layout:
    return Layout(ROWS, grouping(group_size).step)


@functools.cache
def product_task(isa: Isa, bits: int, half: bool, cut: Grouping) -> Task:
    """The task of one block of rows times a few panels."""
    first_of = products.product_tile(isa, bits, cut, half=half, late=False, more=False).name
    more_of = products.product_tile(isa, bits, cut, half=half, late=False, more=cut.passes > 1).name  # sums of a part
    late_of = products.product_tile(isa, bits, cut, half=half, late=True, more=cut.passes > 1).name
    finish, widen = products.finish_tile(isa, bits, half=half).name, products.signed_tile(isa).name
    configure, release = configure_tile(isa, cut.step).name, release_tile(isa).name
    step, steps, together, passes = cut
    part, buffer, scale_bytes = step * steps, together * PRODUCTS, 2 if half else 4
    part_bytes = part * WIDTH * bits // 8

    def product(args: int, scratch: int, index: int) -> None:
        a = read(args, ProductArgs)
        x, groups, parts = a.activations, a.groups, a.groups * passes
        first, row, num_panels, num_rows = block_of(a.blocks, index)
        tokens, left = (num_rows + ROWS - 1) // ROWS, (num_rows - 1) % ROWS + 1  # tiles, rows of the last one
        dots = COLUMNS * steps * tokens
        lines = (part_bytes + CACHE_LINE * dots - 1) // (CACHE_LINE * dots)
        widened = scratch + SLOTS
        sums = widened + (together * part * WIDTH if bits == 4 else 0)
        buffers = sums + 4 * WIDTH * num_panels * num_rows
        carray(pointer(sums), num_panels * num_rows * WIDTH, np.float32)[:] = 0
        tile(configure, 1, (scratch, ROWS if tokens > 1 else left))
        turn = 0
        for p in range(num_panels):
            before, late = (sums, sums, sums, sums, sums, sums), False  # the epilogue that remains to be done
            for n in range(0, parts, together):
                count, g, last = min(together, parts - n), n // passes, n % passes == passes - 1
                following = min(together, parts - n - count)
                panel, weights = (first + p) * groups, a.codes + ((first + p) * parts + n) * part_bytes
                scales, zeros = a.scales + (panel + g) * WIDTH * scale_bytes, a.zeros + (panel + g) * WIDTH
                ahead = weights + count * part_bytes
                if bits == 4:
                    tile(widen, 1, (weights, zeros, widened, count, part // 8))
                    weights = widened
                for t in range(tokens):
                    turn = t if passes > 1 else 1 - turn
                    new, block = buffers + buffer * turn, row // ROWS + t
                    codes = x.codes + ROWS * (block * x.row_bytes + n * part)
                    given = (scratch, codes, weights, new, ahead, lines)
                    if late:
                        tile(late_of, count, (*given, *before))
                    elif n % passes:
                        tile(more_of, count, given)
                    else:
                        tile(first_of, count, given)
                    ahead += lines * COLUMNS * steps * count * CACHE_LINE
                    if last:
                        place, of_tokens = sums + 4 * WIDTH * (p * num_rows + ROWS * t), 4 * ROWS * (block * groups + g)
                        before = (place, scales, x.scales + of_tokens, zeros, x.sums + of_tokens, new)
                        late = t < tokens - 1 or (passes == 1 and left == ROWS and following == count)
                        if not late:
                            tile(finish, count, (left, *before))
        tile(release, 1, (scratch,))
        store_panels(a.results, a.results.bias, sums, WIDTH, row, num_rows, first, num_panels)

    return Task(product)


def multiply(
    isa: Isa, bits: int, activations: Activations, packed: PackedWeight, bias: Tensor | None, out: Tensor
) -> None:
    """out = the product, from `activations` in `layout`."""
    rows, (panels, groups) = out.shape[0], packed.scales.shape[:2]
    group, cut = packed.group_size, grouping(packed.group_size)
    parts = -(-rows * groups * group // TOKEN_BYTES)
    row_block = -(-rows // (parts * ROWS)) * ROWS
    per_task = panels_per_task(WIDTH * groups * group * bits // 8, panels, packed.activation is not None)
    blocks = Blocks(rows, panels, per_task, row_block)
    args = ProductArgs(
        blocks, activations, packed.codes.data_ptr(), packed.scales.data_ptr(), packed.zeros.data_ptr(), groups,
        results(out, bias, packed.activation),
    )  # fmt: skip
    buffers = row_block // ROWS if cut.passes > 1 else 2 * cut.together
    chunk = cut.together * cut.steps * cut.step
    scratch = SLOTS + chunk * WIDTH + 4 * per_task * row_block * WIDTH + buffers * PRODUCTS
    task = product_task(isa, bits, packed.scales.dtype == torch.float16, cut)
    run_blocks(task, blocks, args, panel_size=WIDTH * groups * group, scratch=scratch)
