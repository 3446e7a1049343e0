"""Dot products of unsigned weight codes with signed activations, 32 inputs at a time, for each instruction set.

Lane o of a weight vector holds four consecutive inputs of output o, one byte each. An activation operand has the same
four inputs of one token in every lane. Integer sums are exact, so every variant gives the same bits.
"""

from __future__ import annotations

import functools
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable

import llvmlite.binding as llvm

from lmkit.kernels.cpu.emit import I8, I16, I32, Emitter, Value, constant
from lmkit.kernels.cpu.isa import Isa

BLOCK = 32  # inputs
Quads = Iterable[list[Value]]  # for each four inputs of a block, a weight vector per output vector
Activations = Callable[[int, int], Value]  # (row, byte offset in the block) -> four bytes in every lane, as int32 lanes


def vpdpbusd(e: Emitter, total: Value, codes: Value, x: Value) -> Value:
    """`total` in int32 lanes, plus four products per lane of the bytes of `codes` and the signed bytes of `x`."""
    # The operands' type in IR was int32 lanes before LLVM 22.
    operand = e.vector(I8, 4 * e.lanes) if llvm.llvm_version_info[0] >= 22 else e.vector(I32)
    pair = [e.builder.bitcast(codes, operand), e.builder.bitcast(x, operand)]
    return e.call(f"llvm.x86.avx512.vpdpbusd.{32 * e.lanes}", e.vector(I32), [total, *pair])


def byte_products(e: Emitter, total: Value, codes: Value, x: Value) -> Value:
    """As `vpdpbusd`, with plain multiplications."""
    b, kind = e.builder, e.vector(I32)
    codes, x = b.bitcast(codes, kind), b.bitcast(x, kind)
    for i in range(4):
        code = b.and_(b.lshr(codes, constant(kind, 8 * i)), constant(kind, 255))
        byte = b.ashr(b.shl(x, constant(kind, 24 - 8 * i)), constant(kind, 24))
        total = b.add(total, b.mul(code, byte))
    return total


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


class Dot(ABC):
    """`input_bytes` is the stored width of an activation: 1, or 2 in the order 0, 2, 1, 3 (see PmaddWide)."""

    input_bytes = 1
    max_rows = 64  # more would not leave registers for the operands

    @abstractmethod
    def block(self, e: Emitter, quads: Quads, activation: Activations, sums: list[list[Value]]) -> None:
        """Add to the int32 vectors sums[row][vector], in place."""


class Vpdpbusd(Dot):
    """AVX512-VNNI and AVX-VNNI: one instruction."""

    def block(self, e: Emitter, quads: Quads, activation: Activations, sums: list[list[Value]]) -> None:
        for quad, weights in enumerate(quads):
            for row, accumulators in enumerate(sums):
                x = activation(row, 4 * quad)
                for j, code in enumerate(weights):
                    accumulators[j] = vpdpbusd(e, accumulators[j], code, x)


class PmaddNibbles(Dot):
    """AVX2 with codes below 16. Byte products become pairs in int16, and a whole block is summed in int16 before it is
    widened: 8 * 2 * 15 * 127 = 30480 fits.
    """

    def block(self, e: Emitter, quads: Quads, activation: Activations, sums: list[list[Value]]) -> None:
        b, bytes_, words = e.builder, e.vector(I8, 4 * e.lanes), e.vector(I16, 2 * e.lanes)
        partial: list[list[Value | None]] = [[None] * len(row) for row in sums]
        for quad, weights in enumerate(quads):
            codes = [b.bitcast(weight, bytes_) for weight in weights]
            for row, accumulators in enumerate(partial):
                x = b.bitcast(activation(row, 4 * quad), bytes_)
                for j, code in enumerate(codes):
                    pairs = e.call("llvm.x86.avx2.pmadd.ub.sw", words, [code, x])
                    accumulators[j] = pairs if accumulators[j] is None else e.opaque(b.add(accumulators[j], pairs))
        ones = constant(words, 1)
        for total, accumulators in zip(sums, partial, strict=True):
            for j, pairs in enumerate(accumulators):
                total[j] = b.add(total[j], e.call("llvm.x86.avx2.pmadd.wd", e.vector(I32), [pairs, ones]))


class PmaddWide(Dot):
    """AVX2 with codes up to 255 (bytes would saturate): even and odd bytes as int16, times int16 activations."""

    input_bytes = 2
    max_rows = 4

    def block(self, e: Emitter, quads: Quads, activation: Activations, sums: list[list[Value]]) -> None:
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


class Generic(Dot):
    """Plain widening multiplications, on any machine."""

    def block(self, e: Emitter, quads: Quads, activation: Activations, sums: list[list[Value]]) -> None:
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
    if isa.emulate or isa.dot == "generic":
        return Generic()
    if isa.dot == "vpdpbusd":
        return Vpdpbusd()
    return PmaddNibbles() if bits == 4 else PmaddWide()


def load_quads(e: Emitter, address: Value, vectors: int, packed: bool) -> Iterable[list[Value]]:
    """The eight weight quads of a block, as int32 lanes.

    Unpacked: quad by quad, `vectors` vectors of bytes each. Packed: each vector holds a quad in its low nibbles and the
    next quad in its high nibbles.
    """
    b, kind = e.builder, e.vector(I32)
    size = 4 * e.lanes
    for quad in range(BLOCK // 4):
        if not packed:
            yield [e.load(e.offset(address, (quad * vectors + j) * size), kind) for j in range(vectors)]
        elif quad % 2 == 0:
            both = [e.load(e.offset(address, (quad // 2 * vectors + j) * size), kind) for j in range(vectors)]
            yield [b.and_(w, constant(kind, 0x0F0F0F0F)) for w in both]
        else:
            yield [b.and_(b.lshr(w, constant(kind, 4)), constant(kind, 0x0F0F0F0F)) for w in both]
