"""Products of int8 activations with weights in planes of bits on tiles. The results are those of quantized.py, bit for
bit.

A task computes a few panels of 64 outputs for a block of rows. All rows of the block take a chunk of unpacked codes
from the first-level cache, and their own codes from the second-level cache.
"""

from __future__ import annotations

import functools
from typing import NamedTuple

import numpy as np
from numba import carray
from torch import Tensor

from lmkit.kernels.cpu.activations import Activations, Layout
from lmkit.kernels.cpu.amx import plane_products
from lmkit.kernels.cpu.amx.products import COLUMNS, PRODUCTS, WIDTH
from lmkit.kernels.cpu.amx.quantized import TOKEN_BYTES
from lmkit.kernels.cpu.amx.tile_file import ROW_BYTES, ROWS, SLOTS, configure_tile, release_tile
from lmkit.kernels.cpu.intrinsics import pointer, tile
from lmkit.kernels.cpu.isa import Isa
from lmkit.kernels.cpu.jit import Task
from lmkit.kernels.cpu.packed_weight import PackedWeight
from lmkit.kernels.cpu.panels import Blocks, Results, block_of, panels_per_task, results, run_blocks, store_panels
from lmkit.kernels.cpu.plane_tiles import UNIT, Planes, unpack_planes_tile
from lmkit.kernels.cpu.structs import read
from lmkit.kernels.cpu.tiles import CACHE_LINE

CHUNK = 8  # units that are unpacked at a time: 16 KB


class ProductArgs(NamedTuple):
    blocks: Blocks
    activations: Activations
    codes: int
    sides: int
    panel_bytes: int  # of codes
    side_bytes: int  # of a panel
    units: int
    results: Results


def layout(form: Planes) -> Layout:
    return Layout(ROWS, form.group)


@functools.cache
def product_task(isa: Isa, form: Planes, parts: int) -> Task:
    """The task of a few panels and a block of rows, whose inputs have `parts`: see quantized.linear."""
    unpack, multiply = (
        unpack_planes_tile(isa, form, signed=True).name, plane_products.product_tile(isa, form, parts).name
    )  # fmt: skip
    configure, release = configure_tile(isa, form.group).name, release_tile(isa).name
    unit_bytes, per_unit = form.bits * UNIT * WIDTH // 8, form.groups
    unit_lines = unit_bytes // CACHE_LINE // COLUMNS

    def product(args: int, scratch: int, index: int) -> None:
        a = read(args, ProductArgs)
        first, row, num_panels, num_rows = block_of(a.blocks, index)
        x, groups, size = a.activations, a.units * per_unit, num_panels * num_rows * WIDTH
        products, unpacked = scratch + SLOTS, scratch + SLOTS + 2 * parts * PRODUCTS + ROW_BYTES
        sums = unpacked + CHUNK * UNIT * WIDTH
        carray(pointer(sums), size, np.float32)[:] = 0
        tile(configure, 1, (scratch, min(num_rows, ROWS)))
        for p in range(num_panels):
            codes, sides = a.codes + (first + p) * a.panel_bytes, a.sides + (first + p) * a.side_bytes
            for unit in range(0, a.units, CHUNK):
                count = min(CHUNK, a.units - unit)
                tile(unpack, 1, (codes + unit * unit_bytes, unpacked, count))
                for t in range(0, num_rows, ROWS):
                    ahead, lines = codes + (unit + count) * unit_bytes, unit_lines if t == 0 else 0
                    block = (row + t) // ROWS * parts
                    of_rows = sums + 4 * (p * num_rows + t) * WIDTH
                    of_groups = 4 * ROWS * (block * groups + unit * per_unit)
                    inputs = x.codes + ROWS * (block * x.row_bytes + unit * UNIT)
                    given = (scratch, inputs, unpacked, of_rows, sides, x.scales + of_groups, x.sums + of_groups)
                    rest = (unit, count, min(ROWS, num_rows - t), products, ahead, lines)
                    tile(multiply, 1, (*given, *rest, ROWS * x.row_bytes, 4 * ROWS * groups))
        tile(release, 1, (scratch,))
        store_panels(a.results, a.results.bias, sums, WIDTH, row, num_rows, first, num_panels)

    return Task(product)


def multiply(
    isa: Isa, activations: Activations, packed: PackedWeight, bias: Tensor | None, out: Tensor, parts: int
) -> None:
    """out = the product, from `activations` in `layout`."""
    form, rows, inputs, panels = packed.form, out.shape[0], packed.in_features, packed.codes.shape[0]
    assert isinstance(form, Planes)
    blocks_of_rows = -(-rows * parts * inputs // TOKEN_BYTES)
    row_block = -(-rows // (blocks_of_rows * ROWS)) * ROWS
    per_task = panels_per_task(packed.codes[0].nbytes, panels, packed.activation is not None)
    blocks = Blocks(rows, panels, per_task, row_block)
    args = ProductArgs(
        blocks, activations, packed.codes.data_ptr(), packed.scales.data_ptr(), packed.codes[0].nbytes,
        packed.scales[0].nbytes, inputs // UNIT, results(out, bias, packed.activation),
    )  # fmt: skip
    sums = 4 * WIDTH * per_task * row_block
    scratch = SLOTS + 2 * parts * PRODUCTS + ROW_BYTES + CHUNK * UNIT * WIDTH + sums
    run_blocks(product_task(isa, form, parts), blocks, args, panel_size=WIDTH * inputs, scratch=scratch)
