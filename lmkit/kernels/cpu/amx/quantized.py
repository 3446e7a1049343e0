"""Products of int8 activations with 4- and 8-bit weights on tiles. The results are those of quantized.py, bit for bit.

A task computes one panel, or a few, for a block of tokens whose codes stay in the second-level cache. It walks through
the panel chunk by chunk. All tokens of the block take a chunk from the first-level cache.
"""

from __future__ import annotations

import functools
from typing import NamedTuple

import numpy as np
import torch
from numba import carray
from torch import Tensor

from lmkit.kernels.cpu import threads
from lmkit.kernels.cpu.activations import Activations, Layout
from lmkit.kernels.cpu.amx import products
from lmkit.kernels.cpu.amx.products import CACHE_LINE, COLUMNS, MOST_STEPS, PRODUCTS, WIDTH, Grouping, grouping
from lmkit.kernels.cpu.amx.tile_file import CONFIGURATION, ROWS, SLOTS
from lmkit.kernels.cpu.intrinsics import pointer, tile
from lmkit.kernels.cpu.isa import Isa
from lmkit.kernels.cpu.jit import Task
from lmkit.kernels.cpu.packed_weight import PackedWeight
from lmkit.kernels.cpu.panels import (
    ACTIVATION_NUMBERS,
    SERIAL_PRODUCTS,
    Blocks,
    Results,
    address,
    block_of,
    panels_per_task,
    store_panels,
)
from lmkit.kernels.cpu.structs import numbers, read

TOKEN_BYTES = 768 << 10  # of a block's codes


class ProductArgs(NamedTuple):
    blocks: Blocks
    activations: Activations
    codes: int
    scales: int
    zeros: int
    groups: int
    results: Results


def fits(group_size: int) -> bool:
    return grouping(group_size).steps <= MOST_STEPS


def layout(group_size: int) -> Layout:
    return Layout(ROWS, grouping(group_size).step)


@functools.cache
def product_task(isa: Isa, bits: int, half: bool, cut: Grouping) -> Task:
    """The task of one block of rows times a few panels."""
    first_of = products.product_tile(isa, bits, cut, half=half, late=False).name
    next_of = products.product_tile(isa, bits, cut, half=half, late=True).name
    finish, widen = products.finish_tile(isa, bits, half=half).name, products.signed_tile(isa).name
    configure, release = products.configure_tile(isa, cut.step).name, products.release_tile(isa).name
    step, steps, together = cut
    group, buffer, scale_bytes = step * steps, together * PRODUCTS, 2 if half else 4
    group_bytes = group * WIDTH * bits // 8

    def product(args: int, scratch: int, index: int) -> None:
        a = read(args, ProductArgs)
        x, groups = a.activations, a.groups
        first, row, num_panels, num_rows = block_of(a.blocks, index)
        tokens, left = (num_rows + ROWS - 1) // ROWS, (num_rows - 1) % ROWS + 1  # tiles, rows of the last one
        new, old = scratch + SLOTS + CONFIGURATION, scratch + SLOTS + CONFIGURATION + buffer
        widened = old + buffer
        sums = widened + (together * group * WIDTH if bits == 4 else 0)
        carray(pointer(sums), num_panels * num_rows * WIDTH, np.float32)[:] = 0
        tile(configure, 1, (scratch, scratch + SLOTS, ROWS if tokens > 1 else left))
        for p in range(num_panels):
            before, late = (sums, sums, sums, sums, sums), False  # of the tokens whose products are old
            for g in range(0, groups, together):
                count, at = min(together, groups - g), (first + p) * groups + g
                following = min(together, groups - g - count)
                panel = a.codes + at * group_bytes
                ahead, lines = panel + count * group_bytes, COLUMNS * steps * tokens * CACHE_LINE
                lines = (group_bytes + lines - 1) // lines
                if bits == 4:
                    tile(widen, 1, (panel, a.zeros + at * WIDTH, widened, count, group // 8))
                    panel = widened
                for t in range(tokens):
                    block = row // ROWS + t
                    codes, of_tokens = x.codes + block * ROWS * x.row_bytes, 4 * ROWS * (block * groups + g)
                    given = (scratch, codes + ROWS * g * group, panel, new, ahead, lines)
                    if late:
                        tile(next_of, count, (*given, *before, old))
                    else:
                        tile(first_of, count, given)
                    ahead += lines * COLUMNS * steps * count * CACHE_LINE
                    of_panel = (a.scales + at * WIDTH * scale_bytes, x.scales + of_tokens, a.zeros + at * WIDTH)
                    before, late = (sums + 4 * WIDTH * (p * num_rows + ROWS * t), *of_panel, x.sums + of_tokens), True
                    new, old = old, new
                    if t == tokens - 1 and (left < ROWS or following != count):
                        tile(finish, count, (left, *before, old))
                        late = False
        tile(release, 1, (scratch,))
        store_panels(a.results, sums, WIDTH, row, num_rows, first, num_panels)

    return Task(product)


def multiply(
    isa: Isa, bits: int, activations: Activations, packed: PackedWeight, bias: Tensor | None, out: Tensor
) -> None:
    """out = the product, from `activations` in `layout`."""
    (rows, features), (panels, groups) = out.shape, packed.scales.shape[:2]
    group, cut = packed.group_size, grouping(packed.group_size)
    parts = -(-rows * groups * group // TOKEN_BYTES)
    row_block = -(-rows // (parts * ROWS)) * ROWS
    per_task = panels_per_task(WIDTH * groups * group * bits // 8, panels, packed.activation is not None)
    args = ProductArgs(
        Blocks(rows, panels, per_task, row_block),
        activations, packed.codes.data_ptr(), packed.scales.data_ptr(), packed.zeros.data_ptr(), groups,
        Results(out.data_ptr(), features, address(bias), ACTIVATION_NUMBERS[packed.activation]),
    )  # fmt: skip
    scratch = SLOTS + CONFIGURATION + cut.together * (2 * PRODUCTS + group * WIDTH) + 4 * per_task * row_block * WIDTH
    threads.run(
        product_task(isa, bits, packed.scales.dtype == torch.float16, cut),
        -(-panels // per_task) * -(-rows // row_block),
        numbers(args),
        parallel=rows * panels * WIDTH * groups * group > SERIAL_PRODUCTS,
        scratch=scratch,
    )
