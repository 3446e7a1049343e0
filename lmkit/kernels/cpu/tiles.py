"""Micro-kernels: IR functions that compute a few rows of one panel. Reduction orders do not depend on the row count.

All functions of a kind have the same arguments (addresses and int64 numbers). There is one for each row count of the
instruction set. A dispatcher `f(rows, ...)` runs the largest that fits and returns the number of rows it computed.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import dataclass

import llvmlite.binding as llvm
from llvmlite import ir

from lmkit.kernels.cpu.dots import BLOCK, LOOKED_UP, Quads, dot_for, halves_of, load_quads, word_products
from lmkit.kernels.cpu.emit import F16, F32, I8, I16, I32, I64, Emitter, Value, constant
from lmkit.kernels.cpu.isa import Isa

CODES4, CODES8, FLOAT8 = "int4", "int8", "float8"  # kinds of stored weights, beside the float types
CACHE_LINE = 64
# AMD's processors fetch by themselves what one row of 8-bit weights reads. Asking them costs up to a tenth of its
# speed. One row of packed weights, which are unpacked between their loads, gains from it.
FETCHES_AHEAD = llvm.get_host_cpu_name().startswith("znver")
FEW_ROWS = 4  # so many take less time than the weights take to come from memory
Body = Callable[[Emitter, int, list[Value]], None]  # (emitter, rows, arguments)


@dataclass(frozen=True)
class Tile:
    """A family of micro-kernels."""

    name: str
    lanes: int
    rows: tuple[int, ...]  # descending, down to 1
    num_arguments: int
    body: Body


TILES: dict[str, Tile] = {}  # by name, as compiled code refers to them


def register(name: str, lanes: int, rows: tuple[int, ...], num_arguments: int, body: Body) -> Tile:
    """The family of this name, which is made once."""
    return TILES.setdefault(name, Tile(name, lanes, rows, num_arguments, body))


def emit(tile: Tile, module: ir.Module) -> ir.Function:
    """Emit a tile's functions and its dispatcher, or find them in `module`."""
    name = f"lmkit.{tile.name}"
    if name in module.globals:
        return module.globals[name]
    fixed = {rows: _emit_rows(tile, rows, f"{name}.{rows}", module) for rows in tile.rows}
    dispatch = ir.Function(module, ir.FunctionType(I64, [I64] * (tile.num_arguments + 1)), name)
    dispatch.linkage = "internal"
    rows_left, *arguments = dispatch.args
    b = ir.IRBuilder(dispatch.append_basic_block("entry"))
    for rows, function in fixed.items():
        with b.if_then(b.icmp_signed(">=", rows_left, I64(rows))):
            b.call(function, arguments)
            b.ret(I64(rows))
    b.ret(I64(0))
    return dispatch


def _emit_rows(tile: Tile, rows: int, name: str, module: ir.Module) -> ir.Function:
    function = ir.Function(module, ir.FunctionType(ir.VoidType(), [I64] * tile.num_arguments), name)
    function.linkage = "internal"
    function.attributes.add("noinline")
    builder = ir.IRBuilder(function.append_basic_block("entry"))
    tile.body(Emitter(builder, tile.lanes), rows, list(function.args))
    builder.ret_void()
    return function


def int_tile(isa: Isa, bits: int, *, packed: bool, half_scales: bool, values: tuple[int, ...] = ()) -> Tile:
    """c += dequantized product of int8 activations and weight codes, group by group.

    x [rows, ...] has one byte (or two: Dot.input_bytes) per input, `ldx` bytes between rows. w is one panel,
    [inputs / q, tile, q] bytes with q = Dot.inputs, or half as many when `packed`. sx and sumx are float32 and int32
    [rows, groups], `lds` bytes between rows: the scale of x, and -sum(x) as a pair of words (see `sum_pair`). scales
    are [groups, tile] float16 or float32, zeros uint8 (int8 if Dot.flipped) [groups, tile], c is float32 [rows, tile].
    A group is `blocks` * 32 inputs, or * 16 if there are `values`: the codes that packed numbers of 4 bits stand for.
    Stored weights at `ahead`, as many as `groups` groups have, are prefetched.

    More rows than FEW_ROWS compute one half of the panel after the other: fewer vectors are unpacked for each row.
    Zeros are subtracted before anything is rounded: c += scale * (sx * (sum(x * code) - zero * sum(x))).
    """
    dot, width, size = dot_for(isa, bits), isa.int_vectors, LOOKED_UP if values else BLOCK

    def body(e: Emitter, rows: int, arguments: list[Value]) -> None:
        x, ldx, w, sx, sumx, lds, scales, zeros, c, groups, blocks, ahead = arguments
        b, kind, parts = e.builder, e.vector(I32), 2 if packed and rows > FEW_ROWS else 1
        vectors, stored_bytes = width // parts, size * width * e.lanes * bits // 8
        block_bytes = stored_bytes if packed else size * width * e.lanes
        sums = e.variables(rows + rows % dot.rows, vectors, kind)

        def store_sums(values: list[list[Value]]) -> None:
            for value, variable in zip(itertools.chain(*values), itertools.chain(*sums), strict=True):
                b.store(value, variable)

        with e.loop(I64(parts), unroll=False) as part, e.loop(groups) as group:
            column, share = e.times(part, vectors * e.lanes), stored_bytes // parts
            first = b.add(e.times(group, width * e.lanes), column)
            places = [e.offset(e.times(group, 4), e.times(lds, row)) for row in range(rows)]
            pairs = zero_pairs(e, vectors, b.add(zeros, first), signed=dot.flipped > 0)
            totals = [e.splat(e.load(e.offset(sumx, place), I32)) for place in places]
            store_sums(
                dot.spread(e, [[word_products(e, isa, pair, t, constant(kind, 0)) for pair in pairs] for t in totals])
            )
            with e.loop(blocks) as block:
                at = b.add(b.mul(group, blocks), block)
                x_block = e.offset(x, e.times(at, size * dot.input_bytes))

                def activation(row: int, byte: int, start: Value = x_block) -> Value:
                    return dot.operand(e, e.offset(start, e.times(ldx, min(row, rows - 1)), byte))

                found = [[b.load(v) for v in row] for row in sums]
                codes = e.offset(w, e.times(at, block_bytes), e.times(column, dot.inputs))
                quads: Quads = load_quads(e, dot, codes, vectors, width, size, halves)
                if rows > 1 or packed or not FETCHES_AHEAD:
                    start = e.offset(ahead, e.times(at, stored_bytes), e.times(part, share))
                    quads = prefetching(e, isa, quads, size // dot.inputs, start, share)
                dot.block(e, quads, activation, found)
                store_sums(found)
            products = dot.gather(e, [[b.load(v) for v in row] for row in sums])
            scale = group_scales(e, isa, half_scales, scales, first, vectors)
            for row, place in enumerate(places):
                step = e.splat(e.load(e.offset(sx, place), F32))
                for j in range(vectors):
                    address = e.offset(c, e.times(column, 4), 4 * e.lanes * (row * width + j))
                    product = b.fmul(b.sitofp(products[row][j], e.vector(F32)), step)
                    e.store(e.fma(scale[j], product, e.load(address, e.vector(F32))), address)

    halves = halves_of(isa, values) if packed else None
    name = f"int_tile.{isa.name}.{bits}.{'packed' if packed else 'bytes'}.{'half' if half_scales else 'float'}"
    name += _suffix(values)
    rows = tuple(n for n in (isa.packed_rows if packed else isa.int_rows) if n <= dot.max_rows)
    return register(name, isa.lanes, rows, 12, body)


def prefetching(e: Emitter, isa: Isa, quads: Quads, count: int, start: Value, size: int) -> Quads:
    """`quads`, and between them the prefetches of `size` bytes. All at once, they would wait for each other, and the
    loads after them too. On ARM all come first: its compiler spills registers otherwise."""
    lines, parts = range(0, size, CACHE_LINE), 1 if isa.neon else count
    for part, weights in enumerate(quads):
        if 0 < part < parts:
            e.fence()
        for line in lines[part * len(lines) // parts : (part + 1) * len(lines) // parts]:
            e.prefetch(e.offset(start, line), level=1)
        yield weights


def _suffix(values: tuple[int, ...]) -> str:
    return "." + "-".join(map(str, values)) if values else ""


def unpack_tile(isa: Isa, values: tuple[int, ...] = ()) -> Tile:
    """Unpack `count` pairs of quads of a packed panel (int_tile) to bytes: low nibbles first, then high nibbles."""
    halves_in, size, vectors = halves_of(isa, values), 4 * isa.lanes, dot_for(isa, 4).weight_vectors(isa.int_vectors)

    def body(e: Emitter, rows: int, arguments: list[Value]) -> None:
        source, target, count = arguments
        with e.loop(count) as pair:
            packed = e.offset(source, e.times(pair, vectors * size))
            low = e.offset(target, e.times(pair, 2 * vectors * size))
            for j in range(vectors):
                halves = halves_in(e, e.load(e.offset(packed, j * size), e.vector(I8, size)))
                for half, codes in enumerate(halves):
                    e.store(codes, e.offset(low, (half * vectors + j) * size))

    return register(f"unpack_tile.{isa.name}{_suffix(values)}", isa.lanes, (1,), 3, body)


def group_scales(e: Emitter, isa: Isa, half: bool, scales: Value, first: Value, vectors: int) -> list[Value]:
    """The scales from number `first` on as float32, a vector for each output vector."""
    places = [e.offset(scales, e.times(e.offset(first, j * e.lanes), 2 if half else 4)) for j in range(vectors)]
    return [load_halves(e, isa, place) if half else e.load(place, e.vector(F32)) for place in places]


def load_halves(e: Emitter, isa: Isa, address: Value) -> Value:
    """A vector of finite float16 as float32: one instruction where there is one, else integer arithmetic."""
    if isa.needs & {"f16c", "neon"}:
        return e.builder.fpext(e.load(address, e.vector(F16)), e.vector(F32))
    return e.half_to_float(e.builder.zext(e.load(address, e.vector(I16)), e.vector(I32)))


SUM_SPLIT = 7  # bits: 128 * zero fits a word, and so do the sum's two parts if |sum| < LARGEST_SUM
LARGEST_SUM = 1 << 22


def zero_pairs(e: Emitter, vectors: int, zeros: Value, *, signed: bool = False) -> list[Value]:
    """The words (zero, 128 * zero) of outputs whose zeros begin at `zeros`. Their products with `sum_pair` add up to
    zero * -sum."""
    b, pairs = e.builder, []
    for j in range(vectors):
        zero = e.load(e.offset(zeros, j * e.lanes), e.vector(I8))
        wide = (b.sext if signed else b.zext)(zero, e.vector(I32))
        low = b.and_(wide, constant(wide.type, 0xFFFF))
        pairs.append(b.or_(low, b.shl(wide, constant(wide.type, 16 + SUM_SPLIT))))
    return pairs


def sum_pair(e: Emitter, total: Value) -> Value:
    """-total of a group, an int32 below LARGEST_SUM, as words (low, high) with low + 128 * high = -total."""
    b = e.builder
    negative = b.neg(total)
    low = b.and_(negative, I32((1 << SUM_SPLIT) - 1))
    return b.or_(low, b.shl(b.ashr(negative, I32(SUM_SPLIT)), I32(16)))


ACTIVATION_LANES = 16  # activations are quantized in such vectors, or in halves or quarters of them


def peak_tile() -> Tile:
    """The int32 at `peak` becomes the bits of the largest |x| of `chunks` * 16 floats, if that is larger."""

    def body(e: Emitter, rows: int, arguments: list[Value]) -> None:
        x, chunks, peak = arguments
        b, kind = e.builder, e.vector(I32)
        ((best,),) = e.variables(1, 1, kind)
        b.store(e.splat(e.load(peak, I32)), best)
        with e.loop(chunks) as chunk:
            bits = b.and_(e.load(e.offset(x, e.times(chunk, 4 * e.lanes)), kind), constant(kind, 0x7FFFFFFF))
            b.store(b.select(b.icmp_signed(">", bits, b.load(best)), bits, b.load(best)), best)
        e.store(e.call(f"llvm.vector.reduce.smax.v{e.lanes}i32", I32, [b.load(best)]), peak)

    return register("peak_tile", ACTIVATION_LANES, (1,), 3, body)


def codes_tile(*, wide: bool) -> Tile:
    """round(x * inverse) of `pieces` * `chunks` * 16 floats to `out` as int8, -127 .. 127, or as int16 in the layout
    of dots.PmaddWide. Pieces are `stride` bytes apart. `inverse` is the address of a float32. The sum of the codes goes
    to the int32 at `total`, as `sum_pair`.
    """

    def body(e: Emitter, rows: int, arguments: list[Value]) -> None:
        x, out, pieces, chunks, stride, inverse, total = arguments
        b, kind = e.builder, e.vector(I32)
        ((sums,),) = e.variables(1, 1, kind)
        b.store(constant(kind, 0), sums)
        factor = e.splat(e.load(inverse, F32))
        with e.loop(pieces) as piece, e.loop(chunks) as chunk:
            source = e.offset(x, e.times(b.add(b.mul(piece, chunks), chunk), 4 * e.lanes))
            codes = b.fptosi(e.rint(b.fmul(e.load(source, e.vector(F32)), factor)), kind)
            for edge, outside in ((constant(kind, 127), ">"), (constant(kind, -127), "<")):
                codes = b.select(b.icmp_signed(outside, codes, edge), edge, codes)
            b.store(b.add(b.load(sums), codes), sums)
            place = e.offset(out, b.mul(piece, stride), e.times(chunk, (2 if wide else 1) * e.lanes))
            if wide:
                order = [quad + i for quad in range(0, e.lanes, 4) for i in (0, 2, 1, 3)]
                codes = b.shuffle_vector(codes, codes, ir.Constant(kind, order))
            e.store(b.trunc(codes, e.vector(I16 if wide else I8)), place)
        e.store(sum_pair(e, e.call(f"llvm.vector.reduce.add.v{e.lanes}i32", I32, [b.load(sums)])), total)

    name = f"codes_tile.{'wide' if wide else 'narrow'}"
    return register(name, ACTIVATION_LANES, (1,), 7, body)


def pair_rows(isa: Isa) -> tuple[int, ...]:
    """The row counts that leave registers for a second panel. ARM's panels are twice as many vectors wide."""
    return (1,) if isa.neon else (3, 2, 1)


def float_tile(isa: Isa, stored: str = "float32", *, pairs: bool = False) -> Tile:
    """c [rows, tile] += x [rows, k] @ w [k, tile], in float32, inputs strictly in order.

    `ldx`, `ldw` and `ldc` are the bytes between rows of each. w is `stored` as float32, bfloat16 or float16 and widened
    in registers. This gives the same bits as weights widened by `widen_tile`. A row of bfloat16 holds two inputs, side
    by side for each output: [k / 2, tile, 2]. With `pairs` two panels are multiplied, `next_w` and `next_c` bytes
    apart: each sum waits for itself, input by input, and a row of one panel has few sums.
    """
    panels, inputs = 2 if pairs else 1, 2 if stored == "bfloat16" else 1
    vectors = panels * isa.float_vectors

    def load_weights(e: Emitter, address: Value) -> list[Value]:
        """A vector for each input of a row."""
        if stored == "float32":
            return [e.load(address, e.vector(F32))]
        if stored == "bfloat16":
            return e.bfloat_pair(e.load(address, e.vector(I32)))
        return [load_halves(e, isa, address)]

    def body(e: Emitter, rows: int, arguments: list[Value]) -> None:
        x, ldx, w, ldw, c, ldc, k, *nexts = arguments
        b, kind = e.builder, e.vector(F32)
        vector_bytes = (2 if stored == "float16" else 4) * e.lanes
        sums = e.variables(rows, vectors, kind)
        within = isa.float_vectors
        next_w, next_c = nexts or (I64(0), I64(0))
        of_panels = [e.offset(c, e.times(next_c, panel)) for panel in range(panels)]
        columns = [divmod(j, within) for j in range(vectors)]
        places = [
            [e.offset(of_panels[panel], e.times(ldc, i), 4 * e.lanes * j) for panel, j in columns] for i in range(rows)
        ]

        for i in range(rows):
            for j in range(vectors):
                b.store(e.load(places[i][j], kind), sums[i][j])
        for index, size in e.steps(k, sorted({isa.lanes if isa.neon else 1, inputs, 1}, reverse=True)):
            of_rows = [e.offset(x, e.times(ldx, i), e.times(index, 4)) for i in range(rows)]
            for n in range(0, size, inputs):
                start = e.offset(w, b.mul(b.sdiv(e.offset(index, n), I64(inputs)), ldw))
                starts = [e.offset(start, e.times(next_w, panel)) for panel in range(panels)]
                weights = [load_weights(e, e.offset(starts[panel], vector_bytes * j)) for panel, j in columns]
                for m, i in itertools.product(range(min(inputs, size)), range(rows)):
                    value = e.scalar(of_rows[i], n + m, size)
                    for j in range(vectors):
                        b.store(e.fma(value, weights[j][m], b.load(sums[i][j])), sums[i][j])
        for i in range(rows):
            for j in range(vectors):
                e.store(b.load(sums[i][j]), places[i][j])

    name = f"float_tile.{isa.name}.{stored}" + ".pairs" * pairs
    return register(name, isa.lanes, pair_rows(isa) if pairs else isa.float_rows, 9 if pairs else 7, body)


def widen_tile(isa: Isa, kind: str) -> Tile:
    """Widen weights of one panel, [count, tile], to float32 at `target`. There are no rows.

    `kind` "float16" is [count, tile] and "bfloat16" [count / 2, tile, 2] at `source`. Codes have one group's scales and
    zeros, float32 [tile]. "int4" gives (code - zero) * scale; codes are uint8 [count / 2, tile] with an even input in
    the low nibble and the next input in the high nibble. "int8" is the same with a byte per code. "float8" is e4m3
    times scale. An odd `count` of inputs in pairs widens one input more.
    """
    of_codes = {CODES4: _widen_int4, CODES8: _widen_bytes, FLOAT8: _widen_bytes}
    widen = of_codes.get(kind, _widen_pairs if kind == "bfloat16" else _widen_halves)

    def body(e: Emitter, rows: int, arguments: list[Value]) -> None:
        widen(e, isa, kind, *arguments)

    name = f"widen_tile.{isa.name}.{kind}"
    return register(name, isa.lanes, (1,), 5, body)


def _load_row(e: Emitter, vectors: int, address: Value) -> list[Value]:
    return [e.load(e.offset(address, 4 * e.lanes * j), e.vector(F32)) for j in range(vectors)]


def _widen_halves(
    e: Emitter, isa: Isa, kind: str, source: Value, target: Value, count: Value, scales_at: Value, zeros_at: Value
) -> None:
    with e.loop(e.times(count, isa.float_vectors)) as i:
        halves = load_halves(e, isa, e.offset(source, e.times(i, 2 * e.lanes)))
        e.store(halves, e.offset(target, e.times(i, 4 * e.lanes)))


def _widen_pairs(
    e: Emitter, isa: Isa, kind: str, source: Value, target: Value, count: Value, scales_at: Value, zeros_at: Value
) -> None:
    b, vectors, row_bytes = e.builder, isa.float_vectors, 4 * isa.float_tile
    with e.loop(b.lshr(b.add(count, I64(1)), I64(1))) as row:
        for j in range(vectors):
            pair = e.load(e.offset(source, e.times(row, row_bytes), 4 * e.lanes * j), e.vector(I32))
            for half, value in enumerate(e.bfloat_pair(pair)):
                e.store(value, e.offset(target, e.times(row, 2 * row_bytes), half * row_bytes, 4 * e.lanes * j))


def _widen_int4(
    e: Emitter, isa: Isa, kind: str, source: Value, target: Value, count: Value, scales_at: Value, zeros_at: Value
) -> None:
    b, integers, vectors = e.builder, e.vector(I32), isa.float_vectors
    scales, zeros = _load_row(e, vectors, scales_at), _load_row(e, vectors, zeros_at)
    with e.loop(b.lshr(b.add(count, I64(1)), I64(1))) as pair:
        for j in range(vectors):
            at = e.offset(e.times(pair, vectors * e.lanes), j * e.lanes)
            codes = b.zext(e.load(e.offset(source, at), e.vector(I8)), integers)
            for half, nibble in enumerate(
                (b.and_(codes, constant(integers, 15)), b.lshr(codes, constant(integers, 4)))
            ):
                value = b.fmul(b.fsub(b.sitofp(nibble, e.vector(F32)), zeros[j]), scales[j])
                place = e.offset(e.times(pair, 8 * vectors * e.lanes), 4 * e.lanes * (half * vectors + j))
                e.store(value, e.offset(target, place))


def _widen_bytes(
    e: Emitter, isa: Isa, kind: str, source: Value, target: Value, count: Value, scales_at: Value, zeros_at: Value
) -> None:
    b, vectors = e.builder, isa.float_vectors
    scales = _load_row(e, vectors, scales_at)
    zeros = _load_row(e, vectors, zeros_at) if kind == CODES8 else []
    with e.loop(count) as k:
        for j in range(vectors):
            at = e.offset(e.times(k, vectors * e.lanes), j * e.lanes)
            codes = b.zext(e.load(e.offset(source, at), e.vector(I8)), e.vector(I32))
            value = b.fsub(b.sitofp(codes, e.vector(F32)), zeros[j]) if kind == CODES8 else e.float8_to_float(codes)
            place = e.offset(e.times(k, 4 * vectors * e.lanes), 4 * e.lanes * j)
            e.store(b.fmul(value, scales[j]), e.offset(target, place))
