"""Codes of a KV row in memory -> the numbers they stand for, a byte each. ops describes the rows.

Codes of 8 bits are bytes already, and those of int4 unpack to two vectors half a row apart (`dots.nibbles`). A type
with levels has units of 32 codes; a vector is a part of a unit, one unit or two:

    8 bytes, as one number   >> 0, 2, 4, 6 and 3      the low two bits of codes 0 .. 7, 8 .. 15, 16 .. 23, 24 .. 31
    4 bytes, of three bits   a bit for each lane      adds 4
    then a look-up of `levels`
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import pairwise

from llvmlite import ir

from lmkit.kernels.cpu.dots import chosen
from lmkit.kernels.cpu.emit import F32, I8, I32, I64, Emitter, Value, constant
from lmkit.kernels.cpu.tiles import Tile, register
from lmkit.kv_dtype import KVDtype

LookUp = Callable[[Emitter, Value, tuple[int, ...]], Value]  # (emitter, indices, table) -> the table's bytes
UNIT = 32  # codes


def load_numbers(
    e: Emitter, kind: KVDtype, rows: Sequence[Value], column: Value, count: int, look_up: LookUp = chosen
) -> Value:
    """The numbers of rows from `column` on, `count` of each, row after row: bytes [len(rows) * count].

    `column` is a multiple of `count`, which is 8, 16, 32 or 64. There are several rows for a type with levels only.
    """
    if not kind.levels:
        (row,) = rows
        return e.load(e.offset(row, column), e.vector(I8, count))
    b, size, part = e.builder, kind.columns(UNIT), min(count, UNIT)
    at = e.times(b.lshr(column, I64(5)), size)
    parts = [e.offset(row, at, size * unit) for row in rows for unit in range(count // part)]
    per_part = part // 8  # lanes of 8 codes
    lanes, eighth = per_part * len(parts), b.and_(b.lshr(column, I64(3)), I64(3))  # 0 for whole units
    pairs = e.vector(I64, lanes)
    spread = ir.Constant(pairs, ir.Undefined)
    for number, place in enumerate(parts):
        spread = b.insert_element(spread, e.load(place, I64), I32(number))
    order = ir.Constant(e.vector(I32, lanes), [lane // per_part for lane in range(lanes)])
    shifts = ir.Constant(pairs, [2 * (lane % per_part) for lane in range(lanes)])
    if part < UNIT:
        start = b.insert_element(ir.Constant(pairs, ir.Undefined), b.shl(eighth, I64(1)), I32(0))
        shifts = b.add(shifts, b.shuffle_vector(start, start, ir.Constant(e.vector(I32, lanes), [0] * lanes)))
    codes = b.bitcast(b.lshr(b.shuffle_vector(spread, spread, order), shifts), e.vector(I8, 8 * lanes))
    codes = b.and_(codes, constant(codes.type, 3))
    if kind.bits == 3:
        width = ir.IntType(8 * lanes)
        bits = ir.Constant(width, 0)
        for number, place in enumerate(parts):
            third = (
                b.zext(e.load(e.offset(place, 8, eighth), ir.IntType(part)), width)
                if len(parts) > 1
                else (e.load(e.offset(place, 8, eighth), width))
            )
            bits = b.or_(bits, b.shl(third, ir.Constant(width, part * number)))
        lane_bits = b.bitcast(bits, e.vector(ir.IntType(1), codes.type.count))
        codes = b.or_(codes, b.select(lane_bits, constant(codes.type, 4), constant(codes.type, 0)))
    return look_up(e, codes, kind.levels)


def levels_tile(kind: KVDtype) -> Tile:
    """For each of a type's units: the products of `chunks` * 8 floats at `x` with their nearest levels, and of these
    with themselves, summed up: float32 [units, 2] at `out`. The unit's base, a float32, is at `deviation`.
    """
    levels = [level - kind.largest / 2 for level in kind.levels]
    bounds = [(first + second) / 2 for first, second in pairwise(levels)]

    def body(e: Emitter, rows: int, arguments: list[Value]) -> None:
        x, chunks, deviation, out = arguments
        b, floats = e.builder, e.vector(F32)
        base = e.load(deviation, F32)
        for number, unit in enumerate(kind.units):  # one at a time: all bounds together would not fit the registers
            limits = [e.splat(b.fmul(base, constant(F32, bound * unit))) for bound in bounds]
            (sums,) = e.variables(1, 2, floats)
            for variable in sums:
                b.store(constant(floats, 0), variable)
            with e.loop(chunks) as chunk:
                value, level = e.load(e.offset(x, e.times(chunk, 4 * e.lanes)), floats), constant(floats, levels[0])
                for limit, above in zip(limits, levels[1:], strict=True):
                    level = b.select(b.fcmp_ordered(">", value, limit), constant(floats, above), level)
                for variable, factor in zip(sums, (value, level), strict=True):
                    b.store(e.fma(factor, level, b.load(variable)), variable)
            for i, variable in enumerate(sums):
                e.store(e.fold(b.load(variable), b.fadd), e.offset(out, 8 * number + 4 * i))

    return register(f"levels_tile.{kind}", 8, (1,), 4, body)
