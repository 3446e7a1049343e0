"""Linears with quantized weights on int8 activations (ops.linear_w4a8, linear_w8a8, linear_planes, linear_split).

A few rows read the packed codes of a panel (packed_weight.py) and unpack them in registers. Many rows share panels that
are unpacked to bytes, a chunk of K at a time, which stays in the first-level cache. Tile registers (isa.Isa.tiles)
serve as many as are worth it. All add up groups in the same order with the same instructions. A token's result
therefore does not depend on the number of tokens computed with it.
"""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import numpy as np
import torch
from numba import carray
from torch import Tensor

from lmkit.kernels.cpu import packed_planes, tiles, workspace
from lmkit.kernels.cpu.activations import Activations, Layout, gather_codes, quantize
from lmkit.kernels.cpu.amx import planes as planes_on_tiles
from lmkit.kernels.cpu.amx import quantized as on_tiles
from lmkit.kernels.cpu.dots import BLOCK, LOOKED_UP
from lmkit.kernels.cpu.intrinsics import pointer, tile, unpack
from lmkit.kernels.cpu.isa import Isa
from lmkit.kernels.cpu.jit import Task, inline
from lmkit.kernels.cpu.packed_rows import plane_rows, quantized_rows
from lmkit.kernels.cpu.packed_weight import PackedWeight, Stored, accepts, pack
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
from lmkit.kernels.cpu.plane_tiles import UNIT, Planes, planes_tile, unpack_planes_tile
from lmkit.kernels.cpu.structs import read
from lmkit.kernels.cpu.tiles import FEW_ROWS
from lmkit.kernels.ops import Norm, Places
from lmkit.kernels.registry import ExpertLinears, Implementation
from lmkit.qtensor import QTensor, QuantScheme

SPREAD_ROWS = 32  # up to so many, unpacking in registers each time costs less than stores
# Up to so many rows read a panel at the speed of the memory, and prefetch what they read themselves. More rows compute
# a chunk while the next one comes: 3 and 4 then read 10 % more in a second (AVX512-VNNI, Zen 5).
STREAM_ROWS = 2
SPLIT = 2  # parts of an input that keeps 16 bits
AHEAD = 2048  # bytes between the weights that such a row reads and those that it prefetches


class ProductArgs(NamedTuple):
    blocks: Blocks
    experts: Experts
    activations: Activations
    codes: int
    scales: int
    zeros: int
    steps: int  # groups, or units of planes
    step_blocks: int  # in a step; see tiles.int_tile
    chunk: int  # steps that many rows compute at a time
    parts: int  # rows that are added up: see `linear`
    results: Results


class Kernels(NamedTuple):
    """What the task of a product takes from how a weight is stored. Bytes are those of a panel."""

    of_packed: str
    of_bytes: str
    to_bytes: str
    packed: bool  # stored in less than a byte each
    bits: int  # of stored codes
    block: int  # inputs
    unpacked_bytes: int  # that one iteration of to_bytes takes
    step_groups: int
    side_steps: int  # that share a side of scales
    side_bytes: int
    zero_bytes: int  # of a step


@functools.cache
def kernels_of(isa: Isa, form: Stored | Planes, inputs: int = 1) -> Kernels:
    """`inputs`: see plane_tiles.planes_tile."""
    width = isa.int_tile
    if isinstance(form, Planes):
        return Kernels(
            planes_tile(isa, form, packed=True, inputs=inputs).name,
            planes_tile(isa, form, packed=False, inputs=inputs).name,
            unpack_planes_tile(isa, form).name, True, form.bits, UNIT, width * UNIT * form.bits // 8, form.groups,
            form.side_units, width * form.side_bytes, 0,
        )  # fmt: skip
    bits, half, values = form
    return Kernels(
        tiles.int_tile(isa, bits, packed=bits == 4, half_scales=half, values=values).name,
        tiles.int_tile(isa, bits, packed=False, half_scales=half, values=values).name,
        tiles.unpack_tile(isa, values).name, bits == 4, bits, LOOKED_UP if values else BLOCK,
        width * form.dot(isa).inputs, 1, 1, width * (2 if half else 4), width,
    )  # fmt: skip


@functools.cache
def product_task(isa: Isa, form: Stored | Planes, inputs: int = 1) -> Task:
    """The task of one block of rows, or of one expert's rows, times a few panels. A row has `inputs` rows of codes."""
    kernels = kernels_of(isa, form, inputs)
    of_packed, of_bytes, to_bytes = kernels.of_packed, kernels.of_bytes, kernels.to_bytes
    width, size, bits, per_step = isa.int_tile, kernels.block, kernels.bits, kernels.step_groups
    unpacked_bytes, side_steps, side_bytes = kernels.unpacked_bytes, kernels.side_steps, kernels.side_bytes
    zero_bytes, input_bytes = kernels.zero_bytes, form.dot(isa).input_bytes
    spread_rows, stream_rows = (SPREAD_ROWS if kernels.packed else 1 << 62) // inputs, STREAM_ROWS // inputs

    def product(args: int, scratch: int, index: int) -> None:
        a = read(args, ProductArgs)
        x, steps, blocks = a.activations, a.steps, a.step_blocks
        entry, first, num_panels, row, end = rows_of(a.blocks, a.experts, index)
        codes, scales, zeros, bias = a.codes, a.scales, a.zeros, a.results.bias
        if entry:
            codes, scales, zeros, bias = unpack(entry, 4)
        step_bytes = blocks * size * width * bits // 8
        while row < end:
            num_rows = min(a.blocks.row_block, end - row)
            sums_bytes, spread = 4 * num_rows * width, num_rows > spread_rows
            chunk = a.chunk if num_rows > stream_rows else steps
            carray(pointer(scratch), num_panels * num_rows * width, np.float32)[:] = 0
            for p in range(num_panels):
                for g in range(0, steps, chunk):
                    count, at = min(chunk, steps - g), (first + p) * steps + g
                    source, unpacked = codes + at * step_bytes, scratch + num_panels * sums_bytes
                    if spread:
                        tile(to_bytes, 1, (source, unpacked, count * step_bytes // unpacked_bytes))
                    r = 0
                    while r < num_rows:
                        ahead = source + (count * step_bytes if num_rows > stream_rows else AHEAD)
                        of_row = ((row + r) * inputs * steps + g) * per_step
                        activations = x.codes + (row + r) * inputs * x.row_bytes + g * blocks * size * input_bytes
                        sums, left = scratch + p * sums_bytes + 4 * r * width, num_rows - r
                        step, total = x.scales + 4 * of_row, x.sums + 4 * of_row
                        scale, zero = scales + at // side_steps * side_bytes, zeros + at * zero_bytes
                        panel = unpacked if spread else source
                        of_x = (activations, x.row_bytes, panel, step, total, 4 * per_step * steps)
                        given = (*of_x, scale, zero, sums, count, blocks, ahead)
                        r += tile(of_bytes, left, given) if spread else tile(of_packed, left, given)
            kept = add_parts(scratch, a.parts, num_rows, num_panels, width)
            store_panels(a.results, bias, scratch, width, row // a.parts, kept, first, num_panels)
            row += num_rows

    return Task(product)


@inline
def add_parts(sums: int, parts: int, rows: int, panels: int, width: int) -> int:
    """Add up the `parts` neighbouring rows of sums float32 [panels, rows, width]. Returns the rows of a panel then."""
    if parts == 1:
        return rows
    kept = rows // parts
    for p in range(panels):
        for r in range(kept):
            target = carray(pointer(sums + 4 * (p * kept + r) * width), width, np.float32)
            one = carray(pointer(sums + 4 * (p * rows + 2 * r) * width), width, np.float32)
            other = carray(pointer(sums + 4 * (p * rows + 2 * r + 1) * width), width, np.float32)
            for i in range(width):
                target[i] = one[i] + other[i]
    return kept


def linear(
    isa: Isa, parts: int, x: Tensor, packed: PackedWeight, bias: Tensor | None, norm: Norm | None = None
) -> Tensor:
    """x [T, K] -> [T, N]. See ops.linear_w4a8. With two parts, a row of inputs is multiplied as its codes and as those
    of what they left: plane_ops.linear_split."""
    dtype, x, form = x.dtype, as_float(x), packed.form
    rows, group = x.shape[0], packed.group_size
    in_planes, many = isinstance(form, Planes), isa.tiles and rows > FEW_ROWS
    tiled = many and (in_planes or (parts == 1 and not packed.values))
    layout = Layout(1, group)
    if tiled:
        layout = planes_on_tiles.layout(form) if isinstance(form, Planes) else on_tiles.layout(group)
    _memory, activations = quantize(x, packed, norm, layout, wide=form.dot(isa).input_bytes == 2, parts=parts)
    out = workspace.empty(rows, packed.out_features // 2 if packed.activation else packed.out_features)
    whole = None if bias is None else bias.float()
    if tiled and in_planes:
        planes_on_tiles.multiply(isa, activations, packed, whole, out, parts)
    elif tiled:
        on_tiles.multiply(isa, form.bits, activations, packed, whole, out)
    else:
        _multiply(isa, activations, packed, whole, out, parts=parts)
    return as_type(out, dtype)


def of_experts(isa: Isa, x: Tensor, places: Places, table: ExpertTable, by_token: bool) -> Tensor:
    """See registry.ExpertLinears."""
    packed: PackedWeight = table.packed
    wide = packed.form.dot(isa).input_bytes == 2
    _memory, activations = quantize(as_float(x), packed, None, Layout(1, packed.group_size), wide=wide)
    if by_token:
        _gathered, activations = gather_codes(activations, places.tokens, packed.groups)
    features = packed.out_features // 2 if packed.activation else packed.out_features
    out = workspace.empty(len(places.tokens), features)
    _multiply(isa, activations, packed, None, out, table.at(places), places.max_active)
    return out


def _multiply(
    isa: Isa, activations: Activations, packed: PackedWeight, bias: Tensor | None, out: Tensor,
    experts: Experts = NO_EXPERTS, max_active: int = 0, parts: int = 1,
) -> None:  # fmt: skip
    inputs, parts = (parts, 1) if isinstance(packed.form, Planes) else (1, parts)
    rows, width, kernels = parts * out.shape[0], isa.int_tile, kernels_of(isa, packed.form, inputs)
    panels, in_features = packed.scales.shape[0], packed.groups * packed.group_size
    step = kernels.step_groups * packed.group_size
    steps = in_features // step
    row_block, chunk = max(1, min(rows, ROW_BLOCK // inputs)), min(steps, max(1, CHUNK_BYTES // (width * step)))
    per_task = panels_per_task(width * in_features * kernels.bits // 8, panels, packed.activation is not None)
    blocks = Blocks(rows, panels, per_task, row_block)
    args = ProductArgs(
        blocks, experts, activations, packed.codes.data_ptr(), packed.scales.data_ptr(), packed.zeros.data_ptr(),
        steps=steps, step_blocks=step // kernels.block, chunk=chunk, parts=parts,
        results=results(out, bias, packed.activation),
    )  # fmt: skip
    scratch = 4 * per_task * row_block * width + width * chunk * step
    run_blocks(
        product_task(isa, packed.form, inputs), blocks, args, panel_size=width * in_features, scratch=scratch,
        max_active=max_active,
    )  # fmt: skip


def _table(parts: list[tuple[PackedWeight, Tensor | None]]) -> ExpertTable:
    return ExpertTable.of(parts, lambda packed: [packed.codes, packed.scales, packed.zeros])


def implementation(isa: Isa, bits: int) -> Implementation:
    max_rows = FEW_ROWS if isa.tiles else None
    return Implementation(
        f"cpu.{isa.name}",
        "cpu",
        functools.partial(linear, isa, 1),
        functools.partial(accepts, bits),
        functools.partial(pack, isa),
        20,
        of_experts=ExpertLinears(_table, functools.partial(of_experts, isa), max_rows),
        rows=functools.partial(quantized_rows, isa),
    )


def planes_implementation(isa: Isa) -> Implementation:
    """plane_ops.linear_planes."""
    return Implementation(
        f"cpu.{isa.name}",
        "cpu",
        functools.partial(linear, isa, 1),
        packed_planes.accepts,
        functools.partial(packed_planes.pack, isa),
        20,
        of_experts=ExpertLinears(_table, functools.partial(of_experts, isa)),
        rows=functools.partial(plane_rows, isa),
    )


def split_implementation(isa: Isa) -> Implementation:
    """plane_ops.linear_split."""

    def accepts_any(*, scheme: QuantScheme, scales: torch.dtype, in_features: int, **traits: Any) -> str | None:
        if _is_one_plane(scheme, scales, in_features):
            return None
        if scheme.in_planes:
            return packed_planes.accepts(scheme=scheme, scales=scales, in_features=in_features, **traits)
        if isa.tiles:
            return "tile registers multiply such weights by exact inputs"
        return accepts(scheme.bits, **traits)

    def pack_any(weight: QTensor, activation: str | None = None) -> PackedWeight:
        scheme = weight.scheme
        in_planes = scheme.in_planes or _is_one_plane(scheme, weight.scales.dtype, weight.codes.shape[1])
        return (packed_planes.pack if in_planes else pack)(isa, weight, activation)

    def rows_of_any(packed: PackedWeight, rows: Tensor, factor: float = 1.0) -> Tensor:
        return (plane_rows if isinstance(packed.form, Planes) else quantized_rows)(isa, packed, rows, factor)

    run = functools.partial(linear, isa, SPLIT)
    return Implementation(f"cpu.{isa.name}", "cpu", run, accepts_any, pack_any, 20, rows=rows_of_any)


def _is_one_plane(scheme: QuantScheme, scales: torch.dtype, in_features: int) -> bool:
    """Whether codes of 8 bits are kept as a plane, which tile registers multiply, too: those of GGUF's Q8_0."""
    alike = scheme.bits == 8 and scheme.symmetric and scheme.group_size == UNIT and scheme.codes.uniform
    return alike and scales == torch.float16 and in_features % UNIT == 0
