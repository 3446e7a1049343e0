"""Micro-kernels of weights in planes of bits (packed_planes.py): codes of 2 to 6 bits or looked up, groups of 16 or 32
inputs, scales with factors, offsets. They take the arguments of tiles.int_tile; `scales` are the sides, and `groups`
counts units.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable
from typing import NamedTuple

from lmkit.kernels.cpu.dots import Dot, Quads, dot_up_to, look_up
from lmkit.kernels.cpu.emit import F32, I8, I32, I64, Emitter, Value, constant
from lmkit.kernels.cpu.isa import Isa
from lmkit.kernels.cpu.tiles import FEW_ROWS, SUM_SPLIT, Tile, load_halves, prefetching, register

UNIT = 32  # inputs whose planes lie together
QUADS = UNIT // 4
SUPER = 8  # units that share factors


class Planes(NamedTuple):
    """What micro-kernels of such a weight are compiled for."""

    bits: int  # of stored codes: 2 to 6, or 8 in one plane
    group: int  # inputs: 16 or 32
    factors: bool  # scales and offsets are int8 times a factor, else float16
    shifted: bool  # there are offsets, else codes have the zero `middle`
    values: tuple[int, ...] = ()  # not empty: the codes that stored numbers stand for
    shift: int = 0  # factors count 2^-shift

    @property
    def middle(self) -> int:
        return 128 if self.values else 1 << (self.bits - 1)

    @property
    def parts(self) -> int:
        """Numbers of a group beside its codes: a scale, and an offset if there are any."""
        return 2 if self.shifted else 1

    @property
    def groups(self) -> int:
        """Of a unit."""
        return UNIT // self.group

    @property
    def side_units(self) -> int:
        """Units of one side: of SUPER units with factors."""
        return SUPER if self.factors else 1

    @property
    def side_bytes(self) -> int:
        """Of one output: the factors of scales and of offsets, then of each unit the scales and the offsets."""
        return self.parts * (2 + SUPER * self.groups if self.factors else 2 * self.groups)

    @property
    def sides(self) -> str:
        """A name of all that `side` asks."""
        kind = f"factors{self.shift}" if self.factors else "half"
        return f"{self.group}.{kind}{'.shifted' * self.shifted}"

    @property
    def largest(self) -> int:
        """The largest code."""
        return max(self.values) if self.values else (1 << self.bits) - 1

    def dot(self, isa: Isa) -> Dot:
        return dot_up_to(isa, self.largest)


def planes_of(bits: int) -> tuple[int, ...]:
    """The bits of each plane, the lowest first: 6 = 4 + 2."""
    return tuple(plane for plane in (8, 4, 2, 1) if bits & plane)


def planes_tile(isa: Isa, form: Planes, *, packed: bool, inputs: int = 1) -> Tile:
    """See tiles.int_tile. Without `packed` codes are bytes, as unpack_planes_tile leaves them.

    c += scale * (sx * sum(x * code)) - offset * (sx * sum(x)); without offsets the zero is subtracted from the codes.
    Each row of c has `inputs` rows of x. Of two the first one counts 256 times, and sx is that of the second one.
    """
    dot, width, per_unit = form.dot(isa), isa.int_vectors, form.groups
    zero = 0 if form.shifted else form.middle - dot.flipped
    planes = planes_of(form.bits) if packed else (8,)

    def body(e: Emitter, rows: int, arguments: list[Value]) -> None:
        x, ldx, w, sx, sumx, lds, sides, _zeros, c, units, _blocks, ahead = arguments
        b, parts = e.builder, 2 if packed and rows * inputs > FEW_ROWS else 1
        vectors, row_bytes = width // parts, 4 * e.lanes * width
        with e.loop(I64(parts), unroll=False) as part, e.loop(units, unroll=False) as unit:
            column = e.times(part, vectors * e.lanes)
            codes = e.offset(w, e.times(unit, sum(planes) * row_bytes), e.times(column, 4))
            quads: Quads = unpacked(e, isa, form, planes, codes, vectors, row_bytes)
            stored = form.bits * row_bytes
            share = stored // parts
            start = e.offset(ahead, e.times(unit, stored), e.times(part, share))
            quads = iter(prefetching(e, isa, quads, QUADS, start, share))
            for half in range(per_unit):
                group = e.offset(e.times(unit, per_unit), half)
                places = [e.offset(e.times(group, 4), e.times(lds, row)) for row in range(rows * inputs)]
                backs = [negative_sum(e, e.load(e.offset(sumx, place), I32)) for place in places]
                found = [[e.splat(b.mul(back, I32(zero)))] * vectors for back in backs]
                begin = e.offset(e.times(unit, UNIT * dot.input_bytes), half * form.group * dot.input_bytes)

                def activation(row: int, byte: int, begin: Value = begin) -> Value:
                    return dot.operand(e, e.offset(x, begin, e.times(ldx, row), byte))

                count = QUADS // per_unit
                dot.block(e, (next(quads) for _ in range(count)), activation, found)
                scales, offsets = side(e, isa, form, sides, unit, half, column, vectors)
                if inputs == 2:
                    found = [joined(e, *found[row : row + 2]) for row in range(0, 2 * rows, 2)]
                    backs = [joined(e, *([back] for back in backs[row : row + 2]))[0] for row in range(0, 2 * rows, 2)]
                for row, place in enumerate(places[inputs - 1 :: inputs]):
                    step = e.load(e.offset(sx, place), F32)
                    steps = e.splat(step)
                    back = e.splat(b.fmul(step, b.sitofp(backs[row], F32))) if offsets else None
                    for j in range(vectors):
                        address = e.offset(c, e.times(column, 4), 4 * e.lanes * (row * width + j))
                        product = b.fmul(b.sitofp(found[row][j], e.vector(F32)), steps)
                        total = e.fma(scales[j], product, e.load(address, e.vector(F32)))
                        e.store(e.fma(offsets[j], back, total) if offsets else total, address)

    name = f"planes_tile.{isa.name}.{'packed' if packed else 'bytes'}.{_name(form)}{'.split' * (inputs - 1)}"
    most = (n for n in (isa.packed_rows if packed else isa.int_rows) if n <= dot.max_rows)
    rows = tuple(dict.fromkeys(max(1, n // inputs) for n in most))
    return register(name, isa.lanes, rows, 12, body)


def unpack_planes_tile(isa: Isa, form: Planes, *, signed: bool = False) -> Tile:
    """Unpack the codes of `count` units to bytes, less their zero if they are `signed`."""
    zero = form.middle if signed and not form.shifted else 0
    planes, vectors = planes_of(form.bits), isa.int_vectors

    def body(e: Emitter, rows: int, arguments: list[Value]) -> None:
        source, target, count = arguments
        row_bytes = 4 * e.lanes * vectors
        with e.loop(count, unroll=False) as unit:
            codes = e.offset(source, e.times(unit, form.bits * row_bytes))
            for quad, found in enumerate(unpacked(e, isa, form, planes, codes, vectors, row_bytes)):
                for j, code in enumerate(found):
                    if zero:
                        wide = e.builder.bitcast(code, e.vector(I8, 4 * e.lanes))
                        code = e.builder.sub(wide, constant(wide.type, _signed(zero)))
                    e.store(code, e.offset(target, e.times(unit, 8 * row_bytes), quad * row_bytes + 4 * e.lanes * j))

    return register(f"unpack_planes_tile.{isa.name}.{_name(form)}{'.signed' * signed}", isa.lanes, (1,), 3, body)


def _name(form: Planes) -> str:
    kind = f"{form.bits}.{form.sides}"
    return kind + ("." + "-".join(map(str, form.values)) if form.values else "")


def unpacked(
    e: Emitter, isa: Isa, form: Planes, planes: tuple[int, ...], address: Value, vectors: int, row_bytes: int
) -> Iterable[list[Value]]:
    """The codes of a unit quad by quad, for some vectors of outputs, as int32 lanes of four bytes.

    A plane of p bits has a row of bytes for each 8 / p quads; the first quad lies in the lowest bits.
    """
    b, kind, flipped = e.builder, e.vector(I8, 4 * e.lanes), form.dot(isa).flipped

    @functools.cache
    def row(number: int) -> list[Value]:
        return [e.load(e.offset(address, number * row_bytes + 4 * e.lanes * j), kind) for j in range(vectors)]

    table = tuple(_signed(value ^ flipped) for value in form.values)
    for quad in range(QUADS):
        first, place, codes = 0, 0, list[Value]()
        for plane in planes:
            stored = row(first + quad // (8 // plane))
            bits = [_bits(e, each, plane, quad % (8 // plane) * plane, place) for each in stored]
            codes = [b.or_(*pair) for pair in zip(codes, bits, strict=True)] if codes else bits
            first, place = first + plane, place + plane
        if table and planes != (8,):
            codes = [look_up(e, isa, each, table) for each in codes]
        yield [b.bitcast(each, e.vector(I32)) for each in codes]


def _bits(e: Emitter, stored: Value, count: int, start: int, place: int) -> Value:
    """`count` bits of each byte from `start` on, moved to `place`. Lanes are shifted whole: no bit leaves its byte."""
    if count == 8:
        return stored
    b, lanes = e.builder, e.vector(I32)
    chosen = b.and_(stored, constant(stored.type, _signed(((1 << count) - 1) << start)))
    if start == place:
        return chosen
    shift = b.shl if place > start else b.lshr
    return b.bitcast(shift(b.bitcast(chosen, lanes), constant(lanes, abs(place - start))), stored.type)


def _signed(byte: int) -> int:
    return byte - 256 if byte > 127 else byte


def joined(e: Emitter, high: list[Value], low: list[Value]) -> list[Value]:
    """256 * high + low."""
    b = e.builder
    return [b.add(b.shl(x, constant(x.type, 8)), y) for x, y in zip(high, low, strict=True)]


def negative_sum(e: Emitter, pair: Value) -> Value:
    """-sum(x) of a group, or of many in a vector, from tiles.sum_pair's words."""
    b, kind = e.builder, pair.type
    high = b.shl(b.ashr(pair, constant(kind, 16)), constant(kind, SUM_SPLIT))
    return b.add(b.and_(pair, constant(kind, 0xFFFF)), high)


def side(
    e: Emitter, isa: Isa, form: Planes, sides: Value, unit: Value, half: int, column: Value, vectors: int
) -> tuple[list[Value], list[Value]]:
    """(scales, offsets), a vector of float32 for each of outputs. No offsets: an empty list."""
    b, width, numbers = e.builder, isa.int_tile, e.vector(F32)

    def halves(start: Value) -> list[Value]:
        places = [e.offset(start, e.times(column, 2), 2 * e.lanes * j) for j in range(vectors)]
        return [load_halves(e, isa, place) for place in places]

    if not form.factors:
        start = e.offset(sides, e.times(unit, form.side_bytes * width))
        found = [halves(e.offset(start, 2 * width * (part * form.groups + half))) for part in range(form.parts)]
        return found[0], found[1] if form.shifted else []
    start = e.offset(sides, e.times(b.lshr(unit, I64(SUPER.bit_length() - 1)), form.side_bytes * width))
    of_unit = e.times(b.and_(unit, I64(SUPER - 1)), form.parts * form.groups * width)
    found = []
    for part in range(form.parts):
        factors = halves(e.offset(start, 2 * width * part))
        if form.shift:
            factors = [b.fmul(factor, constant(numbers, 2.0**-form.shift)) for factor in factors]
        first = e.offset(start, of_unit, 2 * width * form.parts, width * (part * form.groups + half), column)
        stored = [e.load(e.offset(first, e.lanes * j), e.vector(I8)) for j in range(vectors)]
        found.append(
            [
                b.fmul(factor, b.sitofp(b.sext(each, e.vector(I32)), numbers))
                for factor, each in zip(factors, stored, strict=True)
            ]
        )
    return found[0], found[1] if form.shifted else []
