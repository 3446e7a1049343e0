"""Micro-kernels of products with exact activations on tiles: 16 tokens times two panels of 32 outputs, a segment of up
to 128 inputs at a time, 32 inputs a dot.

An activation is the sum of two bfloat16, `high` and `low`, which leaves an error of 2^-17 at most. Both are multiplied
by the same weights into the same sums. Tile registers 0 to 3 hold the sums of 16 outputs each, 4 and 5 the halves of
activations, 6 and 7 weights. A segment's weights, 16 KB, and the halves, 8 KB, leave room in a first-level cache.

bfloat16 weights are read from their panels, and the sums go on from segment to segment. A float16 weight is the sum of
two bfloat16, too, and both parts are multiplied, one segment after the other. Codes are widened to bfloat16
first: the integers (code - zero), or float8. Both are exact there, as (code - zero) * scale would not be. The scales
are left to the epilogue of each segment, which therefore lies in one group:

    sums float32 [tokens, 2 panels, 32] += scale * product

The epilogue of 16 tokens runs between the dots of the next 16. So products are written to one of two buffers, while the
epilogue reads the other one. Its 64 vectors cost about 64 cycles beside 32 dots, which take 512.
"""

from __future__ import annotations

import functools
import struct
from collections.abc import Callable

from llvmlite import ir

from lmkit.kernels.cpu.amx.products import COLUMNS
from lmkit.kernels.cpu.amx.tile_file import ROW_BYTES, ROWS, TileFile
from lmkit.kernels.cpu.emit import F32, I8, I16, I32, I64, Emitter, Value, constant
from lmkit.kernels.cpu.isa import Isa
from lmkit.kernels.cpu.tiles import CACHE_LINE, CODES4, CODES8, Tile, load_halves, register

STEP = 32  # inputs of a dot
SEGMENT = 4 * STEP
WIDTH = 32  # outputs in a panel; two panels have the COLUMNS of products.py
SUM_ROW = 4 * WIDTH  # bytes
STEP_BYTES = 2 * STEP * WIDTH  # of a panel's weights as bfloat16
HIGH, LOW = "float16.high", "float16.low"  # kinds of widen_tile


def _epilogue(
    e: Emitter, products: Value, sums: Value, panel: Value, scales: Value, next_scales: Value
) -> Callable[[Value], None]:
    """A function that emits the epilogue of a row. `panel` is the bytes from a panel's sums to the next one's,
    `next_scales` the same of the scales."""
    floats = e.vector(F32)
    places = [(e.times(panel, j // 2), ROW_BYTES * (j % 2)) for j in range(COLUMNS)]
    of_columns = [e.load(e.offset(scales, e.times(next_scales, j // 2), ROW_BYTES * (j % 2)), floats) for j in range(4)]

    def emit(row: Value) -> None:
        at = e.times(row, SUM_ROW)
        for j, (of_panel, of_column) in enumerate(places):
            place = e.offset(sums, at, of_panel, of_column)
            product = e.load(e.offset(products, at, j // 2 * ROWS * SUM_ROW, of_column), floats)
            e.store(e.fma(of_columns[j], product, e.load(place, floats)), place)

    return emit


EPILOGUE_ARGUMENTS = 5  # as _epilogue


def product_tile(isa: Isa, *, coded: bool) -> Tile:
    """c = x w, or c += x w of dense weights, of 16 tokens, two panels and `steps` * 32 inputs.

    x [steps, 2, tokens, 32] are the halves of activations, `tile` bytes each. w [steps, 16, 32, 2] are a panel's
    weights, `next_w` bytes before the next one's. c is float32 [16, 32], `next_c` bytes before the next panel's. Its
    rows may reach into those, which are stored later. For each step, `lines` cache lines of each panel are prefetched
    from `ahead` on, `next_ahead` bytes apart. Of codes, the epilogue of `rows` earlier tokens is computed on the way,
    `share` rows a step.
    """

    def body(e: Emitter, rows: int, arguments: list[Value]) -> None:
        slots, x, tile, w, next_w, c, next_c, steps, ahead, next_ahead, lines, *late = arguments
        tiles, b = TileFile(e, isa, slots), e.builder
        places = [e.offset(c, e.times(next_c, j // 2), ROW_BYTES * (j % 2)) for j in range(COLUMNS)]
        finish = _epilogue(e, *late[:EPILOGUE_ARGUMENTS]) if coded else None
        for j, place in enumerate(places):
            if coded:
                tiles.zero(j)
            else:
                tiles.load(j, place, SUM_ROW)
        with e.loop(steps, unroll=False) as step:
            for half in range(2):
                tiles.load(4 + half, e.offset(x, e.times(tile, e.offset(e.times(step, 2), half))), ROW_BYTES)
            for j in range(COLUMNS):
                at = e.offset(w, e.times(step, STEP_BYTES), e.times(next_w, j // 2), ROW_BYTES * (j % 2))
                tiles.load(6 + j % 2, at, 2 * ROW_BYTES)
                for half in range(2):
                    tiles.dot_bf16(j, 4 + half, 6 + j % 2)
            if finish is not None:
                count, share = late[EPILOGUE_ARGUMENTS:]
                first = e.times(step, share)
                left = b.sub(count, first)
                with e.loop(b.select(b.icmp_signed("<", left, share), left, share), unroll=False) as row:
                    finish(b.add(first, row))
            with e.loop(lines, unroll=False) as line:
                at = e.offset(ahead, e.times(e.offset(e.times(step, lines), line), CACHE_LINE))
                e.prefetch(at)
                e.prefetch(e.offset(at, next_ahead))
        for j, place in enumerate(places):
            tiles.store(j, place, SUM_ROW)

    name = f"amx_dense_tile.{isa.name}.{'codes' if coded else 'bfloat16'}"
    return register(name, 16, (1,), 11 + (EPILOGUE_ARGUMENTS + 2 if coded else 0), body)


def finish_tile() -> Tile:
    """The epilogue alone, of `count` tokens."""

    def body(e: Emitter, rows: int, arguments: list[Value]) -> None:
        *given, count = arguments
        finish = _epilogue(e, *given)
        with e.loop(count, unroll=False) as row:
            finish(row)

    return register("amx_dense_finish_tile", 16, (1,), EPILOGUE_ARGUMENTS + 1, body)


def widen_tile(isa: Isa, kind: str) -> Tile:
    """Widen `count` inputs of a panel's codes to bfloat16 [16 * steps, 32, 2], filled up with zeros. `zeros` are those
    of one group, float32 [32]. Codes are those of packed_dense.py. HIGH and LOW are parts of float16 numbers, whose sum
    is the number: each part has no more than the 8 bits of a bfloat16.
    """
    widen = WIDEN.get(kind, _widen_float8)

    def body(e: Emitter, rows: int, arguments: list[Value]) -> None:
        source, target, count, zeros = arguments
        b, row_bytes = e.builder, 2 * ROW_BYTES  # of a pair of inputs
        of_pair = widen(e, isa, source, zeros)
        whole = b.lshr(count, I64(1))
        pairs = b.sub(count, whole)
        with e.loop(whole) as pair:
            for j in range(2):
                e.store(of_pair(pair, j, True), e.offset(target, e.times(pair, row_bytes), ROW_BYTES * j))
        with e.loop(b.and_(count, I64(1))):
            for j in range(2):
                e.store(of_pair(whole, j, False), e.offset(target, e.times(whole, row_bytes), ROW_BYTES * j))
        missing = b.and_(b.neg(pairs), I64(STEP // 2 - 1))
        with e.loop(missing) as pair:
            for j in range(2):
                place = e.offset(target, e.times(b.add(pairs, pair), row_bytes), ROW_BYTES * j)
                e.store(constant(e.vector(I32), 0), place)

    return register(f"amx_dense_widen_tile.{isa.name}.{kind}", 16, (1,), 4, body)


OfPair = Callable[[Value, int, bool], Value]  # (pair of inputs, half of the outputs, are there two) -> 16 pairs


def _look_up(e: Emitter, isa: Isa, table: list[int], index: Value) -> Value:
    """table[index] in 16-bit lanes. The table has 32 numbers, and `index` the upper bits of a lane for nothing."""
    words = index.type
    entries = ir.Constant(words, table)
    if not isa.emulate:
        return e.call("llvm.x86.avx512.permvar.hi.512", words, [entries, index])
    b, result = e.builder, ir.Constant(words, ir.Undefined)
    low = b.and_(index, constant(words, len(table) - 1))
    for lane in range(words.count):
        entry = b.extract_element(entries, b.extract_element(low, I32(lane)))
        result = b.insert_element(result, entry, I32(lane))
    return result


def _bfloat(number: float) -> int:
    """The bits of a number that bfloat16 represents."""
    (bits,) = struct.unpack("<I", struct.pack("<f", number))
    return int(bits >> 16)


INTEGERS = [_bfloat(number) for number in range(-16, 16)]
SUBNORMALS = [_bfloat(mantissa * 2.0**-9) for mantissa in range(8)] * 4  # of e4m3; two bits of an index are any


def _bytes(e: Emitter, address: Value) -> Value:
    return e.builder.zext(e.load(address, e.vector(I8)), e.vector(I32))


def _integer_zeros(e: Emitter, zeros: Value) -> list[Value]:
    return [e.builder.fptosi(e.load(e.offset(zeros, ROW_BYTES * j), e.vector(F32)), e.vector(I32)) for j in range(2)]


def _widen_int4(e: Emitter, isa: Isa, source: Value, zeros: Value) -> OfPair:
    """By a table of the integers -16 to 15."""
    b, words = e.builder, e.vector(I16, 2 * e.lanes)
    offsets = []
    for zero in _integer_zeros(e, zeros):
        offset = b.sub(constant(zero.type, 16), zero)
        offsets.append(b.bitcast(b.or_(offset, b.shl(offset, constant(zero.type, 16))), words))

    def of_pair(pair: Value, j: int, both: bool) -> Value:
        codes = _bytes(e, e.offset(source, e.times(pair, WIDTH), e.lanes * j))
        apart = b.and_(b.or_(codes, b.shl(codes, constant(codes.type, 12))), constant(codes.type, 0x000F000F))
        return _look_up(e, isa, INTEGERS, b.add(b.bitcast(apart, words), offsets[j]))

    return of_pair


def _widen_int8(e: Emitter, isa: Isa, source: Value, zeros: Value) -> OfPair:
    """By float32, whose upper half is exact for integers of 8 bits."""
    b, offsets = e.builder, _integer_zeros(e, zeros)

    def of_pair(pair: Value, j: int, both: bool) -> Value:
        place = e.offset(source, e.times(pair, 2 * WIDTH), e.lanes * j)

        def floats(at: Value) -> Value:
            return b.bitcast(b.sitofp(b.sub(_bytes(e, at), offsets[j]), e.vector(F32)), e.vector(I32))

        low = b.lshr(floats(place), constant(e.vector(I32), 16))
        if not both:
            return low
        return b.or_(low, b.and_(floats(e.offset(place, WIDTH)), constant(e.vector(I32), 0xFFFF0000)))

    return of_pair


def _widen_float8(e: Emitter, isa: Isa, source: Value, zeros: Value) -> OfPair:
    """By shifting the fields and rebiasing the exponent, or by a table of the eight subnormal numbers."""
    b, words = e.builder, e.vector(I16, 2 * e.lanes)

    def of_pair(pair: Value, j: int, both: bool) -> Value:
        place = e.offset(source, e.times(pair, 2 * WIDTH), e.lanes * j)
        codes = _bytes(e, place)
        if both:
            codes = b.or_(codes, b.shl(_bytes(e, e.offset(place, WIDTH)), constant(codes.type, 16)))
        codes = b.bitcast(codes, words)
        magnitude = b.and_(codes, constant(words, 0x7F))
        normal = b.add(b.shl(magnitude, constant(words, 4)), constant(words, (127 - 7) << 7))
        small = b.icmp_unsigned("<", magnitude, constant(words, 8))
        value = b.select(small, _look_up(e, isa, SUBNORMALS, codes), normal)
        return b.or_(value, b.shl(b.and_(codes, constant(words, 0x80)), constant(words, 8)))

    return of_pair


def _widen_halves(e: Emitter, isa: Isa, source: Value, zeros: Value, *, low: bool) -> OfPair:
    """By float32: its upper half, or the upper half of what is left."""
    b, bits, upper = e.builder, e.vector(I32), constant(e.vector(I32), 0xFFFF0000)

    def of_pair(pair: Value, j: int, both: bool) -> Value:
        place = e.offset(source, e.times(pair, 4 * WIDTH), 2 * e.lanes * j)

        def part(at: Value) -> Value:
            x = load_halves(e, isa, at)
            high = b.and_(b.bitcast(x, bits), upper)
            return b.bitcast(b.fsub(x, b.bitcast(high, x.type)), bits) if low else high

        first = b.lshr(part(place), constant(bits, 16))
        return b.or_(first, b.and_(part(e.offset(place, 2 * WIDTH)), upper)) if both else first

    return of_pair


WIDEN: dict[str, Callable[[Emitter, Isa, Value, Value], OfPair]] = {
    CODES4: _widen_int4,
    CODES8: _widen_int8,
    HIGH: functools.partial(_widen_halves, low=False),
    LOW: functools.partial(_widen_halves, low=True),
}
