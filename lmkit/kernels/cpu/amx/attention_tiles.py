"""Micro-kernels of attention on tile registers (tile_file.py). They multiply rows of queries, or of weights, by panels
of keys or values. A *panel* is a copy that puts the inputs of a product into 32-bit words, a column of the result each:

    key panel     [D / 4 or D / 2, 64, 4 bytes]   neighbours in D of one key: four codes, or two bfloat16
    value panel   [keys / 4 or / 2, D, 4 bytes]   neighbours in the sequence of one column

The left operand has 16 bits in two *planes*. An int16 word is 256 * high + low with signed bytes, so its sums of
products are the exact sums of attention_tiles.py. A float32 is high + low with bfloat16 numbers. It keeps 16 bits, an
error of 2^-16 at most, where one bfloat16 would err by 2^-9. Codes of int4 queries have one plane: they are bytes.
"""

from __future__ import annotations

from llvmlite import ir

from lmkit.kernels.cpu.amx.tile_file import ROW_BYTES, ROWS, SLOTS, TILE, TileFile
from lmkit.kernels.cpu.attention_panels import compact, joined, stored_vector
from lmkit.kernels.cpu.attention_tiles import split_floats, split_words
from lmkit.kernels.cpu.emit import F32, I16, I32, I64, Emitter, Value, constant
from lmkit.kernels.cpu.isa import Isa
from lmkit.kernels.cpu.tiles import Tile, register
from lmkit.kv_dtype import INT4, KVDtype

SUMS = 4  # tiles of products that wait for their sum
WORKSPACE = SLOTS + SUMS * TILE  # bytes of scratch: the tile file, then products


def product_tile(isa: Isa) -> Tile:
    """c [rows, 16 * columns] = a b of bfloat16: a in two planes, `low` bytes apart, b a panel.

    K steps of 32 inputs are `next_a` bytes apart in a. `lda`, `ldb` and `ldc` are the bytes between rows.
    """

    def body(e: Emitter, columns: int, arguments: list[Value]) -> None:
        slots, a, lda, next_a, low, b, ldb, c, ldc, steps = arguments
        tiles = TileFile(e, isa, slots)
        for j in range(columns):
            tiles.zero(j)
        with e.loop(steps, unroll=False) as k:
            left, right = e.offset(a, e.times(k, next_a)), e.offset(b, e.times(k, e.times(ldb, ROWS)))
            tiles.load(4, left, lda)
            tiles.load(5, e.offset(left, low), lda)
            for plane in range(2):  # a sum waits for its last dot as long as three others take
                for j in range(columns):
                    tiles.load(6 + j % 2, e.offset(right, ROW_BYTES * j), ldb)
                    tiles.dot_bf16(j, 4 + plane, 6 + j % 2)
        for j in range(columns):
            tiles.store(j, e.offset(c, ROW_BYTES * j), ldc)

    name = f"attention_product.{isa.name}"
    return register(name, isa.lanes, (4, 2, 1), 10, body)


def code_product_tile(isa: Isa, *, planes: int, scaled: bool) -> Tile:
    """c [rows, 16 * columns] = a b of signed bytes a, in one or two planes `low` bytes apart, and codes in the panel b.

    K steps of 64 inputs are neighbours in a. c is int32. If `scaled`, c is float32 and becomes c + step * a b with the
    row's float32 at `steps`. `lda`, `ldb`, `ldc` and `lds` are the bytes between rows.
    """

    def body(e: Emitter, columns: int, arguments: list[Value]) -> None:
        slots, a, lda, low, b, ldb, c, ldc, num_steps, rows, steps, lds = arguments
        tiles, builder = TileFile(e, isa, slots), e.builder
        for n in range(planes * columns):
            tiles.zero(n)
        with e.loop(num_steps, unroll=False) as k:
            left, right = e.offset(a, e.times(k, ROW_BYTES)), e.offset(b, e.times(k, e.times(ldb, ROWS)))
            for plane in range(planes):
                tiles.load(4 + plane, e.offset(left, e.times(low, plane)), lda)
            for j in range(columns):
                tiles.load(6 + j, e.offset(right, ROW_BYTES * j), ldb)
                for plane in range(planes):
                    tiles.dot_int8(planes * j + plane, 4 + plane, 6 + j, unsigned=True)
        if planes == 1:
            for j in range(columns):
                tiles.store(j, e.offset(c, ROW_BYTES * j), ldc)
            return
        sums = e.offset(slots, SLOTS)
        for n in range(planes * columns):
            tiles.store(n, e.offset(sums, TILE * n), ROW_BYTES)
        with e.loop(rows) as row:
            for j in range(columns):
                at = e.offset(sums, e.times(row, ROW_BYTES), 2 * TILE * j)
                high, lower = (e.load(e.offset(at, TILE * plane), e.vector(I32)) for plane in (0, 1))
                total = builder.add(builder.shl(high, constant(high.type, 8)), lower)
                place = e.offset(c, e.times(row, ldc), ROW_BYTES * j)
                if scaled:
                    step = e.splat(e.load(e.offset(steps, e.times(row, lds)), F32))
                    total = e.fma(builder.sitofp(total, e.vector(F32)), step, e.load(place, e.vector(F32)))
                e.store(total, place)

    name = f"attention_codes.{isa.name}.{planes}" + ".scaled" * scaled
    return register(name, isa.lanes, (2, 1), 12, body)


def value_panel_tile(kind: KVDtype) -> Tile:
    """Write `count` rows of a value panel, `ldb` bytes apart, from twice or four times as many values at `places`.
    bfloat16 values that share a row are 16 apart, as `softmax_tile` puts their weights.
    """
    together = 4 if kind.has_minimum else 2

    def body(e: Emitter, rows: int, arguments: list[Value]) -> None:
        places, target, ldb, count, dim = arguments
        b = e.builder
        columns = b.lshr(dim, I64(1)) if kind == INT4 else dim
        order = [i + 16 * value for i in range(16) for value in range(together)]
        with e.loop(count) as row:
            if together == 4:
                at, apart = e.times(row, 32), 8
            else:
                at, apart = e.times(b.sub(e.times(row, 2), b.and_(row, I64(15))), 8), 8 * 16
            sources = [e.load(e.offset(places, at, apart * i), I64) for i in range(together)]
            line = e.offset(target, b.mul(row, ldb))
            with e.loop(b.udiv(columns, I64(16))) as unit:
                at = e.times(unit, 16)
                raw = [compact(e, kind, stored_vector(e, kind, x, at, 16)) for x in sources]
                for part, vectors in enumerate(zip(*raw, strict=True)):
                    whole = joined(e, list(vectors))
                    mixed = b.shuffle_vector(whole, whole, ir.Constant(e.vector(I32, len(order)), order))
                    e.store(mixed, e.offset(line, e.times(unit, ROW_BYTES), e.times(columns, 4 * part)))

    name = f"value_panel.{kind}"
    return register(name, 16, (1,), 5, body)


def planes_tile(*, words: bool) -> Tile:
    """Write the planes, `low` bytes apart, of `chunks` * 32 floats at `x`, or of as many int16 `words`."""

    def body(e: Emitter, rows: int, arguments: list[Value]) -> None:
        x, out, low, chunks = arguments
        size = 2 if words else 4
        with e.loop(chunks) as chunk:
            at = e.offset(x, e.times(chunk, 32 * size))
            if words:
                planes = split_words(e, e.load(at, e.vector(I16, 32)))
            else:
                planes = split_floats(e, *(e.load(e.offset(at, 64 * i), e.vector(F32)) for i in (0, 1)))
            place = e.offset(out, e.times(chunk, 16 * size))
            for plane, address in zip(planes, (place, e.offset(place, low)), strict=True):
                e.store(plane, address)

    name = f"planes.{'words' if words else 'floats'}"
    return register(name, 16, (1,), 4, body)
