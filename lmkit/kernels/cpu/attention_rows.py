"""Micro-kernels of paged attention besides its products. They prefetch and copy rows, widen parameters, round queries
to words and scale scores. Forms and places are those of attention_tiles.py.
"""

from __future__ import annotations

import itertools

from llvmlite import ir

from lmkit.kernels.cpu.attention_codes import load_numbers
from lmkit.kernels.cpu.attention_tiles import BYTES, PAIRS, STORED, WORDS, widened
from lmkit.kernels.cpu.dots import nibbles
from lmkit.kernels.cpu.emit import F32, I16, I32, I64, Emitter, Value, constant
from lmkit.kernels.cpu.isa import Isa
from lmkit.kernels.cpu.tiles import Tile, register
from lmkit.kv_dtype import FLOAT32, INT4, KVDtype


def copy_tile(kind: KVDtype, form: KVDtype) -> Tile:
    """Copy `count` rows of `dim` elements from KV storage of a kind to rows of a form. The rows at `target` are `ld`
    bytes apart and padded with 0 up to `padded` elements. The form "pairs" takes two source rows per row.
    """
    stored = STORED[BYTES[kind]]
    element = {FLOAT32: F32, WORDS: I16, PAIRS: I32}[form]

    def convert(e: Emitter, sources: list[Value], index: Value, lanes: int) -> list[Value]:
        """Convert one vector (with one lane, one number) per source. Returns the vector to store; int4 returns two."""
        b, single = e.builder, lanes == 1
        if kind.levels:
            raw = [load_numbers(e, kind, [source], index, lanes) for source in sources]
        else:
            at, vector = e.times(index, BYTES[kind]), stored if single else e.vector(stored, lanes)
            raw = [e.load(e.offset(source, at), vector) for source in sources]
        if kind == FLOAT32:
            return raw
        integers = [b.zext(x, I32 if single else e.vector(I32, lanes)) for x in raw]
        if not kind.has_minimum:
            return [widened(e, kind, x) for x in integers]
        parts = [nibbles(e, x) if kind == INT4 else [x] for x in integers]
        if form == WORDS:
            return [b.trunc(x, I16 if single else e.vector(I16, lanes)) for x in parts[0]]
        return [b.or_(x, b.shl(y, constant(y.type, 16))) for x, y in zip(*parts, strict=True)]

    def body(e: Emitter, rows: int, arguments: list[Value]) -> None:
        places, target, ld, count, dim, padded = arguments
        b, sources = e.builder, 2 if form == PAIRS else 1
        columns = b.lshr(dim, I64(1)) if kind == INT4 else dim
        whole = b.sdiv(columns, I64(e.lanes))
        done = e.times(whole, e.lanes)
        with e.loop(count) as row:
            given = [e.load(e.offset(places, e.times(row, 8 * sources), 8 * i), I64) for i in range(sources)]
            out = e.offset(target, b.mul(row, ld))

            def move(index: Value, lanes: int, given: list[Value] = given, out: Value = out) -> None:
                for part, value in enumerate(convert(e, given, index, lanes)):
                    column = b.add(index, columns) if part else index
                    e.store(value, e.offset(out, e.times(column, BYTES[form])))

            with e.loop(whole) as i:
                move(e.times(i, e.lanes), e.lanes)
            if not kind.levels:  # their rows are whole vectors
                with e.loop(b.sub(columns, done)) as i:
                    move(b.add(done, i), 1)
            with e.loop(b.sub(padded, dim)) as i:
                e.store(constant(element, 0), e.offset(out, e.times(b.add(dim, i), BYTES[form])))

    name = f"copy_tile.{kind}.{form}"
    return register(name, 8, (1,), 6, body)


def prefetch_tile() -> Tile:
    """Prefetch the `lines` cache lines of each row at `count` places."""

    def body(e: Emitter, rows: int, arguments: list[Value]) -> None:
        places, count, lines = arguments
        with e.loop(count) as row:
            start = e.load(e.offset(places, e.times(row, 8)), I64)
            with e.loop(lines, unroll=False) as line:  # mostly one to four
                e.prefetch(e.offset(start, e.times(line, 64)))

    return register("prefetch_tile", 1, (1,), 3, body)


def merge_tile() -> Tile:
    """Add `count` rows of a record (see attention.py) at `source` to those of another at `into`. A row has `chunks` * 8
    outputs. The maxima and sums of the source become factors: it cannot be used again.
    """

    def body(e: Emitter, rows: int, arguments: list[Value]) -> None:
        into, maxima, sums, source, source_maxima, source_sums, count, chunks = arguments
        b = e.builder
        for index, lanes in e.steps(count, [e.lanes, 1]):
            kind = F32 if lanes == 1 else e.vector(F32)
            places = [e.offset(at, e.times(index, 4)) for at in (maxima, source_maxima, sums, source_sums)]
            first, second, total, added = (e.load(place, kind) for place in places)
            larger = e.larger(first, second)
            keep, take = e.exp2_below(b.fsub(first, larger)), e.exp2_below(b.fsub(second, larger))
            stored = larger, take, e.fma(added, take, b.fmul(total, keep)), keep
            for value, place in zip(stored, places, strict=True):
                e.store(value, place)
        with e.loop(count) as row:
            take, keep = (e.splat(e.load(e.offset(at, e.times(row, 4)), F32)) for at in (source_maxima, source_sums))
            first = e.times(e.times(row, chunks), 4 * e.lanes)
            with e.loop(chunks) as chunk:
                here, there = (e.offset(at, first, e.times(chunk, 4 * e.lanes)) for at in (into, source))
                kept = b.fmul(e.load(here, e.vector(F32)), keep)
                e.store(e.fma(e.load(there, e.vector(F32)), take, kept), here)

    return register("merge_tile", 8, (1,), 8, body)


def params_tile(*, levels: bool) -> Tile:
    """Widen `count` pairs of float16 (scale, minimum): float32 scales at `scales`, minima `minima` bytes after them.

    Rows of `levels` have a scale alone. Their minimum is the scale times `lowest`, a float32's bits.
    """

    def body(e: Emitter, rows: int, arguments: list[Value]) -> None:
        source, count, scales, minima, lowest = arguments
        b = e.builder
        whole = b.sdiv(count, I64(e.lanes))
        done = e.times(whole, e.lanes)
        lowest = b.bitcast(b.trunc(lowest, I32), F32)

        def move(index: Value, lanes: int) -> None:
            kind, out = I32 if lanes == 1 else e.vector(I32), e.offset(scales, e.times(index, 4))
            if levels:
                stored = e.load(e.offset(source, e.times(index, 2)), I16 if lanes == 1 else e.vector(I16))
                scale = e.half_to_float(b.zext(stored, kind))
                minimum = b.fmul(scale, lowest if lanes == 1 else e.splat(lowest))
            else:
                pairs = e.load(e.offset(source, e.times(index, 4)), kind)
                scale = e.half_to_float(b.and_(pairs, constant(kind, 0xFFFF)))
                minimum = e.half_to_float(b.lshr(pairs, constant(kind, 16)))
            e.store(scale, out)
            e.store(minimum, e.offset(out, minima))

        with e.loop(whole) as i:
            move(e.times(i, e.lanes), e.lanes)
        with e.loop(b.sub(count, done)) as i:
            move(b.add(done, i), 1)

    return register("params_tile" + ".levels" * levels, 8, (1,), 5, body)


def words_tile(element: ir.Type = I16) -> Tile:
    """round(x / step) of `chunks` * 8 floats to int16 (or int8) at `out`, with step = max|x| / `limit`. `limit` is at
    most the largest number of the result's type.

    The float32 step goes to `params`, and the sum of the words to the place after it.
    """

    def body(e: Emitter, rows: int, arguments: list[Value]) -> None:
        x, out, chunks, limit, params = arguments
        b, floats, integers = e.builder, e.vector(F32), e.vector(I32)
        ((peak, total),) = e.variables(1, 2, integers)
        b.store(constant(integers, 0), peak)
        b.store(constant(integers, 0), total)
        with e.loop(chunks) as chunk:
            bits = e.load(e.offset(x, e.times(chunk, 4 * e.lanes)), integers)
            bits = b.and_(bits, constant(integers, 0x7FFFFFFF))
            b.store(b.select(b.icmp_signed(">", bits, b.load(peak)), bits, b.load(peak)), peak)
        largest = e.call(f"llvm.vector.reduce.smax.v{e.lanes}i32", I32, [b.load(peak)])
        step = b.fdiv(b.bitcast(largest, F32), b.sitofp(limit, F32))
        usable = b.fcmp_ordered(">", step, constant(F32, 2.0**-120))  # below this, 1 / step would not be finite
        inverse = e.splat(b.select(usable, b.fdiv(constant(F32, 1), step), constant(F32, 0)))
        with e.loop(chunks) as chunk:
            value = e.load(e.offset(x, e.times(chunk, 4 * e.lanes)), floats)
            words = b.fptosi(e.rint(b.fmul(value, inverse)), integers)
            b.store(b.add(b.load(total), words), total)
            place = e.offset(out, e.times(chunk, element.width // 8 * e.lanes))
            e.store(b.trunc(words, e.vector(element)), place)
        e.store(step, params)
        words = e.call(f"llvm.vector.reduce.add.v{e.lanes}i32", I32, [b.load(total)])
        e.store(b.sitofp(words, F32), e.offset(params, 4))

    name = f"words_tile.{element}"
    return register(name, 8, (1,), 5, body)


def scale_tile(isa: Isa, kind: KVDtype) -> Tile:
    """Scale `count` scores of one row, in place. Scores of codes are int32 before and become
    s = step * (scale * dot + minimum * sum), with the row's float32 (step, sum) at `steps`. The float32 minima are
    `minima` bytes after the scales. Scores of fp8 become s * scale.
    """

    def body(e: Emitter, rows: int, arguments: list[Value]) -> None:
        s, count, steps, scales, minima = arguments
        b, floats = e.builder, e.vector(F32)
        step, total = (e.splat(e.load(e.offset(steps, at), F32)) for at in (0, 4))
        with e.loop(b.sdiv(count, I64(e.lanes))) as i:
            at = e.times(i, 4 * e.lanes)
            scale, minimum = (e.load(e.offset(scales, at, part), floats) for part in (0, minima))
            place = e.offset(s, at)
            if not kind.has_minimum:
                result = b.fmul(e.load(place, floats), scale)
            else:
                dots = b.sitofp(e.load(place, e.vector(I32)), floats)
                result = b.fmul(e.fma(dots, scale, b.fmul(minimum, total)), step)
            e.store(result, place)

    name = f"scale_tile.{isa.name}.{'codes' if kind.has_minimum else 'scaled'}"
    return register(name, isa.lanes, (1,), 5, body)


def softcap_tile() -> Tile:
    """s = c * tanh(s / c) of `chunks` * 8 scores, in place. `cap` holds the bits of c."""

    def body(e: Emitter, rows: int, arguments: list[Value]) -> None:
        s, chunks, cap = arguments
        b = e.builder
        cap = b.bitcast(b.trunc(cap, I32), F32)
        inverse, cap = e.splat(b.fdiv(constant(F32, 1), cap)), e.splat(cap)
        with e.loop(chunks) as chunk:
            place = e.offset(s, e.times(chunk, 4 * e.lanes))
            score = e.load(place, e.vector(F32))
            e.store(b.fmul(e.tanh(b.fmul(score, inverse)), cap), place)

    return register("softcap_tile", 8, (1,), 3, body)


def mean_tile(isa: Isa) -> Tile:
    """s [rows, 8 or more keys] += shares [rows, count] @ angles, `chunks` vectors of keys; a key's sum is in order.

    The angles begin `column` bytes into the rows at `places`. `ldx` and `lds` are the bytes between rows.
    """

    def body(e: Emitter, rows: int, arguments: list[Value]) -> None:
        shares, ldx, places, column, s, lds, chunks, count = arguments
        b, floats, most = e.builder, e.vector(F32), 4 if rows <= 3 else 2
        sums = e.variables(rows, most, floats)
        for index, size in e.steps(chunks, [most, 1], unroll=False):
            at = e.times(index, 4 * e.lanes)
            places_of = [
                (sums[i][j], e.offset(s, e.times(lds, i), at, 4 * e.lanes * j))
                for i in range(rows)
                for j in range(size)
            ]
            for variable, score in places_of:
                b.store(e.load(score, floats), variable)
            with e.loop(count, unroll=False) as angle:
                place = e.offset(e.load(e.offset(places, e.times(angle, 8)), I64), column, at)
                share = e.offset(shares, e.times(angle, 4))
                vectors: dict[int, Value] = {}
                factors: dict[int, Value] = {}
                few, many = (range(size), range(rows)) if rows > size else (range(rows), range(size))
                for outer, inner in itertools.product(many, few):  # the fewer operands stay in registers
                    i, j = (outer, inner) if rows > size else (inner, outer)
                    if i not in factors:
                        factors[i] = e.splat(e.load(e.offset(share, e.times(ldx, i)), F32))
                    if j not in vectors:
                        vectors[j] = e.load(e.offset(place, 4 * e.lanes * j), floats)
                    b.store(e.fma(factors[i], vectors[j], b.load(sums[i][j])), sums[i][j])
            for variable, score in places_of:
                e.store(b.load(variable), score)

    return register(f"mean_tile.{isa.name}", isa.lanes, (6, 4, 3, 2, 1), 8, body)
