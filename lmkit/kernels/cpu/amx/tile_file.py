"""The eight tile registers: native, or emulated bit for bit in plain IR.

A tile has up to 16 rows of up to 64 bytes. A dot is c += a b on 32-bit lanes:

    a   rows are tokens           [rows, K]         int8, or bfloat16 pairs
    b   columns are outputs       [K / 4, 16, 4]    bytes: four inputs of one output side by side; bfloat16: two
    c   sums                      [rows, 16]        int32, float32

The configuration holds the shape of each tile. Configuring zeroes the tiles; rows and bytes beyond a tile's shape are
0. A thread that has a configuration also has 8 KB of state at each context switch, and other code (oneDNN) configures
for itself. So every task configures first and releases last, on every path.

A micro-kernel on tiles takes `slots`, the address of SLOTS bytes of the task's scratch, as its first argument. There
the emulation keeps the tiles, 1 KB each. After them lies the configuration, which the native code reads there, too.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from llvmlite import ir

from lmkit.kernels.cpu.emit import F32, I8, I16, I32, I64, Emitter, Value, constant
from lmkit.kernels.cpu.isa import Isa
from lmkit.kernels.cpu.tiles import Tile, register

ROWS, ROW_BYTES, TILE = 16, 64, 1024
CONFIGURATION = 64  # bytes of one: palette | ... | bytes in a row, 16 bits each, from 16 on | rows, from 48 on
SLOTS = 8 * TILE + CONFIGURATION
_LANES = 16
_VOID = ir.VoidType()
Shape = tuple[Value | int, Value | int]  # rows, bytes in a row


def write_configuration(e: Emitter, address: Value, shapes: Sequence[Shape]) -> None:
    """Write the configuration of the tiles 0 .. len(shapes) - 1 to `address`, for `TileFile.configure`."""
    e.store(ir.Constant(e.vector(I8, CONFIGURATION), [1] + [0] * (CONFIGURATION - 1)), address)
    for n, shape in enumerate(shapes):
        rows, row_bytes = (I64(x) if isinstance(x, int) else x for x in shape)
        e.store(e.builder.trunc(row_bytes, I16), e.offset(address, 16 + 2 * n))
        e.store(e.builder.trunc(rows, I8), e.offset(address, 48 + n))


class TileFile:
    """Emits operations on tiles, which are numbered 0 to 7."""

    def __init__(self, e: Emitter, isa: Isa, slots: Value) -> None:
        self.e, self.slots, self.native = e, slots, not isa.emulate

    def configure(self, address: Value) -> None:
        """Take the configuration at `address`, and zero all tiles."""
        self._emit("ldtilecfg", _configure, place=(address,))

    def release(self) -> None:
        """Drop the configuration."""
        self._emit("tilerelease", _release)

    def zero(self, n: int) -> None:
        self._emit("tilezero", _zero, n)

    def load(self, n: int, address: Value, stride: Value | int) -> None:
        """Load a tile from rows `stride` bytes apart."""
        self._emit("tileloadd64", _load, n, place=(address, stride))

    def store(self, n: int, address: Value, stride: Value | int) -> None:
        self._emit("tilestored64", _store, n, place=(address, stride))

    def dot_int8(self, c: int, a: int, b: int, *, unsigned: bool = False) -> None:
        """c += a b with signed bytes in a, and signed or `unsigned` bytes in b. The sums wrap around."""
        self._emit(*(("tdpbsud", _dot_unsigned) if unsigned else ("tdpbssd", _dot_signed)), *_different(c, a, b))

    def dot_bf16(self, c: int, a: int, b: int) -> None:
        """c += a b with pairs of bfloat16. Even inputs are summed by one chain of FMAs from 0, odd inputs by another;
        then come even + odd, and c + that. Subnormal inputs and results count as 0."""
        self._emit("tdpbf16ps", _dot_bf16, *_different(c, a, b))

    def _emit(
        self, name: str, emulated: Callable[..., None], *numbers: int, place: tuple[Value | int, ...] = ()
    ) -> None:
        e, b = self.e, self.e.builder
        place = tuple(I64(x) if isinstance(x, int) else x for x in place)
        if self.native:
            at = [b.inttoptr(place[0], I8.as_pointer()), *place[1:]] if place else []
            e.call(f"llvm.x86.{name}", _VOID, [*map(I8, numbers), *at])
            return
        arguments, full = [self.slots, *map(I64, numbers), *place], f"lmkit.emulated.{name}"
        function = b.module.globals.get(full)
        if function is None:  # of the module: inlined, operations would be most of a micro-kernel
            function = ir.Function(b.module, ir.FunctionType(_VOID, [I64] * len(arguments)), full)
            function.linkage = "internal"
            function.attributes.add("noinline")
            builder = ir.IRBuilder(function.append_basic_block("entry"))
            emulated(Emitter(builder, _LANES), *function.args)
            builder.ret_void()
        b.call(function, arguments)


def configure_tile(isa: Isa, step: int) -> Tile:
    """Configure the tiles for `count` rows of a left operand with `step` bytes each: 0 to 3 are sums, 4 and 5 left
    operands, 6 and 7 right ones."""

    def body(e: Emitter, rows: int, arguments: list[Value]) -> None:
        slots, count = arguments
        place = e.offset(slots, 8 * TILE)
        write_configuration(e, place, [(count, ROW_BYTES)] * 4 + [(count, step)] * 2 + [(step // 4, ROW_BYTES)] * 2)
        TileFile(e, isa, slots).configure(place)

    return register(f"amx_configure_tile.{isa.name}.{step}", _LANES, (1,), 2, body)


def release_tile(isa: Isa) -> Tile:
    def body(e: Emitter, rows: int, arguments: list[Value]) -> None:
        TileFile(e, isa, *arguments).release()

    return register(f"amx_release_tile.{isa.name}", _LANES, (1,), 1, body)


def _different(c: int, a: int, b: int) -> tuple[int, int, int]:
    if len({c, a, b}) < 3:
        raise ValueError(f"tiles {c}, {a}, {b} of a dot: the processor refuses equal ones")
    return c, a, b


# The emulation. What the processor refuses at run time ends the process with the same signal, SIGILL.


def _demand(e: Emitter, condition: Value) -> None:
    with e.builder.if_then(e.builder.not_(condition), likely=False):
        e.call("llvm.trap", _VOID, [])


def _tile(e: Emitter, slots: Value, n: Value) -> Value:
    return e.offset(slots, e.times(n, TILE))


def _shape(e: Emitter, slots: Value, n: Value) -> tuple[Value, Value]:
    """(rows, bytes in a row) of a tile, which must be configured."""
    b, configuration = e.builder, e.offset(slots, 8 * TILE)
    row_bytes = b.zext(e.load(e.offset(configuration, 16, e.times(n, 2)), I16), I64)
    rows = b.zext(e.load(e.offset(configuration, 48, n), I8), I64)
    for count, most in ((rows, ROWS), (row_bytes, ROW_BYTES)):
        _demand(e, b.icmp_unsigned("<", b.sub(count, I64(1)), I64(most)))
    return rows, row_bytes


def _copy(e: Emitter, target: Value, source: Value, count: Value) -> None:
    target, source = (e.builder.inttoptr(x, I8.as_pointer()) for x in (target, source))
    e.call("llvm.memcpy.p0.p0.i64", _VOID, [target, source, count, ir.Constant(ir.IntType(1), 0)])


def _configure(e: Emitter, slots: Value, address: Value) -> None:
    kind = e.vector(I8, CONFIGURATION)
    _demand(e, e.builder.icmp_unsigned("==", e.load(address, I8), I8(1)))  # the palette
    e.store(e.load(address, kind), e.offset(slots, 8 * TILE))
    with e.loop(I64(8)) as n:
        _clear(e, slots, n)


def _release(e: Emitter, slots: Value) -> None:
    e.store(constant(e.vector(I8, CONFIGURATION), 0), e.offset(slots, 8 * TILE))


def _clear(e: Emitter, slots: Value, n: Value) -> None:
    with e.loop(I64(ROWS)) as row:
        e.store(constant(e.vector(I32), 0), e.offset(_tile(e, slots, n), e.times(row, ROW_BYTES)))


def _zero(e: Emitter, slots: Value, n: Value) -> None:
    _shape(e, slots, n)
    _clear(e, slots, n)


def _load(e: Emitter, slots: Value, n: Value, address: Value, stride: Value) -> None:
    rows, row_bytes = _shape(e, slots, n)
    _clear(e, slots, n)
    with e.loop(rows) as row:
        target = e.offset(_tile(e, slots, n), e.times(row, ROW_BYTES))
        _copy(e, target, e.offset(address, e.times(stride, row)), row_bytes)


def _store(e: Emitter, slots: Value, n: Value, address: Value, stride: Value) -> None:
    rows, row_bytes = _shape(e, slots, n)
    with e.loop(rows) as row:
        source = e.offset(_tile(e, slots, n), e.times(row, ROW_BYTES))
        _copy(e, e.offset(address, e.times(stride, row)), source, row_bytes)


def _dot(
    e: Emitter, operands: tuple[Value, Value, Value, Value], kind: ir.Type, sums: int,
    step: Callable[[list[Value], Value, Value], list[Value]], finish: Callable[[Value, list[Value]], Value],
) -> None:  # fmt: skip
    """For each row, `step` adds the products of a word of a and a row of b to as many `sums`, which start at 0.
    `finish` adds them to the row of c."""
    b, (slots, to, left, right) = e.builder, operands
    (rows, row_bytes), of_left, of_right = (_shape(e, slots, n) for n in (to, left, right))
    depth = b.udiv(of_left[1], I64(4))
    agree = ((rows, of_left[0]), (row_bytes, of_right[1]), (depth, of_right[0]))
    for x, y in (*agree, (e.times(depth, 4), of_left[1])):
        _demand(e, b.icmp_unsigned("==", x, y))
    (variables,) = e.variables(1, sums, kind)
    with e.loop(rows) as row:
        for variable in variables:
            b.store(constant(kind, 0), variable)
        with e.loop(depth) as k:
            word = e.load(e.offset(_tile(e, slots, left), e.times(row, ROW_BYTES), e.times(k, 4)), I32)
            line = e.load(e.offset(_tile(e, slots, right), e.times(k, ROW_BYTES)), e.vector(I32))
            values = step([b.load(variable) for variable in variables], e.splat(word), line)
            for variable, value in zip(variables, values, strict=True):
                b.store(value, variable)
        place = e.offset(_tile(e, slots, to), e.times(row, ROW_BYTES))
        e.store(finish(e.load(place, kind), [b.load(variable) for variable in variables]), place)


def _dot_bytes(e: Emitter, operands: tuple[Value, Value, Value, Value], signed: bool) -> None:
    b, kind = e.builder, e.vector(I32)

    def byte(words: Value, i: int, signed: bool) -> Value:
        raised = b.shl(words, constant(kind, 24 - 8 * i))
        return (b.ashr if signed else b.lshr)(raised, constant(kind, 24))

    def step(totals: list[Value], x: Value, weights: Value) -> list[Value]:
        (total,) = totals
        for i in range(4):
            total = b.add(total, b.mul(byte(x, i, True), byte(weights, i, signed)))
        return [total]

    _dot(e, operands, kind, 1, step, lambda c, totals: b.add(c, totals[0]))


def _dot_signed(e: Emitter, *operands: Value) -> None:
    _dot_bytes(e, operands, True)


def _dot_unsigned(e: Emitter, *operands: Value) -> None:
    _dot_bytes(e, operands, False)


def _dot_bf16(e: Emitter, *operands: Value) -> None:
    b, integers, floats = e.builder, e.vector(I32), e.vector(F32)

    def normal(x: Value) -> Value:
        """x, or 0 if x is subnormal."""
        bits = b.bitcast(x, integers)
        exponent = b.and_(bits, constant(integers, 0x7F800000))
        sign = b.and_(bits, constant(integers, 0x80000000))
        zero = b.icmp_unsigned("==", exponent, constant(integers, 0))
        return b.bitcast(b.select(zero, sign, bits), floats)

    def pair(words: Value) -> tuple[Value, Value]:
        """(even, odd) as float32."""
        even, odd = b.shl(words, constant(integers, 16)), b.and_(words, constant(integers, 0xFFFF0000))
        return normal(b.bitcast(even, floats)), normal(b.bitcast(odd, floats))

    def step(totals: list[Value], x: Value, weights: Value) -> list[Value]:
        chains = zip(pair(x), pair(weights), totals, strict=True)  # exact FMAs, also where the processor has none
        return [normal(e.call("llvm.fma.v16f32", floats, list(chain))) for chain in chains]

    def finish(c: Value, totals: list[Value]) -> Value:
        return normal(b.fadd(normal(c), normal(b.fadd(*totals))))

    _dot(e, operands, floats, 2, step, finish)
