"""Key panels for many rows: copies of keys with one key in each lane, so that scores need no sums over lanes.

A panel of floats is [padded D, two vectors of keys] in float32. One of 64 keys has rows of 64 words. A word holds
neighbours in D of one key:

    wide      [D / 2, 64]            two codes as int16, which product_tile multiplies like a pair of values
    compact   [D / 4 or D / 2, 64]   four codes, or two bfloat16: for tile registers (amx/attention_tiles.py)
"""

from __future__ import annotations

import itertools

from llvmlite import ir

from lmkit.kernels.cpu.attention_codes import load_numbers
from lmkit.kernels.cpu.attention_tiles import BYTES, KEYS, STORED, load_floats, widened, with_three
from lmkit.kernels.cpu.dots import nibbles
from lmkit.kernels.cpu.emit import F32, I8, I16, I32, I64, Emitter, Value, constant
from lmkit.kernels.cpu.isa import Isa
from lmkit.kernels.cpu.tiles import Tile, register
from lmkit.kv_dtype import BFLOAT16, FLOAT32, FP8, INT4, KVDtype

LINE = 4 * KEYS  # bytes of a row
GROUP = 16  # keys that are copied together


def fits(kind: KVDtype, dim: int) -> bool:
    """Whether rows of the storage (of int4, half rows) fill whole vectors of a panel of keys or values."""
    return (kind in (BFLOAT16, FP8) or kind.has_minimum) and dim % (32 if kind == INT4 else 16) == 0


def compact(e: Emitter, kind: KVDtype, stored: Value) -> list[Value]:
    """Codes, or bfloat16 numbers, from a vector of the storage. For int4 there are two vectors, half a row apart."""
    if kind == INT4:
        return nibbles(e, stored)
    if kind != FP8:
        return [stored]
    b, bits = e.builder, e.vector(I32, stored.type.count)
    floats = b.bitcast(widened(e, kind, b.zext(stored, bits)), bits)  # exact in bfloat16
    return [b.trunc(b.lshr(floats, constant(bits, 16)), e.vector(I16, bits.count))]


def stored_vector(e: Emitter, kind: KVDtype, row: Value, column: Value, count: int) -> Value:
    """`count` elements of a row of the storage, from `column` on. Of a type with levels they are numbers."""
    if BYTES[kind] == 1:
        return load_numbers(e, kind, [row], column, count)
    return e.load(e.offset(row, e.times(column, BYTES[kind])), e.vector(STORED[BYTES[kind]], count))


def _widened(e: Emitter, word: Value) -> list[Value]:
    """Two rows of int16 pairs from a row of words of four codes."""
    halves = [e.builder.trunc(e.builder.lshr(word, constant(word.type, at)), e.vector(I16, GROUP)) for at in (0, 16)]
    codes = [e.builder.bitcast(half, e.vector(I8, 2 * GROUP)) for half in halves]
    return [e.builder.bitcast(e.builder.zext(x, e.vector(I16, 2 * GROUP)), word.type) for x in codes]


def joined(e: Emitter, parts: list[Value]) -> Value:
    """The lanes of a power of two of vectors, one vector after the other."""
    while len(parts) > 1:
        order = ir.Constant(e.vector(I32, 2 * parts[0].type.count), list(range(2 * parts[0].type.count)))
        parts = [e.builder.shuffle_vector(x, y, order) for x, y in zip(parts[::2], parts[1::2], strict=True)]
    return parts[0]


def transposed(e: Emitter, four: list[Value]) -> list[Value]:
    """Vectors of 16 words, whose quarters hold words 0 to 3 of a key: 4 i + j in quarter i of vector j. The result has
    a vector for each word, with the keys in order."""
    b = e.builder

    def pick(x: Value, y: Value, lanes: list[int]) -> Value:
        order = [lane + 4 * quarter if lane < 4 else lane + 12 + 4 * quarter for quarter in range(4) for lane in lanes]
        return b.shuffle_vector(x, y, ir.Constant(e.vector(I32, 16), order))

    low, high = [0, 4, 1, 5], [2, 6, 3, 7]
    (a, b_), (c, d) = ([pick(four[i], four[i + 1], lanes) for i in (0, 2)] for lanes in (low, high))
    return [pick(x, y, lanes) for x, y in ((a, b_), (c, d)) for lanes in ([0, 1, 4, 5], [2, 3, 6, 7])]


def key_panel_tile(kind: KVDtype, *, wide: bool) -> Tile:
    """Write the columns of the 16 keys at `places`, wide or compact. Rows up to a multiple of 16 become 0."""
    size = 1 if kind.has_minimum else 2
    count = 16 // size  # elements in four words of a key
    per_row = 2 if wide else 4 // size

    def body(e: Emitter, rows: int, arguments: list[Value]) -> None:
        places, target, dim = arguments
        b = e.builder
        columns = b.lshr(dim, I64(1)) if kind == INT4 else dim
        with e.loop(b.udiv(columns, I64(count))) as unit:
            at = e.times(unit, count)
            keys = [e.load(e.offset(places, 8 * i), I64) for i in range(GROUP)]
            raw = [stored_vector(e, kind, key, at, count) for key in keys]
            four = [compact(e, kind, joined(e, raw[j::4])) for j in range(4)]
            for part, vectors in enumerate(zip(*four, strict=True)):
                words = transposed(e, [b.bitcast(x, e.vector(I32, GROUP)) for x in vectors])
                lines = [row for word in words for row in (_widened(e, word) if wide else [word])]
                first = e.offset(target, e.times(unit, len(lines) * LINE), e.times(columns, part * LINE // per_row))
                for i, line in enumerate(lines):
                    e.store(line, e.offset(first, i * LINE))
        used = b.udiv(dim, I64(per_row))
        with e.loop(b.and_(b.neg(used), I64(GROUP - 1))) as row:
            e.store(constant(e.vector(I32, GROUP), 0), e.offset(target, e.times(b.add(used, row), LINE)))

    name = f"key_panel.{kind}" + ".wide" * wide
    return register(name, GROUP, (1,), 3, body)


def turned(e: Emitter, rows: list[Value]) -> list[Value]:
    """The columns of a square matrix of vectors: blocks off the diagonal change places, large ones first."""
    size = len(rows) // 2
    while size:
        for i in (i for i in range(len(rows)) if not i & size):
            low = [j if not j & size else len(rows) + j - size for j in range(len(rows))]
            parts = (ir.Constant(e.vector(I32), lanes) for lanes in (low, [j + size for j in low]))
            rows[i], rows[i + size] = [e.builder.shuffle_vector(rows[i], rows[i + size], part) for part in parts]
        size //= 2
    return rows


def float_panel_tile(isa: Isa, kind: KVDtype) -> Tile:
    """Write a panel of floats from the keys at `places`, two vectors of them. Rows dim .. padded become 0."""

    def body(e: Emitter, rows: int, arguments: list[Value]) -> None:
        places, target, dim, padded = arguments
        b, line = e.builder, 8 * e.lanes
        whole = b.udiv(dim, I64(e.lanes))
        done = e.times(whole, e.lanes)
        with e.loop(whole) as chunk:
            out = e.offset(target, e.times(chunk, e.lanes * line))
            for half in (0, e.lanes):
                keys = [e.load(e.offset(places, 8 * (half + i)), I64) for i in range(e.lanes)]
                at = e.times(chunk, e.lanes * BYTES[kind])
                for i, column in enumerate(turned(e, [load_floats(e, isa, kind, e.offset(key, at)) for key in keys])):
                    e.store(column, e.offset(out, i * line + 4 * half))
        with e.loop(b.sub(dim, done)) as rest, e.loop(I64(2 * e.lanes)) as key:
            at = b.add(done, rest)
            place = e.offset(e.load(e.offset(places, e.times(key, 8)), I64), e.times(at, BYTES[kind]))
            stored = e.load(place, STORED[BYTES[kind]])
            number = stored if kind == FLOAT32 else widened(e, kind, b.zext(stored, I32))
            e.store(number, e.offset(target, e.times(at, line), e.times(key, 4)))
        with e.loop(b.sub(padded, dim)) as rest, e.loop(I64(2)) as half:
            at = e.offset(target, e.times(b.add(dim, rest), line), e.times(half, 4 * e.lanes))
            e.store(constant(e.vector(F32), 0), at)

    return register(f"float_panel.{isa.name}.{kind}", isa.lanes, (1,), 4, body)


def panel_score_tile(isa: Isa) -> Tile:
    """s [rows, two vectors of keys] = q . k of a panel of floats, with the bits of score_tile: products of each lane of
    a key's vectors are added up in order, `chunks` of them, and then the lanes' sums in pairs, half a vector apart
    first. Two lanes are computed at a time. Their sums wait for others at `waiting`: the compiler would take registers
    of the loops for them.
    """
    half, heights = isa.lanes // 2, isa.lanes.bit_length() - 2  # of the tree whose leaves are pairs of lanes

    def body(e: Emitter, rows: int, arguments: list[Value]) -> None:
        q, ldq, panel, s, lds, chunks, waiting = arguments
        b, floats, size = e.builder, e.vector(F32), 4 * e.lanes
        together = rows if rows <= 3 else rows // 2
        sums = e.variables(together, 4, floats)  # of both vectors, of the first lane, then of the second
        for start, leaf in itertools.product(range(0, rows, together), range(half)):
            lane = int(f"{leaf:0{heights}b}"[::-1], 2)
            for variable in itertools.chain(*sums):
                b.store(constant(floats, 0), variable)
            with e.loop(chunks, unroll=False) as chunk:
                for second in (0, 1):
                    column = e.offset(e.times(chunk, e.lanes), lane + second * half)
                    at = e.offset(panel, e.times(column, 2 * size))
                    keys = [e.load(e.offset(at, size * j), floats) for j in (0, 1)]
                    for i, of_row in enumerate(sums):
                        place = e.offset(q, e.times(ldq, start + i), e.times(column, 4))
                        query = e.splat(e.load(place, F32))
                        for key, variable in zip(keys, of_row[2 * second :], strict=False):
                            b.store(e.fma(query, key, b.load(variable)), variable)
            height = (leaf ^ (leaf + 1)).bit_length() - 1  # of the subtree that this leaf completes
            for (i, of_row), j in itertools.product(enumerate(sums, start), (0, 1)):
                at = e.offset(waiting, size * heights * (2 * i + j))
                value = b.fadd(b.load(of_row[j]), b.load(of_row[2 + j]))
                for lower in range(height):
                    value = b.fadd(e.load(e.offset(at, size * lower), floats), value)
                out = e.offset(s, e.times(lds, i), size * j)
                e.store(value, out if height == heights else e.offset(at, size * height))
            e.fence()

    return register(f"panel_score_tile.{isa.name}", isa.lanes, with_three(isa.float_rows), 7, body)
