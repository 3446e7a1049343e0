"""Dot products of unsigned weight codes with signed activations, 32 inputs at a time, for each instruction set.

Lane o of a weight vector holds four consecutive inputs of output o, one byte each: a quad. An activation operand has
the same four inputs of one token in every lane. `Sdot` and `Usmmla` say how they differ. Integer sums are exact, so
every variant gives the same bits.
"""

from __future__ import annotations

import functools
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable
from dataclasses import dataclass

import llvmlite.binding as llvm
from llvmlite import ir

from lmkit.kernels.cpu.emit import I8, I16, I32, Emitter, Value, constant
from lmkit.kernels.cpu.isa import Isa

BLOCK = 32  # inputs
X86_LOOK_UPS = {16: "x86.ssse3.pshuf.b.128", 32: "x86.avx2.pshuf.b", 64: "x86.avx512.pshuf.b.512"}
LOOKED_UP = 16  # inputs of a block whose codes are looked up: such weights have small groups
Quads = Iterable[list[Value]]  # for each `Dot.inputs` inputs of a block, the weight vectors of all outputs
Activations = Callable[[int, int], Value]  # (row, byte offset in the block) -> an operand, as `Dot.operand` loads it
Halves = Callable[[Emitter, Value], list[Value]]  # packed bytes -> the codes of two quads
Sums = list[list[Value]]  # [row][output vector], or as `Dot.spread` arranges them


def vpdpbusd(e: Emitter, total: Value, codes: Value, x: Value) -> Value:
    """`total` in int32 lanes, plus four products per lane of the bytes of `codes` and the signed bytes of `x`."""
    # The operands' type in IR was int32 lanes before LLVM 22.
    operand = e.vector(I8, 4 * e.lanes) if llvm.llvm_version_info[0] >= 22 else e.vector(I32)
    pair = [e.builder.bitcast(codes, operand), e.builder.bitcast(x, operand)]
    return e.call(f"llvm.x86.avx512.vpdpbusd.{32 * e.lanes}", e.vector(I32), [total, *pair])


def byte_products(e: Emitter, total: Value, codes: Value, x: Value, *, signed: bool = False) -> Value:
    """As `vpdpbusd`, with plain multiplications. `signed`: of signed codes."""
    b, kind = e.builder, e.vector(I32)
    codes, x = b.bitcast(codes, kind), b.bitcast(x, kind)

    def byte(lanes: Value, i: int) -> Value:
        return b.ashr(b.shl(lanes, constant(kind, 24 - 8 * i)), constant(kind, 24))

    for i in range(4):
        code = byte(codes, i) if signed else b.and_(b.lshr(codes, constant(kind, 8 * i)), constant(kind, 255))
        total = b.add(total, b.mul(code, byte(x, i)))
    return total


def sdot(e: Emitter, total: Value, codes: Value, x: Value, *, name: str = "sdot") -> Value:
    """As `vpdpbusd`, of signed codes."""
    operands = [e.builder.bitcast(operand, e.vector(I8, 16)) for operand in (codes, x)]
    return e.call(f"llvm.aarch64.neon.{name}.v4i32.v16i8", total.type, [total, *operands])


def usmmla(e: Emitter, total: Value, codes: Value, x: Value) -> Value:
    """`total` plus the product of two matrices: bytes of two outputs, signed bytes of two rows, eight inputs each."""
    return sdot(e, total, codes, x, name="usmmla")


def matrix_products(e: Emitter, total: Value, codes: Value, x: Value) -> Value:
    """As `usmmla`, with plain multiplications."""
    b, bytes_ = e.builder, e.vector(I8, 16)
    codes, x = b.bitcast(codes, bytes_), b.bitcast(x, bytes_)
    for i in range(8):
        code = b.zext(pick(e, codes, codes, [i, i, 8 + i, 8 + i]), total.type)
        total = b.add(total, b.mul(code, b.sext(pick(e, x, x, [i, 8 + i, i, 8 + i]), total.type)))
    return total


def pick(e: Emitter, x: Value, y: Value, lanes: list[int]) -> Value:
    """Some lanes of two vectors, numbered through."""
    return e.builder.shuffle_vector(x, y, ir.Constant(ir.VectorType(I32, len(lanes)), lanes))


def vpdpwssd(e: Emitter, total: Value, x: Value, y: Value) -> Value:
    """`total` in int32 lanes, plus the two products per lane of the int16 words of `x` and `y`."""
    operand = e.vector(I16, 2 * e.lanes) if llvm.llvm_version_info[0] >= 22 else e.vector(I32)
    pair = [e.builder.bitcast(x, operand), e.builder.bitcast(y, operand)]
    return e.call(f"llvm.x86.avx512.vpdpwssd.{32 * e.lanes}", e.vector(I32), [total, *pair])


def word_products(e: Emitter, isa: Isa, x: Value, y: Value, total: Value) -> Value:
    """As `vpdpwssd`, with the instruction that the compiler chooses."""
    b, words = e.builder, e.vector(I16, 2 * e.lanes)
    if isa.lanes in (8, 16) and isa.dot != "generic" and not isa.emulate:
        name = "llvm.x86.avx512.pmaddw.d.512" if isa.lanes == 16 else "llvm.x86.avx2.pmadd.wd"
        return b.add(total, e.call(name, total.type, [b.bitcast(x, words), b.bitcast(y, words)]))
    sixteen = constant(total.type, 16)
    x, y = b.bitcast(x, total.type), b.bitcast(y, total.type)
    high = b.mul(b.ashr(x, sixteen), b.ashr(y, sixteen))
    low = b.mul(b.ashr(b.shl(x, sixteen), sixteen), b.ashr(b.shl(y, sixteen), sixteen))
    return b.add(b.add(total, low), high)


def half_products(e: Emitter, x: Value, y: Value, total: Value) -> Value:
    """`total` in int32 lanes, plus the products of the words in the low halves of `x` and `y`, and in the high halves.
    ARM's compiler makes these two instructions.
    """
    b = e.builder
    for half in (range(e.lanes), range(e.lanes, 2 * e.lanes)):
        factors = (b.sext(pick(e, words, words, list(half)), total.type) for words in (x, y))
        total = b.add(total, b.mul(*factors))
    return total


def nibbles(e: Emitter, codes: Value) -> list[Value]:
    """The low and the high halves of bytes, or of wider numbers below 256."""
    b, kind = e.builder, codes.type
    return [b.and_(codes, constant(kind, 15)), b.lshr(codes, constant(kind, 4))]


def chosen(e: Emitter, numbers: Value, values: tuple[int, ...]) -> Value:
    """The bytes `values`[n] of a vector of bytes n, with comparisons alone."""
    b, kind = e.builder, numbers.type
    found = constant(kind, 0)
    for number, value in enumerate(values):
        found = b.select(b.icmp_unsigned("==", numbers, constant(kind, number)), constant(kind, value), found)
    return found


def look_up(e: Emitter, isa: Isa, numbers: Value, values: tuple[int, ...]) -> Value:
    """The bytes `values`[n] of a vector of bytes n below 16."""
    kind = numbers.type
    names = {16: "aarch64.neon.tbl1.v16i8"} if isa.neon else X86_LOOK_UPS
    if isa.emulate or isa.dot == "generic" or kind.count not in names:
        return chosen(e, numbers, values)
    table = ir.Constant(kind, [*values, *[0] * (16 - len(values))] * (kind.count // 16))
    return e.call("llvm." + names[kind.count], kind, [table, numbers])


class Dot(ABC):
    """`input_bytes` is the stored width of an activation: 1, or 2 in the order 0, 2, 1, 3 (see PmaddWide)."""

    input_bytes = 1
    max_rows = 64  # more would not leave registers for the operands
    inputs = 4  # of an output, side by side in a weight vector: a quad
    rows = 1  # computed together
    flipped = 0  # flips these bits of stored codes and zeros

    def weight_vectors(self, vectors: int) -> int:
        """The weight vectors of a quad, for so many output vectors."""
        return vectors * self.inputs // 4

    def operand(self, e: Emitter, address: Value) -> Value:
        """Load the four bytes at `address` into every lane."""
        return e.splat(e.load(address, I32))

    def spread(self, e: Emitter, sums: Sums) -> Sums:
        """Arrange sums as `block` takes them."""
        return sums

    def gather(self, e: Emitter, spread: Sums) -> Sums:
        """The inverse of `spread`. Rows that only fill the last `rows` may follow."""
        return spread

    @abstractmethod
    def block(self, e: Emitter, quads: Quads, activation: Activations, sums: Sums) -> None:
        """Add to the int32 vectors sums[row][vector], in place."""


class Vpdpbusd(Dot):
    """AVX512-VNNI and AVX-VNNI: one instruction."""

    def block(self, e: Emitter, quads: Quads, activation: Activations, sums: Sums) -> None:
        for quad, weights in enumerate(quads):
            for row, accumulators in enumerate(sums):
                x = activation(row, 4 * quad)
                for j, code in enumerate(weights):
                    accumulators[j] = vpdpbusd(e, accumulators[j], code, x)


@dataclass(frozen=True)
class PmaddNibbles(Dot):
    """AVX2 with small codes. Byte products become pairs in int16, and some quads are summed in int16 before they are
    widened: 8 * 2 * 15 * 127 = 30480 fits, and of codes that are looked up 4 * 2 * MAX_LOOKED_UP * 127 = 32512.
    """

    quads: int = 8

    def block(self, e: Emitter, quads: Quads, activation: Activations, sums: Sums) -> None:
        b, bytes_, words = e.builder, e.vector(I8, 4 * e.lanes), e.vector(I16, 2 * e.lanes)
        partial: list[list[Value | None]] = [[None] * len(row) for row in sums]
        for quad, weights in enumerate(quads):
            if quad and quad % self.quads == 0:
                self._widen(e, partial, sums)
                partial = [[None] * len(row) for row in sums]
            codes = [b.bitcast(weight, bytes_) for weight in weights]
            for row, accumulators in enumerate(partial):
                x = b.bitcast(activation(row, 4 * quad), bytes_)
                for j, code in enumerate(codes):
                    pairs = e.call("llvm.x86.avx2.pmadd.ub.sw", words, [code, x])
                    accumulators[j] = pairs if accumulators[j] is None else e.opaque(b.add(accumulators[j], pairs))
        self._widen(e, partial, sums)

    def _widen(self, e: Emitter, partial: list[list[Value | None]], sums: Sums) -> None:
        b, ones = e.builder, constant(e.vector(I16, 2 * e.lanes), 1)
        for total, accumulators in zip(sums, partial, strict=True):
            for j, pairs in enumerate(accumulators):
                total[j] = b.add(total[j], e.call("llvm.x86.avx2.pmadd.wd", e.vector(I32), [pairs, ones]))


class PmaddWide(Dot):
    """AVX2 with codes up to 255 (bytes would saturate): even and odd bytes as int16, times int16 activations."""

    input_bytes = 2
    max_rows = 4

    def block(self, e: Emitter, quads: Quads, activation: Activations, sums: Sums) -> None:
        b, words = e.builder, e.vector(I16, 2 * e.lanes)
        for quad, weights in enumerate(quads):
            pairs = [b.bitcast(weight, words) for weight in weights]
            even = [b.and_(pair, constant(words, 255)) for pair in pairs]
            odd = [b.lshr(pair, constant(words, 8)) for pair in pairs]
            for half, codes in enumerate((even, odd)):
                for row, accumulators in enumerate(sums):
                    x = b.bitcast(activation(row, 8 * quad + 4 * half), words)
                    for j, code in enumerate(codes):
                        product = e.call("llvm.x86.avx2.pmadd.wd", e.vector(I32), [code, x])
                        accumulators[j] = e.opaque(b.add(accumulators[j], product))


@dataclass(frozen=True)
class Sdot(Dot):
    """ARM's dot product of signed bytes. An activation operand is 16 bytes, of which the instruction takes one lane.
    Codes of 8 bits are stored minus 128, and so are their zeros.
    """

    emulate: bool
    flipped: int = 0

    def operand(self, e: Emitter, address: Value) -> Value:
        return e.load(address, e.vector(I32))

    def block(self, e: Emitter, quads: Quads, activation: Activations, sums: Sums) -> None:
        product = functools.partial(byte_products, signed=True) if self.emulate else sdot
        for quad, weights in enumerate(quads):
            if quad % 4 == 0:
                operands = [e.each_lane(activation(row, 4 * quad)) for row in range(len(sums))]
            for row, accumulators in enumerate(sums):
                for j, code in enumerate(weights):
                    accumulators[j] = product(e, accumulators[j], code, operands[row][quad % 4])


@dataclass(frozen=True)
class Usmmla(Dot):
    """ARM's product of 2x8 by 8x2 matrices, twice the work of a dot product. A weight vector holds eight inputs of one
    output, then of the next. An activation operand is 16 bytes of a row; two rows' halves make a matrix. The lanes of a
    sum are (output 0, row 0), (output 0, row 1), (output 1, row 0), (output 1, row 1). An odd last row is paired with
    itself.
    """

    emulate: bool
    inputs, rows = 8, 2

    def operand(self, e: Emitter, address: Value) -> Value:
        return e.load(address, e.vector(I32))

    def spread(self, e: Emitter, sums: Sums) -> Sums:
        pairs = [(sums[i], sums[min(i + 1, len(sums) - 1)]) for i in range(0, len(sums), 2)]
        orders = ([0, 4, 1, 5], [2, 6, 3, 7])
        return [[pick(e, x, y, order) for x, y in zip(*pair, strict=True)] for pair in pairs for order in orders]

    def gather(self, e: Emitter, spread: Sums) -> Sums:
        return [
            [pick(e, x, y, order) for x, y in zip(spread[i], spread[i + 1], strict=True)]
            for i in range(0, len(spread), 2)
            for order in ([0, 2, 4, 6], [1, 3, 5, 7])
        ]

    def block(self, e: Emitter, quads: Quads, activation: Activations, sums: Sums) -> None:
        product = matrix_products if self.emulate else usmmla
        halves, steps = ([0, 1, 4, 5], [2, 3, 6, 7]), iter(quads)
        for block, two in enumerate(zip(steps, steps, strict=True)):
            rows = [activation(row, 16 * block) for row in range(len(sums))]
            pairs = list(zip(rows[::2], rows[1::2], strict=True))
            matrices = [[pick(e, x, y, half) for x, y in pairs] for half in halves]
            for j, codes in enumerate(zip(*two, strict=True)):  # both at once: packed, they are one vector
                for code, of_half in zip(codes, matrices, strict=True):
                    for x, accumulators in zip(of_half, sums[j % 2 :: 2], strict=True):
                        accumulators[j // 2] = product(e, accumulators[j // 2], code, x)


class Generic(Dot):
    """Plain widening multiplications, on any machine."""

    def block(self, e: Emitter, quads: Quads, activation: Activations, sums: Sums) -> None:
        b, kind = e.builder, e.vector(I32)
        for quad, weights in enumerate(quads):
            codes = [[b.and_(b.lshr(w, constant(kind, 8 * i)), constant(kind, 255)) for i in range(4)] for w in weights]
            for row, accumulators in enumerate(sums):
                x = activation(row, 4 * quad)
                bytes_ = [b.ashr(b.shl(x, constant(kind, 24 - 8 * i)), constant(kind, 24)) for i in range(4)]
                for j, code in enumerate(codes):
                    for i in range(4):
                        accumulators[j] = b.add(accumulators[j], b.mul(code[i], bytes_[i]))


@functools.cache
def dot_for(isa: Isa, bits: int) -> Dot:
    if isa.dot == "usmmla":
        return Usmmla(isa.emulate)
    if isa.dot == "sdot":
        return Sdot(isa.emulate, 128 if bits == 8 else 0)
    if isa.emulate or isa.dot == "generic":
        return Generic()
    if isa.dot == "vpdpbusd":
        return Vpdpbusd()
    return PmaddNibbles() if bits == 4 else PmaddWide()


@functools.cache
def dot_up_to(isa: Isa, largest: int) -> Dot:
    """The product of codes up to `largest` in quads of four inputs, at every level."""
    if isa.dot in ("usmmla", "sdot"):
        return Sdot(isa.emulate, 128 if largest > 127 else 0)
    if isa.emulate or isa.dot == "generic":
        return Generic()
    if isa.dot == "vpdpbusd":
        return Vpdpbusd()
    quads = 32767 // (2 * 127 * largest)
    return PmaddNibbles(quads) if quads > 1 else PmaddWide()


def nibble_products(isa: Isa) -> Callable[[Emitter, Value, Value, Value], Value]:
    """`vpdpbusd` of codes below 16, as this level computes it."""
    native = {"vpdpbusd": vpdpbusd, "sdot": sdot, "usmmla": sdot}
    return byte_products if isa.emulate else native.get(isa.dot, byte_products)


def halves_of(isa: Isa, values: tuple[int, ...]) -> Halves:
    """`nibbles`, or the codes `values` that they number."""

    def look_up_both(e: Emitter, packed: Value) -> list[Value]:
        return [look_up(e, isa, numbers, values) for numbers in nibbles(e, packed)]

    return look_up_both if values else nibbles


def load_quads(
    e: Emitter, dot: Dot, address: Value, outputs: int, width: int, block: int, halves: Halves | None
) -> Iterable[list[Value]]:
    """The weight quads of a block of inputs for `outputs` vectors of outputs, of `width` in a panel, as int32 lanes.

    Unpacked, without `halves`: quad by quad, some vectors of bytes each. Packed: each vector holds a quad in its low
    nibbles and the next quad in its high nibbles.
    """
    b, kind = e.builder, e.vector(I32)
    size, (vectors, row) = 4 * e.lanes, map(dot.weight_vectors, (outputs, width))
    for quad in range(block // dot.inputs):
        if halves is None:
            yield [e.load(e.offset(address, (quad * row + j) * size), kind) for j in range(vectors)]
            continue
        if quad % 2 == 0:
            places = [e.offset(address, (quad // 2 * row + j) * size) for j in range(vectors)]
            pairs = [halves(e, e.load(place, e.vector(I8, size))) for place in places]
        yield [b.bitcast(pair[quad % 2], kind) for pair in pairs]
