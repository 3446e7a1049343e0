"""Micro-kernels of int8 activations and weights in planes of bits (packed_planes.py) on tiles: 16 rows times a panel of
64 outputs, some units of 32 inputs at a time. They compute what plane_tiles.planes_tile computes, in the same order.

Activations are the first operand, in tiles of 16 rows by a group, and codes, as signed bytes, the second one. Tile
registers 0 to 3 hold the sums of 16 outputs each, 4 activations, 6 and 7 codes. A group is one dot a column of tiles.
Its epilogue runs while the dots of the next group are computed.
"""

from __future__ import annotations

from typing import NamedTuple

from lmkit.kernels.cpu.amx.products import COLUMNS, PRODUCTS, WIDTH
from lmkit.kernels.cpu.amx.tile_file import ROW_BYTES, ROWS, TILE, TileFile
from lmkit.kernels.cpu.emit import F32, I32, I64, Emitter, Value
from lmkit.kernels.cpu.isa import Isa
from lmkit.kernels.cpu.plane_tiles import QUADS, UNIT, Planes, negative_sum, side
from lmkit.kernels.cpu.tiles import CACHE_LINE, Tile, register

QUAD = 4 * WIDTH  # bytes of a quad of inputs


class Late(NamedTuple):
    """The group whose epilogue remains to be done."""

    unit: Value
    number: int  # of the group in its unit
    products: Value
    rows: Value


def product_tile(isa: Isa, form: Planes) -> Tile:
    """sums float32 [rows, 64] += the products of `rows` rows and the `units` units from number `first` on.

    x int8 [units, groups, 16, group] and w int8 [units, 8, 64, 4] are those of the units, and so are steps and totals,
    float32 and int32 [units, groups, 16] (see tiles.sum_pair); `sides` are those of the whole panel. `products` has
    room for the products of two groups, int32 [2, 4, 16, 16], and 16 floats. For each column of tiles, `lines` cache
    lines from `ahead` on are prefetched.
    """

    def body(e: Emitter, _rows: int, arguments: list[Value]) -> None:
        slots, x, w, sums, sides, steps, totals, first, units, rows, products, ahead, lines = arguments
        tiles, b, backs, floats = TileFile(e, isa, slots), e.builder, e.offset(products, 2 * PRODUCTS), e.vector(F32)

        def finish(late: Late) -> None:
            scales, offsets = side(e, isa, form, sides, e.offset(first, late.unit), late.number, I64(0), COLUMNS)
            of_group = e.times(e.offset(e.times(late.unit, form.groups), late.number), 4 * ROWS)
            if offsets:
                total = negative_sum(e, e.load(e.offset(totals, of_group), e.vector(I32)))
                e.store(b.fmul(e.load(e.offset(steps, of_group), floats), b.sitofp(total, floats)), backs)
            with e.loop(late.rows, unroll=False) as row:
                step = e.splat(e.load(e.offset(steps, of_group, e.times(row, 4)), F32))
                back = e.splat(e.load(e.offset(backs, e.times(row, 4)), F32)) if offsets else None
                for j in range(COLUMNS):
                    place = e.offset(sums, e.times(row, 4 * WIDTH), ROW_BYTES * j)
                    found = e.load(e.offset(late.products, e.times(row, ROW_BYTES), TILE * j), e.vector(I32))
                    product = b.fmul(b.sitofp(found, floats), step)
                    total = e.fma(scales[j], product, e.load(place, floats))
                    e.store(e.fma(offsets[j], back, total) if offsets else total, place)

        def buffer(unit: Value, number: int) -> Value:
            """Those of groups that follow each other differ."""
            odd = I64(number) if form.groups == 2 else b.and_(unit, I64(1))
            return e.offset(products, e.times(odd, PRODUCTS))

        with e.loop(units, unroll=False) as unit:
            is_first, last = b.icmp_unsigned("==", unit, I64(0)), form.groups - 1
            before = b.select(is_first, unit, b.sub(unit, I64(1)))
            for number in range(form.groups):
                tiles.load(4, e.offset(x, e.times(unit, ROWS * UNIT), number * ROWS * form.group), form.group)
                for j in range(COLUMNS):
                    quads = e.offset(e.times(unit, QUADS * QUAD), number * form.group // 4 * QUAD, ROW_BYTES * j)
                    tiles.zero(j)
                    tiles.load(6 + j % 2, e.offset(w, quads), QUAD)
                    tiles.dot_int8(j, 4, 6 + j % 2)
                    if number == 0:
                        of_column = e.times(e.offset(e.times(unit, COLUMNS), j), lines)
                        with e.loop(lines, unroll=False) as line:
                            e.prefetch(e.offset(ahead, e.times(e.offset(of_column, line), CACHE_LINE)), level=1)
                if number:
                    finish(Late(unit, number - 1, buffer(unit, number - 1), rows))
                else:
                    finish(Late(before, last, buffer(before, last), b.select(is_first, I64(0), rows)))
                for j in range(COLUMNS):
                    tiles.store(j, e.offset(buffer(unit, number), TILE * j), ROW_BYTES)
        end = b.sub(units, I64(1))
        finish(Late(end, form.groups - 1, buffer(end, form.groups - 1), rows))

    kind = f"{form.group}.{'factors' if form.factors else 'half'}{'.shifted' * form.shifted}"
    return register(f"amx_planes_tile.{isa.name}.{kind}", 16, (1,), 13, body)
