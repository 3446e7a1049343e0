"""Vector operations over an LLVM IR builder. Addresses are 64-bit integers. Loads and stores assume no alignment."""

from __future__ import annotations

import math
import struct
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from llvmlite import ir

I8, I16, I32, I64 = (ir.IntType(bits) for bits in (8, 16, 32, 64))
F16, F32 = ir.HalfType(), ir.FloatType()
EXP2 = 0.69314697760, 0.24022242083, 0.05550733745, 0.00967151281, 0.00132647272  # from r^1 on; the error is 9e-8
Value = Any  # an llvmlite value; the package has no types


def like(value: Value, element: ir.Type) -> ir.Type:
    """`element`, or a vector of it as wide as `value` if `value` is a vector."""
    return ir.VectorType(element, value.type.count) if isinstance(value.type, ir.VectorType) else element


def constant(kind: ir.Type, number: float) -> ir.Constant:
    """`number` in every lane; a float is rounded to float32."""
    element = kind.element if isinstance(kind, ir.VectorType) else kind
    if element == F32:
        (number,) = struct.unpack("f", struct.pack("f", number))
    return ir.Constant(kind, [number] * kind.count if isinstance(kind, ir.VectorType) else number)


def _never_unrolled(module: ir.Module) -> ir.MDValue:
    """A new identity for a loop: a node that names itself first, then the loop's properties."""
    disabled = module.add_metadata(["llvm.loop.unroll.disable"])
    loop = ir.MDValue(module, [disabled], name=str(len(module.metadata)))
    loop.operands = (loop, disabled)
    return loop


class Emitter:
    """Wraps the builder at a position. `lanes` is the width of `splat` and `vector`."""

    def __init__(self, builder: ir.IRBuilder, lanes: int = 1) -> None:
        self.builder = builder
        self.lanes = lanes

    def vector(self, element: ir.Type, lanes: int | None = None) -> ir.VectorType:
        return ir.VectorType(element, lanes or self.lanes)

    def load(self, address: Value, kind: ir.Type) -> Value:
        value = self.builder.load(self.builder.inttoptr(address, kind.as_pointer()), typ=kind)
        value.align = 1
        return value

    def store(self, value: Value, address: Value) -> None:
        self.builder.store(value, self.builder.inttoptr(address, value.type.as_pointer())).align = 1

    def splat(self, scalar: Value) -> Value:
        b, kind = self.builder, self.vector(scalar.type)
        first = b.insert_element(ir.Constant(kind, ir.Undefined), scalar, I32(0))
        return b.shuffle_vector(first, first, ir.Constant(self.vector(I32), [0] * self.lanes))

    def scalar(self, address: Value, index: int, count: int) -> Value:
        """Number `index` of `count` float32 at `address`, in all lanes. ARM takes one lane of a vector as operand, so
        that as many as there are lanes are loaded at once.
        """
        if count == self.lanes:
            return self.each_lane(self.load(address, self.vector(F32)))[index]
        return self.splat(self.load(self.offset(address, 4 * index), F32))

    def each_lane(self, vector: Value) -> list[Value]:
        """For each lane of `vector`, that lane in all lanes."""
        orders = ([i] * self.lanes for i in range(self.lanes))
        return [self.builder.shuffle_vector(vector, vector, ir.Constant(self.vector(I32), order)) for order in orders]

    def offset(self, address: Value, *terms: Value | int) -> Value:
        """address + the sum of `terms`, each a value or a number of bytes."""
        for term in terms:
            address = self.builder.add(address, I64(term) if isinstance(term, int) else term)
        return address

    def times(self, value: Value, factor: Value | int) -> Value:
        return self.builder.mul(value, I64(factor) if isinstance(factor, int) else factor)

    def call(self, name: str, result: ir.Type, arguments: list[Value]) -> Value:
        """Call an LLVM intrinsic or a function of this module by name."""
        module = self.builder.module
        function = module.globals.get(name)
        if function is None:
            function = ir.Function(module, ir.FunctionType(result, [a.type for a in arguments]), name)
        return self.builder.call(function, arguments)

    def fma(self, a: Value, b: Value, c: Value) -> Value:
        """a * b + c, with one rounding if the processor can do so."""
        kind = f"v{a.type.count}f32" if isinstance(a.type, ir.VectorType) else "f32"
        return self.call(f"llvm.fmuladd.{kind}", a.type, [a, b, c])

    def fold(self, vector: Value, operation: Callable[[Value, Value], Value]) -> Value:
        """Combine a vector's lanes into a scalar, halves onto halves."""
        b = self.builder
        while vector.type.count > 1:
            lanes = list(range(vector.type.count))
            half = len(lanes) // 2
            low, high = (
                b.shuffle_vector(vector, vector, ir.Constant(self.vector(I32, half), part))
                for part in (lanes[:half], lanes[half:])
            )
            vector = operation(low, high)
        return b.extract_element(vector, I32(0))

    def larger(self, x: Value, y: Value) -> Value:
        return self.builder.select(self.builder.fcmp_ordered(">", x, y), x, y)

    def opaque(self, value: Value) -> Value:
        """The same vector, but of unknown origin to the optimizer."""
        kind, register = ir.FunctionType(value.type, [value.type]), "w" if self._arm() else "x"
        return self.builder.call(ir.InlineAsm(kind, "", f"={register},0"), [value])

    def _arm(self) -> bool:
        return str(self.builder.module.triple).startswith("aarch64")

    def prefetch(self, address: Value, *, level: int = 2) -> None:
        """Prefetch the cache line of `address` for reading, into the cache of this level."""
        place = self.builder.inttoptr(address, I8.as_pointer())
        self.call("llvm.prefetch.p0", ir.VoidType(), [place, I32(0), I32(4 - level), I32(1)])

    def fence(self) -> None:
        """The compiler moves no load, store or prefetch across this point."""
        kind = ir.FunctionType(ir.VoidType(), [])
        self.builder.call(ir.InlineAsm(kind, "", "~{memory}", side_effect=True), [])

    def pause(self) -> None:
        """Tell the processor that this loop waits. ARM's `yield` does nothing on most processors; a barrier waits."""
        if self._arm():
            self.call("llvm.aarch64.isb", ir.VoidType(), [I32(15)])
        elif str(self.builder.module.triple).startswith("x86"):
            self.call("llvm.x86.sse2.pause", ir.VoidType(), [])

    @contextmanager
    def loop(self, count: Value, *, unroll: bool = True) -> Iterator[Value]:
        """Emit the body of `for index in range(count)`. Without `unroll` the compiler does not repeat the body: a body
        that needs all registers leaves none for a copy's loads.
        """
        b = self.builder
        entry, head = b.block, b.append_basic_block("head")
        body, end = b.append_basic_block("body"), b.append_basic_block("end")
        b.branch(head)
        b.position_at_end(head)
        index = b.phi(I64)
        index.add_incoming(I64(0), entry)
        b.cbranch(b.icmp_signed("<", index, count), body, end)
        b.position_at_end(body)
        yield index
        index.add_incoming(b.add(index, I64(1)), b.block)
        back = b.branch(head)
        if not unroll:
            back.set_metadata("llvm.loop", _never_unrolled(b.module))
        b.position_at_end(end)

    def steps(self, count: Value, sizes: list[int], *, unroll: bool = True) -> Iterator[tuple[Value, int]]:
        """Emit a loop for each size, over what is left of `count` in steps of this size. Sizes descend to 1, and each
        is a multiple of the next. Yields (index, size) for each loop. The short loops after the first are not unrolled.
        """
        b, done = self.builder, I64(0)
        for size in sizes:
            whole = b.sdiv(b.sub(count, done), I64(size))
            with self.loop(whole, unroll=unroll and size == sizes[0]) as step:
                yield b.add(done, b.mul(step, I64(size), flags=["nsw"]), flags=["nsw"]), size
            done = self.offset(done, self.times(whole, size))

    def variables(self, rows: int, columns: int, kind: ir.Type) -> list[list[Value]]:
        """Local variables; the optimizer keeps them in registers."""
        return [[self.builder.alloca(kind) for _ in range(columns)] for _ in range(rows)]

    # Elementwise functions of a scalar or a vector. They use plain arithmetic, so that loops over them vectorize.

    def _clamp(self, x: Value, low: float, high: float) -> Value:
        b = self.builder
        low, high = constant(x.type, low), constant(x.type, high)
        x = b.select(b.fcmp_ordered("<", x, low), low, x)
        return b.select(b.fcmp_ordered(">", x, high), high, x)

    def rint(self, x: Value) -> Value:
        """Nearest integer, halves to even, of |x| < 2^22: adding 1.5 * 2^23 leaves no fraction bits."""
        magic = constant(x.type, 1.5 * 2.0**23)
        return self.builder.fsub(self.builder.fadd(x, magic), magic)

    def rounded_bits(self, x: Value) -> Value:
        """Nearest integer, halves to even, of |x| < 2^15, in the low 16 bits of 32: `rint` without its subtraction."""
        return self.builder.bitcast(self.builder.fadd(x, constant(x.type, 1.5 * 2.0**23)), like(x, I32))

    def exp(self, x: Value) -> Value:
        """e^x within 2 ulp; exactly 1 at 0; exactly 0 below -87; the largest finite value above 88.

        2^n * p(r) with r = x - n ln 2, |r| <= ln 2 / 2, and p the Taylor polynomial of degree 7.
        """
        b, kind = self.builder, x.type
        limited = self._clamp(x, -87.0, 88.0)
        n = self.rint(b.fmul(limited, constant(kind, 1 / math.log(2))))
        r = self.fma(n, constant(kind, -0.693359375), limited)  # ln 2 in two parts: n times the first is exact
        r = self.fma(n, constant(kind, 0.693359375 - math.log(2)), r)
        p = constant(kind, 1 / math.factorial(7))
        for degree in range(6, -1, -1):
            p = self.fma(p, r, constant(kind, 1 / math.factorial(degree)))
        integers = like(x, I32)
        exponent = b.shl(b.add(b.fptosi(n, integers), constant(integers, 127)), constant(integers, 23))
        result = b.fmul(p, b.bitcast(exponent, kind))
        return b.select(b.fcmp_ordered("<", x, constant(kind, -87.0)), constant(kind, 0), result)

    def exp2_below(self, x: Value) -> Value:
        """2^x of x <= 1 within 3 ulp; exactly 1 at 0, exactly 0 below -127, and next to 0 where float32 is subnormal.

        2^n * p(r) with r = x - n, |r| <= 1 / 2, and p the best polynomial of degree 5 with p(0) = 1. n comes from the
        low bits of a sum (see `rounded_bits`) and is added to the exponent of p. At -127 this leaves no bits of 1.
        """
        b, kind = self.builder, x.type
        limited = self.larger(constant(kind, -127.0), x)  # a NaN stays NaN
        shifted = b.fadd(limited, constant(kind, 1.5 * 2.0**23))
        r = b.fsub(limited, b.fsub(shifted, constant(kind, 1.5 * 2.0**23)))
        p = constant(kind, EXP2[-1])
        for factor in (*EXP2[-2::-1], 1.0):
            p = self.fma(p, r, constant(kind, factor))
        integers = like(x, I32)
        exponent = b.shl(b.bitcast(shifted, integers), constant(integers, 23))
        return b.bitcast(b.add(b.bitcast(p, integers), exponent), kind)

    def tanh(self, x: Value) -> Value:
        """Within 4 ulp: t / (t + 2) with t = e^|2x| - 1 = 2^n (e^r - 1) + 2^n - 1, r and n as in `exp`."""
        b, kind, integers = self.builder, x.type, like(x, I32)
        bits = b.bitcast(x, integers)
        y = b.bitcast(b.and_(bits, constant(integers, 0x7FFFFFFF)), kind)
        y = b.fadd(y, y)
        y = b.select(b.fcmp_ordered(">", y, constant(kind, 30)), constant(kind, 30), y)  # a NaN stays NaN
        shifted = self.fma(y, constant(kind, 1 / math.log(2)), constant(kind, 1.5 * 2.0**23))
        n = b.fsub(shifted, constant(kind, 1.5 * 2.0**23))
        r = self.fma(n, constant(kind, -0.693359375), y)
        r = self.fma(n, constant(kind, 0.693359375 - math.log(2)), r)
        p = constant(kind, 1 / math.factorial(8))
        for degree in range(7, 0, -1):
            p = self.fma(p, r, constant(kind, 1 / math.factorial(degree)))
        exponent = b.add(b.shl(b.bitcast(shifted, integers), constant(integers, 23)), constant(integers, 127 << 23))
        power = b.bitcast(exponent, kind)
        t = self.fma(b.fmul(power, r), p, b.fsub(power, constant(kind, 1)))
        result = b.bitcast(b.fdiv(t, b.fadd(t, constant(kind, 2))), integers)
        return b.bitcast(b.or_(result, b.and_(bits, constant(integers, 0x80000000))), kind)

    def half_to_float(self, bits: Value) -> Value:
        """Finite float16 bits in a 32-bit integer -> float32: shift the fields, rebias by 2^112."""
        b, kind = self.builder, bits.type
        magnitude = b.shl(b.and_(bits, constant(kind, 0x7FFF)), constant(kind, 13))
        sign = b.shl(b.and_(bits, constant(kind, 0x8000)), constant(kind, 16))
        scaled = b.fmul(b.bitcast(magnitude, like(bits, F32)), constant(like(bits, F32), 2.0**112))
        return b.bitcast(b.or_(b.bitcast(scaled, kind), sign), like(bits, F32))

    def float_to_half(self, x: Value) -> Value:
        """float32 -> float16 bits in a 32-bit integer, halves to even. Beyond the range the result is infinity."""
        b, kind = self.builder, like(x, I32)
        bits = b.bitcast(x, kind)
        magnitude = b.and_(bits, constant(kind, 0x7FFFFFFF))
        odd = b.and_(b.lshr(magnitude, constant(kind, 13)), constant(kind, 1))
        rebased = b.add(b.add(magnitude, constant(kind, ((15 - 127) << 23) + 0xFFF)), odd)
        normal = b.lshr(rebased, constant(kind, 13))
        half = constant(x.type, 0.5)  # its last bit weighs as much as a subnormal float16's
        small = b.bitcast(b.fadd(b.bitcast(magnitude, x.type), half), kind)
        small = b.sub(small, constant(kind, 126 << 23))
        result = b.select(b.icmp_unsigned("<", magnitude, constant(kind, 113 << 23)), small, normal)
        infinite = b.icmp_unsigned(">=", magnitude, constant(kind, 143 << 23))
        result = b.select(infinite, constant(kind, 0x7C00), result)
        return b.or_(result, b.lshr(b.and_(bits, constant(kind, 0x80000000)), constant(kind, 16)))

    def e4m3_to_float(self, bits: Value) -> Value:
        """float8 e4m3 bits (finite) in a 32-bit integer -> float32: shift the fields, rebias by 2^120."""
        b, kind = self.builder, bits.type
        magnitude = b.shl(b.and_(bits, constant(kind, 0x7F)), constant(kind, 20))
        sign = b.shl(b.and_(bits, constant(kind, 0x80)), constant(kind, 24))
        scaled = b.fmul(b.bitcast(magnitude, like(bits, F32)), constant(like(bits, F32), 2.0**120))
        return b.bitcast(b.or_(b.bitcast(scaled, kind), sign), like(bits, F32))

    def float_to_e4m3(self, x: Value) -> Value:
        """float32 within +-448 -> float8 e4m3 bits in a 32-bit integer, halves to even."""
        b, kind = self.builder, like(x, I32)
        bits = b.bitcast(x, kind)
        magnitude = b.and_(bits, constant(kind, 0x7FFFFFFF))
        odd = b.and_(b.lshr(magnitude, constant(kind, 20)), constant(kind, 1))
        rebased = b.add(b.add(magnitude, constant(kind, ((7 - 127) << 23) + 0x7FFFF)), odd)
        normal = b.lshr(rebased, constant(kind, 20))
        big = constant(x.type, 2.0**14)  # its last bit weighs as much as a subnormal's
        small = b.sub(b.bitcast(b.fadd(b.bitcast(magnitude, x.type), big), kind), constant(kind, (127 + 14) << 23))
        result = b.select(b.icmp_unsigned("<", magnitude, constant(kind, (127 - 6) << 23)), small, normal)
        return b.or_(result, b.lshr(b.and_(bits, constant(kind, 0x80000000)), constant(kind, 24)))

    def order(self, x: Value) -> Value:
        """float32 -> int32 of the same order, so that loops for a maximum vectorize. Negative ones count backwards."""
        b, kind = self.builder, like(x, I32)
        bits = b.bitcast(x, kind)
        return b.xor(bits, b.and_(b.ashr(bits, constant(kind, 31)), constant(kind, 0x7FFFFFFF)))

    def unorder(self, rank: Value) -> Value:
        """The inverse of `order`."""
        b = self.builder
        flip = b.and_(b.ashr(rank, constant(rank.type, 31)), constant(rank.type, 0x7FFFFFFF))
        return b.bitcast(b.xor(rank, flip), like(rank, F32))

    def float8_to_float(self, bits: Value) -> Value:
        """float8 e4m3 bits in a 32-bit integer, not NaN, -> float32: as `half_to_float`, but rebias by 2^120."""
        b, kind = self.builder, bits.type
        magnitude = b.shl(b.and_(bits, constant(kind, 0x7F)), constant(kind, 20))
        sign = b.shl(b.and_(bits, constant(kind, 0x80)), constant(kind, 24))
        scaled = b.fmul(b.bitcast(magnitude, like(bits, F32)), constant(like(bits, F32), 2.0**120))
        return b.bitcast(b.or_(b.bitcast(scaled, kind), sign), like(bits, F32))

    def bfloat_to_float(self, bits: Value) -> Value:
        return self.builder.bitcast(self.builder.shl(bits, constant(bits.type, 16)), like(bits, F32))

    def float_to_bfloat(self, x: Value) -> Value:
        """float32 -> bfloat16 bits in a 32-bit integer, halves to even. A NaN stays NaN."""
        b, kind = self.builder, like(x, I32)
        bits = b.bitcast(x, kind)
        odd = b.and_(b.lshr(bits, constant(kind, 16)), constant(kind, 1))
        rounded = b.lshr(b.add(b.add(bits, constant(kind, 0x7FFF)), odd), constant(kind, 16))
        return b.select(b.fcmp_unordered("uno", x, x), constant(kind, 0x7FC0), rounded)

    def bfloat_pair(self, bits: Value) -> list[Value]:
        """The two bfloat16 in each 32-bit integer, the low one first, as float32."""
        b, kind = self.builder, like(bits, F32)
        high = b.and_(bits, constant(bits.type, 0xFFFF0000))
        return [self.bfloat_to_float(bits), b.bitcast(high, kind)]
