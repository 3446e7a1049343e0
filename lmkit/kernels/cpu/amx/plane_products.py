"""Micro-kernels of int8 activations and weights in planes of bits (packed_planes.py) on tiles: 16 rows times a panel of
64 outputs, some units of 32 inputs at a time. They compute what plane_tiles.planes_tile computes, in the same order.

Activations are the first operand, in tiles of 16 rows by a group, and codes, as signed bytes, the second one. Tile
registers 0 to 3 hold the sums of 16 outputs each, 4 and 5 activations, 6 and 7 codes. A group is one dot for each part
of the activations and column of tiles. Its epilogue runs while the dots of the next group are computed.
"""

from __future__ import annotations

from typing import NamedTuple

from lmkit.kernels.cpu.amx.products import COLUMNS, PRODUCTS, WIDTH
from lmkit.kernels.cpu.amx.tile_file import ROW_BYTES, ROWS, TILE, TileFile
from lmkit.kernels.cpu.emit import F32, I32, I64, Emitter, Value
from lmkit.kernels.cpu.isa import Isa
from lmkit.kernels.cpu.plane_tiles import QUADS, UNIT, Planes, joined, negative_sum, side
from lmkit.kernels.cpu.tiles import CACHE_LINE, Tile, register

QUAD = 4 * WIDTH  # bytes of a quad of inputs


class Late(NamedTuple):
    """The group whose epilogue remains to be done."""

    unit: Value
    number: int  # of the group in its unit
    products: Value
    rows: Value


class Operands(NamedTuple):
    """What the epilogues of a micro-kernel share: see product_tile."""

    sums: Value
    sides: Value
    steps: Value  # of the last part
    totals: Value
    first: Value
    backs: Value  # room for 16 floats
    step_part: Value


def _finish(e: Emitter, isa: Isa, form: Planes, parts: int, given: Operands, late: Late) -> None:
    b, floats = e.builder, e.vector(F32)

    def whole(found: list[Value]) -> Value:
        """The sum of both parts, or the only one."""
        return found[0] if parts == 1 else joined(e, found[:1], found[1:])[0]

    scales, offsets = side(e, isa, form, given.sides, e.offset(given.first, late.unit), late.number, I64(0), COLUMNS)
    of_group = e.times(e.offset(e.times(late.unit, form.groups), late.number), 4 * ROWS)
    if offsets:
        places = [e.offset(given.totals, of_group, e.times(given.step_part, part)) for part in range(parts)]
        total = whole([negative_sum(e, e.load(place, e.vector(I32))) for place in places])
        e.store(b.fmul(e.load(e.offset(given.steps, of_group), floats), b.sitofp(total, floats)), given.backs)
    with e.loop(late.rows, unroll=False) as row:
        step = e.splat(e.load(e.offset(given.steps, of_group, e.times(row, 4)), F32))
        back = e.splat(e.load(e.offset(given.backs, e.times(row, 4)), F32)) if offsets else None
        for j in range(COLUMNS):
            place = e.offset(given.sums, e.times(row, 4 * WIDTH), ROW_BYTES * j)
            of_row = e.offset(late.products, e.times(row, ROW_BYTES), parts * TILE * j)
            found = whole([e.load(e.offset(of_row, TILE * part), e.vector(I32)) for part in range(parts)])
            product = b.fmul(b.sitofp(found, floats), step)
            total = e.fma(scales[j], product, e.load(place, floats))
            e.store(e.fma(offsets[j], back, total) if offsets else total, place)


def product_tile(isa: Isa, form: Planes, parts: int) -> Tile:
    """sums float32 [rows, 64] += the products of `rows` rows and the `units` units from number `first` on.

    x int8 [units, groups, 16, group] and w int8 [units, 8, 64, 4] are those of the units, and so are steps and totals,
    float32 and int32 [units, groups, 16] (see tiles.sum_pair); `sides` are those of the whole panel. The second of two
    `parts` (inputs of plane_tiles.planes_tile) lies `x_part` bytes after x, its steps and totals `step_part` bytes
    after those. `products` has room for those of two groups, int32 [2, 4, parts, 16, 16], and 16 floats. For each
    column of tiles, `lines` cache lines from `ahead` on are prefetched.
    """
    together = COLUMNS // parts  # columns whose sums fill the tile registers

    def body(e: Emitter, _rows: int, arguments: list[Value]) -> None:
        slots, x, w, sums, sides, steps, totals, first, units, rows, products, ahead, lines, *next_part = arguments
        x_part, step_part = next_part
        tiles, b, backs = TileFile(e, isa, slots), e.builder, e.offset(products, 2 * parts * PRODUCTS)
        given = Operands(sums, sides, e.offset(steps, e.times(step_part, parts - 1)), totals, first, backs, step_part)

        def buffer(unit: Value, number: int) -> Value:
            """Those of groups that follow each other differ."""
            odd = I64(number) if form.groups == 2 else b.and_(unit, I64(1))
            return e.offset(products, e.times(odd, parts * PRODUCTS))

        def column(unit: Value, number: int, j: int) -> None:
            quads = e.offset(e.times(unit, QUADS * QUAD), number * form.group // 4 * QUAD, ROW_BYTES * j)
            tiles.load(6 + j % 2, e.offset(w, quads), QUAD)
            for part in range(parts):
                tiles.zero(j % together * parts + part)
                tiles.dot_int8(j % together * parts + part, 4 + part, 6 + j % 2)
            if number == 0:
                of_column = e.times(e.offset(e.times(unit, COLUMNS), j), lines)
                with e.loop(lines, unroll=False) as line:
                    e.prefetch(e.offset(ahead, e.times(e.offset(of_column, line), CACHE_LINE)), level=1)

        def group(unit: Value, number: int, late: Late) -> None:
            for part in range(parts):
                of_group = e.offset(e.times(unit, ROWS * UNIT), number * ROWS * form.group)
                tiles.load(4 + part, e.offset(x, of_group, e.times(x_part, part)), form.group)
            for start in range(0, COLUMNS, together):
                for j in range(start, start + together):
                    column(unit, number, j)
                if start + together == COLUMNS:
                    _finish(e, isa, form, parts, given, late)
                for place in range(COLUMNS):
                    tiles.store(place, e.offset(buffer(unit, number), TILE * (parts * start + place)), ROW_BYTES)

        last = form.groups - 1
        with e.loop(units, unroll=False) as unit:
            is_first = b.icmp_unsigned("==", unit, I64(0))
            before = b.select(is_first, unit, b.sub(unit, I64(1)))
            group(unit, 0, Late(before, last, buffer(before, last), b.select(is_first, I64(0), rows)))
            for number in range(1, form.groups):
                group(unit, number, Late(unit, number - 1, buffer(unit, number - 1), rows))
        end = b.sub(units, I64(1))
        _finish(e, isa, form, parts, given, Late(end, last, buffer(end, last), rows))

    return register(f"amx_planes_tile.{isa.name}.{form.sides}{'.split' * (parts - 1)}", 16, (1,), 15, body)
