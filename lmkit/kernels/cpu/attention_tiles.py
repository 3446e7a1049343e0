"""Micro-kernels of paged attention. They find rows of keys and values through an array of addresses ("places"), which
point into the storage itself or into a copy in the cache. A row has one of these forms:

    float32, bfloat16, float16   widened to float32 in registers
    fp8                          widened to float32; a score, or a weight, is multiplied by the row's scale
    int8 down to int2            codes, widened to int16 in registers; those of a key of 4 bits or less stay bytes
    words                        int16 codes of a key
    pairs                        int16 codes of two values, d by d: (first[0], second[0], first[1], second[1], ...)

Codes are multiplied by int16 queries and weights (`pmaddwd`; with VNNI the compiler makes it `vpdpwssd`) and summed in
int32 without rounding. Byte operands would cost accuracy, and a vector holds half as many floats. Queries of such keys
are bytes by definition (ops.paged_attention). They meet the storage as bytes (`pmaddubsw`, whose int16 sums of a whole
row fit; `vpdpbusd`), and the "words" of copied keys as int16. Both give the same integer sums.
"""

from __future__ import annotations

import itertools
import math
from functools import partial

from llvmlite import ir

from lmkit.kernels.cpu.attention_codes import load_numbers
from lmkit.kernels.cpu.dots import half_products, look_up, nibble_products, nibbles, pick, word_products
from lmkit.kernels.cpu.emit import F32, I8, I16, I32, I64, Emitter, Value, constant
from lmkit.kernels.cpu.isa import Isa
from lmkit.kernels.cpu.tiles import Tile, load_halves, register
from lmkit.kv_dtype import BFLOAT16, FLOAT16, FLOAT32, FP8, INT2, INT3, INT4, INT8, KVDtype

WORDS, PAIRS = KVDtype("words", 16), KVDtype("pairs", 32)  # used for copies only
BYTES = {FLOAT32: 4, BFLOAT16: 2, FLOAT16: 2, FP8: 1, INT8: 1, INT4: 1, INT3: 1, INT2: 1, WORDS: 2, PAIRS: 4}
STORED = {4: F32, 2: I16, 1: I8}  # the type of an element with so many bytes in memory
KEYS = 64  # in a block: int32 sums of codes and weights are exact within one
LOG2_E = math.log2(math.e)
LARGEST_WORD = 127 * 256 + 127  # so that a word is 256 * high + low with signed bytes (amx/attention_tiles.py)


def _is_integer(form: KVDtype) -> bool:
    return form.has_minimum or form in (WORDS, PAIRS)


def load_floats(e: Emitter, isa: Isa, form: KVDtype, address: Value) -> Value:
    """Load one vector as floats."""
    if form == FLOAT32:
        return e.load(address, e.vector(F32))
    if form == FLOAT16:
        return load_halves(e, isa, address)
    return widened(e, form, e.builder.zext(e.load(address, e.vector(STORED[BYTES[form]])), e.vector(I32)))


def widened(e: Emitter, form: KVDtype, bits: Value) -> Value:
    return {BFLOAT16: e.bfloat_to_float, FLOAT16: e.half_to_float, FP8: e.e4m3_to_float}[form](bits)


def split_floats(e: Emitter, first: Value, second: Value) -> tuple[Value, Value]:
    """Two vectors of floats as bfloat16 numbers high + low, a vector of words each. `high` is rounded towards 0."""
    b, bits, words = e.builder, e.vector(I32), e.vector(I16, 2 * e.lanes)
    upper = ir.Constant(e.vector(I32, 2 * e.lanes), list(range(1, 4 * e.lanes, 2)))

    def packed(parts: list[Value]) -> Value:
        return b.shuffle_vector(*(b.bitcast(part, words) for part in parts), upper)

    floats = [first, second]
    high = [b.and_(b.bitcast(x, bits), constant(bits, 0xFFFF0000)) for x in floats]
    rest = [b.fsub(x, b.bitcast(h, x.type)) for x, h in zip(floats, high, strict=True)]
    return packed(high), packed([b.add(b.bitcast(x, bits), constant(bits, 0x8000)) for x in rest])


def split_pairs(e: Emitter, first: Value, second: Value) -> tuple[Value, Value]:
    """As `split_floats`, but neighbours are the numbers of a lane: no lanes change places."""
    b, bits = e.builder, e.vector(I32)
    upper, half = constant(bits, 0xFFFF0000), constant(bits, 16)

    def pairs(low: Value, high: Value) -> Value:
        return b.or_(b.lshr(low, half), b.and_(high, upper))

    words = [b.bitcast(x, bits) for x in (first, second)]
    high = [b.bitcast(b.and_(x, upper), first.type) for x in words]
    rest = [b.fsub(x, h) for x, h in zip((first, second), high, strict=True)]
    return pairs(*words), pairs(*(b.add(b.bitcast(x, bits), constant(bits, 0x8000)) for x in rest))


def split_words(e: Emitter, words: Value) -> tuple[Value, Value]:
    """int16 words up to LARGEST_WORD as signed bytes: 256 * high + low."""
    b, byte = e.builder, e.vector(I8, words.type.count)
    high = b.ashr(b.add(words, constant(words.type, 128)), constant(words.type, 8))
    return b.trunc(high, byte), b.trunc(words, byte)


def _sums_bytes_in_words(isa: Isa, form: KVDtype) -> bool:
    return form.has_short_codes and isa.dot == "pmadd" and not isa.emulate


def _multiply_add(e: Emitter, isa: Isa, x: Value, y: Value, total: Value) -> Value:
    """total + x * y. Lanes of `total` are float32; or int32, each adding two products of int16, or four of signed bytes
    x and bytes y; or int16, each adding two products of such bytes."""
    b = e.builder
    if total.type.element == F32:
        return e.fma(x, y, total)
    if total.type.element == I16:
        return b.add(total, e.call("llvm.x86.avx2.pmadd.ub.sw", total.type, [y, x]))
    if y.type.element == I8:
        return nibble_products(isa)(e, total, y, x)
    return half_products(e, x, y, total) if isa.neon else word_products(e, isa, x, y, total)


def key_chunk(isa: Isa, form: KVDtype) -> int:
    """Elements of a key that score_tile reads at once."""
    return isa.lanes * (4 if form.levels else {INT4: 8, INT8: 2, WORDS: 2}.get(form, 1))


def _key_vectors(e: Emitter, isa: Isa, form: KVDtype, row: Value, chunk: Value) -> list[Value]:
    """Load a chunk of a key: one vector; for int4 two vectors of bytes, half a row apart."""
    b, words = e.builder, e.vector(I16, 2 * e.lanes)
    if form.levels:
        find = partial(_found, isa)
        return [load_numbers(e, form, [row], e.times(chunk, 4 * e.lanes), 4 * e.lanes, find)]
    size = key_chunk(isa, form) * BYTES[form] // (2 if form == INT4 else 1)
    address = e.offset(row, e.times(chunk, size))
    if not _is_integer(form):
        return [load_floats(e, isa, form, address)]
    if form == WORDS:
        return [e.load(address, words)]
    if form == INT4:
        return nibbles(e, e.load(address, e.vector(I8, 4 * e.lanes)))
    return [b.zext(e.load(address, e.vector(I8, 2 * e.lanes)), words)]


def score_tile(isa: Isa, form: KVDtype) -> Tile:
    """s [rows, 4 * fours] = q . k of the keys at `places`; int32 if the keys are codes.

    q is float32, int16 or (short codes) int8 [rows, D]. `ldq` and `lds` are the bytes between rows. D is `chunks`
    vectors of q (int4: twice as many). Float lanes are summed pairwise at the end.
    """
    integer = _is_integer(form)

    def body(e: Emitter, rows: int, arguments: list[Value]) -> None:
        q, ldq, places, s, lds, chunks, fours = arguments
        b, narrow = e.builder, _sums_bytes_in_words(isa, form)
        kind = e.vector(I16, 2 * e.lanes) if narrow else e.vector(I32 if integer else F32)
        keys = 4 if rows <= 2 or isa.registers == 32 else 2  # at a time: as many sums as registers hold
        half = e.times(chunks, 4 * e.lanes)
        sums = e.variables(rows, keys, kind)
        with e.loop(e.times(fours, 4 // keys)) as index:
            for variable in (v for row in sums for v in row):
                b.store(constant(kind, 0), variable)
            starts = [e.load(e.offset(places, e.times(index, 8 * keys), 8 * j), I64) for j in range(keys)]
            with e.loop(chunks, unroll=rows * keys <= 4) as chunk:
                at = e.offset(q, e.times(chunk, 4 * e.lanes))
                places_of = [e.offset(at, e.times(ldq, i)) for i in range(rows)]

                def add(i: int, j: int, part: int, key: Value, places: list[Value] = places_of) -> None:
                    x = e.load(e.offset(places[i], *([half] if part else [])), key.type)
                    b.store(_multiply_add(e, isa, x, key, b.load(sums[i][j])), sums[i][j])

                loaded = (_key_vectors(e, isa, form, start, chunk) for start in starts)
                if rows > keys:  # the smaller set of operands stays in registers
                    for part, vectors in enumerate(zip(*loaded, strict=True)):
                        for i, j in itertools.product(range(rows), range(keys)):
                            add(i, j, part, vectors[j])
                else:
                    for j, parts in enumerate(loaded):
                        for (part, key), i in itertools.product(enumerate(parts), range(rows)):
                            add(i, j, part, key)
            key = e.times(index, 4 * keys)
            together = 8 if integer and isa.lanes == 8 and rows * keys % 8 == 0 else 4
            for first in range(0, rows, together // keys):
                some = [(i, j) for i in range(first, min(rows, first + together // keys)) for j in range(keys)]
                loads = [b.load(sums[i][j]) for i, j in some]
                loads += loads[: together - len(loads)]  # of an odd number of rows; these sums go nowhere
                if narrow:
                    ones = constant(kind, 1)
                    loads = [e.call("llvm.x86.avx2.pmadd.wd", e.vector(I32), [x, ones]) for x in loads]
                total = _sum_eight(e, loads) if together == 8 else _sum_lanes(e, loads)
                for i in {i for i, _ in some}:
                    lanes = [k for k, (row, _) in enumerate(some) if row == i]
                    part = b.shuffle_vector(total, total, ir.Constant(e.vector(I32, keys), lanes))
                    e.store(part, e.offset(s, e.times(lds, i), key))

    name = f"score_tile.{isa.name}.{form}"
    rows = isa.score_rows[1:] if form == INT4 else isa.score_rows  # two vectors of codes at a time
    return register(name, isa.lanes, with_three(rows), 7, body)


def with_three(rows: tuple[int, ...]) -> tuple[int, ...]:
    """Three query heads often share a KV head. They take a step of their own, if four would."""
    return tuple(sorted({*rows, 3}, reverse=True)) if rows[0] > 3 else rows


def _sum_eight(e: Emitter, eight: list[Value]) -> Value:
    """The lane sums of eight vectors of 8 int32, as one vector of eight lanes: a transposition that adds."""
    b = e.builder
    for low, high in (
        ([0, 8, 1, 9, 4, 12, 5, 13], [2, 10, 3, 11, 6, 14, 7, 15]),
        ([0, 1, 8, 9, 4, 5, 12, 13], [2, 3, 10, 11, 6, 7, 14, 15]),
        ([0, 1, 2, 3, 8, 9, 10, 11], [4, 5, 6, 7, 12, 13, 14, 15]),
    ):
        parts = (ir.Constant(e.vector(I32, 8), lanes) for lanes in (low, high))
        first, second = (
            [b.shuffle_vector(x, y, part) for x, y in zip(eight[::2], eight[1::2], strict=True)] for part in parts
        )
        eight = [b.add(x, y) for x, y in zip(first, second, strict=True)]
    return eight[0]


def _sum_lanes(e: Emitter, four: list[Value]) -> Value:
    """The lane sums of four vectors, as four lanes. Each sum is added up in the same order."""
    b = e.builder
    add = b.fadd if four[0].type.element == F32 else b.add

    def pick(x: Value, y: Value, lanes: list[int]) -> Value:
        return b.shuffle_vector(x, y, ir.Constant(e.vector(I32, len(lanes)), lanes))

    while four[0].type.count > 8:
        half = four[0].type.count // 2
        four = [add(pick(x, x, list(range(half))), pick(x, x, list(range(half, 2 * half)))) for x in four]
    if four[0].type.count == 8:  # both halves of two vectors at once; then both halves of a vector go the same way
        low, high = [0, 1, 2, 3, 8, 9, 10, 11], [4, 5, 6, 7, 12, 13, 14, 15]
        x, y = (add(pick(x, y, low), pick(x, y, high)) for x, y in (four[:2], four[2:]))
        both = add(pick(x, y, [0, 1, 8, 9, 4, 5, 12, 13]), pick(x, y, [2, 3, 10, 11, 6, 7, 14, 15]))
        pairs = add(both, pick(both, both, [1, 0, 3, 2, 5, 4, 7, 6]))
        return pick(pairs, pairs, [0, 4, 2, 6])
    first, second = (add(pick(x, y, [0, 1, 4, 5]), pick(x, y, [2, 3, 6, 7])) for x, y in (four[:2], four[2:]))
    return add(pick(first, second, [0, 2, 4, 6]), pick(first, second, [1, 3, 5, 7]))


def _found(isa: Isa, e: Emitter, numbers: Value, values: tuple[int, ...]) -> Value:
    return look_up(e, isa, numbers, values)


def _value_vectors(e: Emitter, isa: Isa, form: KVDtype, rows: tuple[Value, Value], column: Value) -> list[Value]:
    """Two vectors of a value. For codes, each lane holds the pair of one d in two values. On ARM a vector holds several
    d of one value, then of the other: see `half_products`. For int4 the first vector holds whole bytes: its sum minus
    16 times the high nibbles' sum is the low nibbles' sum. This saves work per key.
    """
    b, words = e.builder, e.vector(I16, 2 * e.lanes)
    first, second = (e.offset(row, column) for row in rows)
    if not _is_integer(form):
        return [load_floats(e, isa, form, e.offset(first, BYTES[form] * e.lanes * j)) for j in (0, 1)]
    apart = [*range(0, 2 * e.lanes, 2), *range(1, 2 * e.lanes, 2)] if isa.neon else list(range(2 * e.lanes))
    if form == PAIRS:
        pairs = [e.load(e.offset(first, 4 * e.lanes * j), words) for j in (0, 1)]
        return [pick(e, x, x, apart) for x in pairs]
    count = e.lanes * (1 if form == INT4 else 2)
    find = partial(_found, isa)
    if form.levels:
        first = second = load_numbers(e, form, rows, column, count, find)
    else:
        first, second = (load_numbers(e, form, [row], column, count) for row in rows)
    pairs = []
    for start in range(0, count, e.lanes):
        order = [i + count * k for i in range(start, start + e.lanes) for k in (0, 1)]
        pairs.append(b.zext(pick(e, first, second, [order[i] for i in apart]), words))
    if form != INT4:
        return pairs
    # Without this, the compiler would split the bytes first and widen twice.
    codes = pairs[0] if isa.dot == "generic" or isa.emulate else e.opaque(pairs[0])
    return [codes, b.lshr(codes, constant(words, 4))]


def _pair_of_words(e: Emitter, isa: Isa, address: Value, pair: int) -> Value:
    """The operand for the pair of weights 0 or 1 of the four words at `address`."""
    if not isa.neon:
        return e.builder.bitcast(e.splat(e.load(e.offset(address, 4 * pair), I32)), e.vector(I16, 2 * e.lanes))
    four = e.load(address, e.vector(I16, 4))
    return pick(e, four, four, [2 * pair] * e.lanes + [2 * pair + 1] * e.lanes)


def product_tile(isa: Isa, form: KVDtype, *, raw: bool = False) -> Tile:
    """c [rows, two vectors, `apart` bytes between them] += w [rows, count] @ values, keys strictly in order.

    The values' columns begin `column` bytes (with levels: numbers) into the rows at `places`. `ldw` and `ldc` are the
    bytes between rows. For codes, w is int16, `count` fours of them; its unit is the float32 at `steps` (`lds` bytes
    between rows). If `raw`, c becomes the int32 products.
    """
    integer = _is_integer(form)

    def body(e: Emitter, rows: int, arguments: list[Value]) -> None:
        w, ldw, places, column, c, ldc, apart, count, steps, lds = arguments
        b, floats = e.builder, e.vector(F32)
        outputs = [[e.offset(c, e.times(ldc, i), *([apart] if j else [])) for j in (0, 1)] for i in range(rows)]
        sums = e.variables(rows, 2, e.vector(I32) if integer else floats)
        for i in range(rows):
            for j in (0, 1):
                b.store(constant(e.vector(I32), 0) if integer else e.load(outputs[i][j], floats), sums[i][j])
        for index, keys in e.steps(count, [e.lanes, 1] if isa.neon and not integer else [1], unroll=rows <= 2):
            place = e.offset(places, e.times(index, 32 if integer else 8))
            of_place = e.times(index, 8 if integer else 4)
            weights = [e.offset(w, e.times(ldw, i), of_place) for i in range(rows)]
            for part in range(2 if integer else keys):
                at = [16 * part, 16 * part + 8] if integer else [8 * part] * 2
                first, second = (e.load(e.offset(place, start), I64) for start in at)
                values = _value_vectors(e, isa, form, (first, second), column)
                for i in range(rows):
                    weight = _pair_of_words(e, isa, weights[i], part) if integer else e.scalar(weights[i], part, keys)
                    for j in (0, 1):
                        b.store(_multiply_add(e, isa, weight, values[j], b.load(sums[i][j])), sums[i][j])
        for i in range(rows):
            if form == INT4:  # the first vector holds bytes, the second their high nibbles
                low = b.sub(b.load(sums[i][0]), b.shl(b.load(sums[i][1]), constant(e.vector(I32), 4)))
                b.store(low, sums[i][0])
            step = e.splat(e.load(e.offset(steps, e.times(lds, i)), F32)) if integer and not raw else None
            for variable, output in zip(sums[i], outputs[i], strict=True):
                total = b.load(variable)
                if integer and not raw:
                    total = e.fma(b.sitofp(total, floats), step, e.load(output, floats))
                e.store(total, output)

    name = f"product_tile.{isa.name}.{form}" + ".raw" * raw
    return register(name, isa.lanes, with_three(isa.float_rows), 10, body)


def softmax_tile(isa: Isa, kind_of_values: KVDtype, *, planes: bool = False) -> Tile:
    """One row's weights 2^(score log2(e) - maximum) from the scores at `s`. Scores 0 .. sinks and low .. high
    are visible, all below high; the others get weight 0.

    `blocks` blocks of 64 scores are read from the index `first` on. Limits count from index 0. Written as float32 are
    `maximum`, that of the scores (at least NO_SCORE) times log2(e), and `total`, the sum of the weights. Float weights
    replace the scores; for fp8 they are multiplied by the value's scale. For codes, a weight times the value's scale is
    rounded to int16 in `words`. The step is 1 / LARGEST_WORD of the block's largest and is written to `steps` (float32
    [blocks in all]). The sum of weights times minima goes to `offset`. The float32 scales are at `scales`, the minima
    `minima` bytes after them.

    With `planes`, weights are split as tile registers take them (amx/attention_tiles.py): 64 words become their high
    bytes, then their low bytes; 32 floats their high bfloat16, then their low bfloat16, in the order 0, 16, 1, 17, ...
    """
    coded = kind_of_values.has_minimum
    scaled = kind_of_values.coded and not coded

    def body(e: Emitter, rows: int, arguments: list[Value]) -> None:
        s, low, high, sinks, first, blocks, none, maximum_at, total_at, words, steps, scales, minima, offset = arguments
        b, kind, integers = e.builder, e.vector(F32), e.vector(I32)
        start, end, sunk = (e.splat(b.trunc(limit, I32)) for limit in (low, high, sinks))
        ((best, sums, lows, peak),) = e.variables(1, 4, kind)
        b.store(e.splat(b.bitcast(b.trunc(none, I32), F32)), best)
        for variable in (sums, lows):
            b.store(constant(kind, 0), variable)
        with e.loop(blocks) as block:
            origin = e.offset(first, e.times(block, KEYS))
            index, places = e.splat(b.trunc(origin, I32)), e.offset(s, e.times(origin, 4))
            whole = b.and_(b.icmp_signed(">=", origin, low), b.icmp_signed("<=", e.offset(origin, KEYS), high))

            def visible(i: int, index: Value = index) -> Value:
                key = b.add(index, ir.Constant(integers, list(range(i, i + e.lanes))))
                near = b.or_(b.icmp_signed(">=", key, start), b.icmp_signed("<", key, sunk))
                return b.and_(near, b.icmp_signed("<", key, end))

            with b.if_then(b.not_(whole)):
                for i in range(0, KEYS, e.lanes):
                    place = e.offset(places, 4 * i)
                    shown = b.select(visible(i), e.load(place, kind), constant(kind, -math.inf))
                    e.store(shown, place)
            found = [e.load(e.offset(places, 4 * i), kind) for i in range(0, KEYS, e.lanes)]
            while len(found) > 1:
                found = [e.larger(x, y) for x, y in zip(found[::2], found[1::2], strict=True)]
            b.store(e.larger(found[0], b.load(best)), best)
        maximum = b.fmul(e.fold(b.load(best), e.larger), constant(F32, LOG2_E))
        log2_e, lowered = constant(kind, LOG2_E), e.splat(b.fneg(maximum))
        with e.loop(blocks) as block:
            b.store(constant(kind, 0), peak)
            start = e.times(e.offset(first, e.times(block, KEYS)), 4)
            with e.loop(I64(KEYS // e.lanes // 2), unroll=False) as pair:  # more at once would not fit the registers
                places = [e.offset(start, e.times(pair, 8 * e.lanes), 4 * i * e.lanes) for i in (0, 1)]
                weights = []
                for at in places:
                    weight = e.exp2_below(e.fma(e.load(e.offset(s, at), kind), log2_e, lowered))
                    b.store(b.fadd(b.load(sums), weight), sums)
                    if scaled:
                        weight = b.fmul(weight, e.load(e.offset(scales, at), kind))
                    if coded:
                        scale, minimum = (e.load(e.offset(scales, at, part), kind) for part in (0, minima))
                        b.store(e.fma(weight, minimum, b.load(lows)), lows)
                        weight = b.fmul(weight, scale)
                        b.store(e.larger(weight, b.load(peak)), peak)
                    weights.append(weight)
                split = split_pairs(e, *weights) if planes and not coded else weights
                for at, weight in zip(places, split, strict=True):
                    e.store(weight, e.offset(s, at))
            if coded:
                step = b.fmul(e.fold(b.load(peak), e.larger), constant(F32, 1 / LARGEST_WORD))
                e.store(step, e.offset(steps, e.times(b.sdiv(start, I64(4 * KEYS)), 4)))
                usable = b.fcmp_ordered(">", step, constant(F32, 2.0**-120))
                inverse = e.splat(b.select(usable, b.fdiv(constant(F32, 1), step), constant(F32, 0)))
                out = e.offset(words, b.lshr(start, I64(1)))
                for i in range(0, KEYS, e.lanes):
                    value = b.fmul(e.load(e.offset(s, start, 4 * i), kind), inverse)
                    word = b.trunc(e.rounded_bits(value), e.vector(I16))
                    if not planes:
                        e.store(word, e.offset(out, 2 * i))
                        continue
                    for plane, part in enumerate(split_words(e, word)):
                        e.store(part, e.offset(out, KEYS * plane + i))
        e.store(maximum, maximum_at)
        e.store(e.fold(b.load(sums), b.fadd), total_at)
        if coded:
            e.store(e.fold(b.load(lows), b.fadd), offset)

    name = f"softmax_tile.{isa.name}.{'coded' if coded else 'scaled' if scaled else 'float'}" + ".planes" * planes
    return register(name, isa.lanes, (1,), 14, body)
