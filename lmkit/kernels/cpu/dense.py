"""Linears on exact float32 activations, with dense weights (ops.linear_dense) or codes (ops.linear_w4a16, linear_w8a16
and linear_fp8).

Weights lie in panels (packed_dense.py). A chunk of a panel is widened to float32 in the first-level cache and shared by
a block of rows. Inputs are added strictly in order, so a row's result does not depend on the number of rows computed
with it. torch's product does not promise that. With tile registers, amx/dense.py computes the products that it can.
"""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import numpy as np
import torch
from numba import carray
from torch import Tensor

from lmkit.kernels.cpu import threads, tiles, workspace
from lmkit.kernels.cpu.amx import dense as amx_dense
from lmkit.kernels.cpu.elementwise import embedding, rms_norm
from lmkit.kernels.cpu.intrinsics import pointer, tile, unpack
from lmkit.kernels.cpu.isa import Isa
from lmkit.kernels.cpu.jit import Task
from lmkit.kernels.cpu.packed_dense import CODE_BITS, KINDS, PackedDense, pack_codes, pack_dense
from lmkit.kernels.cpu.packed_rows import dense_rows
from lmkit.kernels.cpu.panels import (
    CHUNK_BYTES,
    NO_EXPERTS,
    ROW_BLOCK,
    Blocks,
    Experts,
    ExpertTable,
    Results,
    address,
    as_float,
    as_type,
    panels_per_task,
    results,
    rows_of,
    run_blocks,
    store_panels,
)
from lmkit.kernels.cpu.structs import read
from lmkit.kernels.ops import Norm, Places
from lmkit.kernels.registry import ExpertLinears, Implementation

PAIRED_PANELS = 8  # for each thread: so many are shared out in pairs


class ProductArgs(NamedTuple):
    blocks: Blocks
    experts: Experts
    x: int
    x_stride: int  # bytes
    weight: int
    panel_bytes: int
    scales: int
    zeros: int
    groups: int  # of codes, in a row
    group: int  # inputs
    inputs: int
    chunk: int  # inputs widened at a time
    results: Results


@functools.cache
def product_task(isa: Isa, kind: str) -> Task:
    """The task of one block of rows, or of one expert's rows, times a few panels."""
    multiply, width, is_coded = tiles.float_tile(isa).name, isa.float_tile, kind in CODE_BITS
    stored = "float32" if is_coded else kind
    direct, pair = tiles.float_tile(isa, stored).name, tiles.float_tile(isa, stored, pairs=True).name
    stored_bytes, code_bits = 4 if kind == "float32" else 2, CODE_BITS.get(kind, 0)
    stored_row = (2 if kind == "float16" else 4) * width  # bytes
    direct_rows = isa.direct_rows
    widen, most_paired = tiles.widen_tile(isa, kind).name, tiles.pair_rows(isa)[0]  # nothing widens float32

    def product(args: int, scratch: int, index: int) -> None:
        a = read(args, ProductArgs)
        group, chunk = a.group, a.chunk
        entry, first, num_panels, row, end = rows_of(a.blocks, a.experts, index)
        weight, scales, zeros, bias = a.weight, a.scales, a.zeros, a.results.bias
        if entry:
            weight, scales, zeros, bias = unpack(entry, 4)
        while row < end:
            num_rows = min(a.blocks.row_block, end - row)
            sums_bytes = 4 * num_rows * width
            carray(pointer(scratch), num_panels * num_rows * width, np.float32)[:] = 0
            for k in range(0, a.inputs, chunk):
                count = min(chunk, a.inputs - k)
                p = 0
                while p < num_panels:
                    panel = weight + (first + p) * a.panel_bytes
                    values = scratch + num_panels * sums_bytes
                    is_direct, ldw = stored_bytes == 4 or (not is_coded and num_rows <= direct_rows), 4 * width
                    if is_direct:
                        values, ldw = panel + stored_bytes * k * width, stored_row
                    elif is_coded:
                        first_group = (first + p) * a.groups
                        start = k
                        while start < k + count:  # group by group
                            g = start // group
                            stop = min(k + count, (g + 1) * group)
                            at = 4 * (first_group + g) * width
                            target = values + 4 * (start - k) * width
                            source = panel + start * width * code_bits // 8
                            tile(widen, 1, (source, target, stop - start, scales + at, zeros + at))
                            start = stop
                    else:
                        tile(widen, 1, (panel + 2 * k * width, values, count, 0, 0))
                    if not is_coded and num_rows <= most_paired and p + 1 < num_panels:
                        sums, rows_at = scratch + p * sums_bytes, a.x + row * a.x_stride + 4 * k
                        given = (rows_at, a.x_stride, values, ldw, sums, 4 * width, count)
                        tile(pair, num_rows, (*given, a.panel_bytes, sums_bytes))
                        p += 2
                        continue
                    r = 0
                    while r < num_rows:
                        rows_at, sums = a.x + (row + r) * a.x_stride + 4 * k, scratch + p * sums_bytes + 4 * r * width
                        given = (rows_at, a.x_stride, values, ldw, sums, 4 * width, count)
                        r += tile(direct, num_rows - r, given) if is_direct else tile(multiply, num_rows - r, given)
                    p += 1
            store_panels(a.results, bias, scratch, width, row, num_rows, first, num_panels)
            row += num_rows

    return Task(product)


def linear(isa: Isa, x: Tensor, packed: PackedDense, bias: Tensor | None, norm: Norm | None = None) -> Tensor:
    """x [T, K] -> [T, N]. See ops.linear_dense."""
    dtype, x, bias = x.dtype, as_float(x), None if bias is None else bias.float()
    out = workspace.empty(x.shape[0], packed.out_features // 2 if packed.activation else packed.out_features)
    if isa.tiles and amx_dense.fits(packed):
        amx_dense.linear(isa, x, packed, bias, norm, out)
    else:
        _multiply(isa, x if norm is None else rms_norm(x, norm), packed, bias, out)
    return as_type(out, dtype)


def of_experts(isa: Isa, x: Tensor, places: Places, table: ExpertTable, by_token: bool) -> Tensor:
    """See registry.ExpertLinears."""
    packed: PackedDense = table.packed
    features = packed.out_features // 2 if packed.activation else packed.out_features
    out = workspace.empty(len(places.tokens), features)
    rows = embedding(x, places.tokens) if by_token else as_float(x)
    _multiply(isa, rows, packed, None, out, table.at(places), places.max_active)
    return out


def _multiply(
    isa: Isa, x: Tensor, packed: PackedDense, bias: Tensor | None, out: Tensor, experts: Experts = NO_EXPERTS,
    max_active: int = 0,
) -> None:  # fmt: skip
    rows, panels, width = x.shape[0], packed.data.shape[0], isa.float_tile
    panel_bytes = packed.data[0].nbytes
    row_block, chunk = max(1, min(rows, ROW_BLOCK)), CHUNK_BYTES // (4 * width)
    per_task = panels_per_task(panel_bytes, panels, packed.activation is not None)
    if rows <= tiles.pair_rows(isa)[0] and panels >= PAIRED_PANELS * threads.num_threads():
        per_task += per_task % 2
    blocks = Blocks(rows, panels, per_task, row_block)
    args = ProductArgs(
        blocks, experts, x=x.data_ptr(), x_stride=4 * x.stride(0), weight=packed.data.data_ptr(),
        panel_bytes=panel_bytes,
        scales=address(packed.scales), zeros=address(packed.zeros), groups=packed.groups, group=packed.group_size,
        inputs=packed.in_features, chunk=chunk,
        results=results(out, bias, packed.activation),
    )  # fmt: skip
    scratch = 4 * width * (per_task * row_block + chunk)
    sizes = {"panel_size": width * packed.in_features, "scratch": scratch, "max_active": max_active}
    run_blocks(product_task(isa, packed.kind), blocks, args, **sizes)


def _table(isa: Isa, parts: list[tuple[PackedDense, Tensor | None]]) -> ExpertTable | None:
    """Tile registers round inputs, so there all products of a weight must be theirs."""
    if isa.tiles and amx_dense.fits(parts[0][0]):
        return None
    return ExpertTable.of(parts, lambda packed: [packed.data, packed.scales, packed.zeros])


def _of_experts(isa: Isa) -> ExpertLinears:
    return ExpertLinears(functools.partial(_table, isa), functools.partial(of_experts, isa))


def _accepts_dense(*, dtype: torch.dtype, **traits: Any) -> str | None:
    return None if dtype in KINDS else f"weights of {dtype}"


def _accepts_codes(kind: str, /, *, group_size: int, bits: int | None = None, **traits: Any) -> str | None:
    if bits not in (None, CODE_BITS[kind]):
        return f"{bits} bits"
    odd = kind == tiles.CODES4 and group_size % 2 and group_size != -1
    return f"odd group_size {group_size}" if odd else None


def dense_implementation(isa: Isa) -> Implementation:
    run, pack = functools.partial(linear, isa), functools.partial(pack_dense, isa)
    name, experts = f"cpu.{isa.name}", _of_experts(isa)
    return Implementation(name, "cpu", run, _accepts_dense, pack, 20, of_experts=experts, rows=dense_rows)


def heads_implementation(isa: Isa) -> Implementation:
    """ops.linear_heads: a product for each head."""
    dense = dense_implementation(isa)

    def run(x: Tensor, packed: list[Any]) -> Tensor:
        return torch.stack([dense(x[:, h].contiguous(), part, None) for h, part in enumerate(packed)], dim=1)

    def pack(weight: Tensor) -> list[Any]:
        return [dense.pack(part, None) for part in weight]

    return Implementation(dense.name, "cpu", run, pack=pack, priority=20)


def codes_implementation(isa: Isa, kind: str) -> Implementation:
    """The implementation for codes. `kind` is one of CODE_BITS."""
    run, pack = functools.partial(linear, isa), functools.partial(pack_codes, isa, kind)
    name, experts, accepts = f"cpu.{isa.name}", _of_experts(isa), functools.partial(_accepts_codes, kind)
    return Implementation(name, "cpu", run, accepts, pack, 20, of_experts=experts, rows=dense_rows)
