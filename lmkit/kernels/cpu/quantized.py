"""Linears with 4- and 8-bit weights on int8 activations (ops.linear_w4a8, ops.linear_w8a8).

A few rows read the packed codes of a panel (packed_weight.py) and unpack them in registers. Many rows share panels that
are unpacked to bytes, a chunk of K at a time, which stays in the first-level cache. Tile registers (isa.Isa.tiles)
serve as many as are worth it. All add up groups in the same order with the same instructions. A token's result
therefore does not depend on the number of tokens computed with it.
"""

from __future__ import annotations

import functools
from typing import NamedTuple

import numpy as np
import torch
from numba import carray
from torch import Tensor

from lmkit.kernels.cpu import tiles, workspace
from lmkit.kernels.cpu.activations import Activations, Layout, gather_codes, quantize
from lmkit.kernels.cpu.amx import quantized as on_tiles
from lmkit.kernels.cpu.dots import BLOCK, LOOKED_UP, dot_for
from lmkit.kernels.cpu.intrinsics import pointer, tile, unpack
from lmkit.kernels.cpu.isa import Isa
from lmkit.kernels.cpu.jit import Task
from lmkit.kernels.cpu.packed_rows import quantized_rows
from lmkit.kernels.cpu.packed_weight import PackedWeight, accepts, pack
from lmkit.kernels.cpu.panels import (
    CHUNK_BYTES,
    NO_EXPERTS,
    ROW_BLOCK,
    Blocks,
    Experts,
    ExpertTable,
    Results,
    as_float,
    as_type,
    panels_per_task,
    results,
    rows_of,
    run_blocks,
    store_panels,
)
from lmkit.kernels.cpu.structs import read
from lmkit.kernels.cpu.tiles import FEW_ROWS
from lmkit.kernels.ops import Norm, Places
from lmkit.kernels.registry import ExpertLinears, Implementation

SPREAD_ROWS = 32  # up to so many, unpacking in registers each time costs less than stores
# Up to so many rows read a panel at the speed of the memory, and prefetch what they read themselves. More rows compute
# a chunk while the next one comes: 3 and 4 then read 10 % more in a second (AVX512-VNNI, Zen 5).
STREAM_ROWS = 2
AHEAD = 2048  # bytes between the weights that such a row reads and those that it prefetches


class ProductArgs(NamedTuple):
    blocks: Blocks
    experts: Experts
    activations: Activations
    codes: int
    scales: int
    zeros: int
    groups: int
    group_blocks: int  # in a group; see tiles.int_tile
    chunk: int  # groups that many rows compute at a time
    results: Results


@functools.cache
def product_task(isa: Isa, bits: int, half_scales: bool, values: tuple[int, ...]) -> Task:
    """The task of one block of rows, or of one expert's rows, times a few panels."""
    of_packed = tiles.int_tile(isa, bits, packed=bits == 4, half_scales=half_scales, values=values).name
    of_bytes = tiles.int_tile(isa, bits, packed=False, half_scales=half_scales, values=values).name
    to_bytes, size = tiles.unpack_tile(isa, values).name, LOOKED_UP if values else BLOCK
    width, quad, per_byte = isa.int_tile, isa.int_tile * dot_for(isa, bits).inputs, 8 // bits
    scale_bytes, input_bytes = 2 if half_scales else 4, dot_for(isa, bits).input_bytes
    spread_rows = SPREAD_ROWS if bits == 4 else 1 << 62

    def product(args: int, scratch: int, index: int) -> None:
        a = read(args, ProductArgs)
        x, groups, blocks = a.activations, a.groups, a.group_blocks
        entry, first, num_panels, row, end = rows_of(a.blocks, a.experts, index)
        codes, scales, zeros, bias = a.codes, a.scales, a.zeros, a.results.bias
        if entry:
            codes, scales, zeros, bias = unpack(entry, 4)
        group_bytes = blocks * size * width // per_byte
        while row < end:
            num_rows = min(a.blocks.row_block, end - row)
            sums_bytes, spread = 4 * num_rows * width, num_rows > spread_rows
            chunk = a.chunk if num_rows > STREAM_ROWS else groups
            carray(pointer(scratch), num_panels * num_rows * width, np.float32)[:] = 0
            for p in range(num_panels):
                for g in range(0, groups, chunk):
                    count, at = min(chunk, groups - g), (first + p) * groups + g
                    source, unpacked = codes + at * group_bytes, scratch + num_panels * sums_bytes
                    if spread:
                        tile(to_bytes, 1, (source, unpacked, count * group_bytes // quad))
                    r = 0
                    while r < num_rows:
                        ahead = source + (count * group_bytes if num_rows > STREAM_ROWS else AHEAD)
                        of_row, of_group = (row + r) * groups + g, at * width
                        activations = x.codes + (row + r) * x.row_bytes + g * blocks * size * input_bytes
                        sums, left = scratch + p * sums_bytes + 4 * r * width, num_rows - r
                        step, total = x.scales + 4 * of_row, x.sums + 4 * of_row
                        scale, zero = scales + of_group * scale_bytes, zeros + of_group
                        panel = unpacked if spread else source
                        of_x, of_panel = (activations, x.row_bytes, panel, step, total, 4 * groups), (scale, zero, sums)
                        given = (*of_x, *of_panel, count, blocks, ahead)
                        r += tile(of_bytes, left, given) if spread else tile(of_packed, left, given)
            store_panels(a.results, bias, scratch, width, row, num_rows, first, num_panels)
            row += num_rows

    return Task(product)


def linear(
    isa: Isa, bits: int, x: Tensor, packed: PackedWeight, bias: Tensor | None, norm: Norm | None = None
) -> Tensor:
    """x [T, K] -> [T, N]. See ops.linear_w4a8."""
    dtype, x = x.dtype, as_float(x)
    rows, group, bits = x.shape[0], packed.group_size, _stored_bits(packed, bits)
    tiled = isa.tiles and rows > FEW_ROWS and not packed.values
    layout = on_tiles.layout(group) if tiled else Layout(1, group)
    _memory, activations = quantize(x, packed, norm, layout, wide=dot_for(isa, bits).input_bytes == 2)
    out = workspace.empty(rows, packed.out_features // 2 if packed.activation else packed.out_features)
    multiply = on_tiles.multiply if tiled else _multiply
    multiply(isa, bits, activations, packed, None if bias is None else bias.float(), out)
    return as_type(out, dtype)


def of_experts(isa: Isa, bits: int, x: Tensor, places: Places, table: ExpertTable, by_token: bool) -> Tensor:
    """See registry.ExpertLinears."""
    packed: PackedWeight = table.packed
    bits = _stored_bits(packed, bits)
    wide = dot_for(isa, bits).input_bytes == 2
    _memory, activations = quantize(as_float(x), packed, None, Layout(1, packed.group_size), wide=wide)
    if by_token:
        _gathered, activations = gather_codes(activations, places.tokens, packed.scales.shape[1])
    features = packed.out_features // 2 if packed.activation else packed.out_features
    out = workspace.empty(len(places.tokens), features)
    _multiply(isa, bits, activations, packed, None, out, table.at(places), places.max_active)
    return out


def _stored_bits(packed: PackedWeight, bits: int) -> int:
    """Codes of 8 bits that are looked up are stored in 4."""
    return 4 if packed.values else bits


def _multiply(
    isa: Isa, bits: int, activations: Activations, packed: PackedWeight, bias: Tensor | None, out: Tensor,
    experts: Experts = NO_EXPERTS, max_active: int = 0,
) -> None:  # fmt: skip
    rows, width = out.shape[0], isa.int_tile
    (panels, groups), group = packed.scales.shape[:2], packed.group_size
    row_block, chunk = max(1, min(rows, ROW_BLOCK)), min(groups, max(1, CHUNK_BYTES // (width * group)))
    per_task = panels_per_task(width * groups * group * bits // 8, panels, packed.activation is not None)
    blocks = Blocks(rows, panels, per_task, row_block)
    args = ProductArgs(
        blocks, experts, activations, packed.codes.data_ptr(), packed.scales.data_ptr(), packed.zeros.data_ptr(),
        groups=groups, group_blocks=group // (LOOKED_UP if packed.values else BLOCK), chunk=chunk,
        results=results(out, bias, packed.activation),
    )  # fmt: skip
    task = product_task(isa, bits, packed.scales.dtype == torch.float16, packed.values)
    scratch = 4 * per_task * row_block * width + width * chunk * group
    run_blocks(task, blocks, args, panel_size=width * groups * group, scratch=scratch, max_active=max_active)


def _table(parts: list[tuple[PackedWeight, Tensor | None]]) -> ExpertTable:
    return ExpertTable.of(parts, lambda packed: [packed.codes, packed.scales, packed.zeros])


def implementation(isa: Isa, bits: int) -> Implementation:
    max_rows = FEW_ROWS if isa.tiles else None
    return Implementation(
        f"cpu.{isa.name}",
        "cpu",
        functools.partial(linear, isa, bits),
        functools.partial(accepts, bits),
        functools.partial(pack, isa),
        20,
        of_experts=ExpertLinears(_table, functools.partial(of_experts, isa, bits), max_rows),
        rows=functools.partial(quantized_rows, isa, bits),
    )
