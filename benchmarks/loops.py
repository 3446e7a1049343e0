"""Compiled loops that run at a peak rate of this machine: dot products, multiply-adds and reading.

The arithmetic loops use registers alone. An instruction reaches its peak only with enough independent sums: twice its
latency, if two start in a cycle. More sums than there are registers are slow again. So a dot product has several
shapes, and the best one counts.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any, Literal

from llvmlite import ir
from numba import types
from numba.extending import intrinsic

from lmkit.kernels.cpu import isa
from lmkit.kernels.cpu.amx.tile_file import CONFIGURATION, ROW_BYTES, ROWS, SLOTS, TileFile, write_configuration
from lmkit.kernels.cpu.dots import BLOCK, dot_for
from lmkit.kernels.cpu.emit import F32, I32, I64, Emitter, Value, constant
from lmkit.kernels.cpu.intrinsics import unpack
from lmkit.kernels.cpu.jit import Task

Kind = Literal["int4", "int8", "bfloat16", "float"]  # of the weights that are multiplied
COUNT = 10_000  # iterations of an arithmetic loop
SHAPES = ((4, 2), (6, 2), (4, 3), (8, 1), (4, 4), (6, 4))  # (rows, weight vectors) of a dot product; each is a sum
FLOAT_SUMS, FLOAT_STEPS = 12, 8
READ_SUMS, AHEAD = 8, (0, 2048, 4096)  # vectors that are read in turn; bytes between a prefetch and its use
_BF16 = frozenset({"avx512bf16"})


@dataclass(frozen=True)
class Loop:
    """A task for any number of indices. It does `operations` for an index; a multiply-add counts as two."""

    name: str
    kinds: tuple[Kind, ...]  # of the products that an engine could compute in this way
    task: Task
    arguments: tuple[int, ...]
    operations: int
    scratch: int = 0  # bytes


def _summing(e: Emitter, count: Value, num_values: int, kind: ir.Type, step: Callable[[list[Value]], None]) -> None:
    """A loop of `count` iterations. In each, `step` replaces the values, which start at 0."""
    b, variables = e.builder, e.variables(1, num_values, kind)[0]
    for variable in variables:
        b.store(constant(kind, 0), variable)
    with e.loop(count, unroll=False):
        values = [b.load(variable) for variable in variables]
        step(values)
        for variable, value in zip(variables, values, strict=True):
            b.store(value, variable)
    for variable in variables:
        e.opaque(b.load(variable))  # marks the values as used


def _int_peak(bits: int) -> Any:
    """`count` blocks of the dot product of SHAPES[shape]. Each block has other operands, so that the compiler cannot
    compute anything only once."""

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        e = Emitter(builder, isa.host().lanes)
        for number, (rows, vectors) in enumerate(SHAPES):
            with builder.if_then(builder.icmp_signed("==", args[1], I64(number))):
                _dot_loop(e, args[0], bits, rows, vectors)
        return context.get_dummy_value()

    return types.void(types.int64, types.int64), codegen


def _dot_loop(e: Emitter, count: Value, bits: int, rows: int, vectors: int) -> None:
    num_sums, kind, dot = rows * vectors, e.vector(I32), dot_for(isa.host(), bits)

    def step(values: list[Value]) -> None:
        sums = [values[row * vectors : (row + 1) * vectors] for row in range(rows)]
        xs = [e.opaque(x) for x in values[num_sums : num_sums + rows]]
        weights = values[num_sums + rows :]

        def quads() -> Iterator[list[Value]]:
            for _ in range(BLOCK // dot.inputs):
                weights[:] = [e.opaque(weight) for weight in weights]
                yield list(weights)

        dot.block(e, quads(), lambda row, byte: xs[row], sums)
        values[:] = [total for row in sums for total in row] + xs + weights

    _summing(e, count, num_sums + rows + dot.weight_vectors(vectors), kind, step)


@intrinsic
def _int4_peak(typing: Any, count: Any, shape: Any) -> Any:
    return _int_peak(4)


@intrinsic
def _int8_peak(typing: Any, count: Any, shape: Any) -> Any:
    return _int_peak(8)


def _multiply_adds(kind: Callable[[Emitter], ir.Type], add: Callable[[Emitter, Value, Value], Value]) -> Any:
    """`count` times FLOAT_STEPS instructions on each of FLOAT_SUMS sums. `kind` is the type of the operands."""

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        e = Emitter(builder, isa.host().lanes)
        x = builder.bitcast(e.opaque(constant(e.vector(F32), 0)), kind(e))

        def step(sums: list[Value]) -> None:
            for _ in range(FLOAT_STEPS):
                sums[:] = [add(e, total, x) for total in sums]

        _summing(e, args[0], FLOAT_SUMS, e.vector(F32), step)
        return context.get_dummy_value()

    return types.void(types.int64), codegen


@intrinsic
def _float_peak(typing: Any, count: Any) -> Any:
    return _multiply_adds(lambda e: e.vector(F32), lambda e, total, x: e.fma(x, x, total))


class _BFloat(ir.Type):  # type: ignore[misc]
    """LLVM's bfloat, which llvmlite lacks."""

    def _to_string(self) -> str:
        return "bfloat"

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _BFloat)

    def __hash__(self) -> int:
        return hash("bfloat")


@intrinsic
def _bfloat_peak(typing: Any, count: Any) -> Any:
    def add(e: Emitter, total: Value, x: Value) -> Value:
        return e.call(f"llvm.x86.avx512bf16.dpbf16ps.{32 * e.lanes}", total.type, [total, x, x])

    return _multiply_adds(lambda e: ir.VectorType(_BFloat(), 2 * e.lanes), add)


def _tile_peak(dot: str) -> Any:
    """`count` times four dots of tiles: two of tokens by two of outputs."""

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        e, (count, scratch) = Emitter(builder, isa.host().lanes), args
        tiles, configuration = TileFile(e, _tile_level(), scratch), e.offset(scratch, SLOTS)
        write_configuration(e, configuration, [(ROWS, ROW_BYTES)] * 8)
        tiles.configure(configuration)
        with e.loop(count):
            for number in range(4):
                getattr(tiles, dot)(number, 4 + number // 2, 6 + number % 2)
        tiles.release()
        return context.get_dummy_value()

    return types.void(types.int64, types.int64), codegen


def _tile_level() -> isa.Isa:
    return isa.host() if isa.host().tiles else isa.named("amx+emulated")


@intrinsic
def _tile_int8_peak(typing: Any, count: Any, scratch: Any) -> Any:
    return _tile_peak("dot_int8")


@intrinsic
def _tile_bfloat_peak(typing: Any, count: Any, scratch: Any) -> Any:
    return _tile_peak("dot_bf16")


@intrinsic
def _read_sum(typing: Any, start: Any, num_bytes: Any, ahead: Any) -> Any:
    """Add up memory, vector by vector. With `ahead` > 0, ask for the cache line so many bytes on."""

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        e = Emitter(builder, isa.host().lanes)
        kind, size = e.vector(I32), 4 * e.lanes
        start, num_bytes, ahead = args
        for prefetched in (False, True):
            with builder.if_then(builder.icmp_signed(">" if prefetched else "<=", ahead, I64(0))):
                at = builder.alloca(I64)
                builder.store(start, at)

                def step(sums: list[Value], at: Value = at, prefetched: bool = prefetched) -> None:
                    place = builder.load(at)
                    for j, total in enumerate(sums):
                        if prefetched and j * size % 64 == 0:
                            e.prefetch(e.offset(place, ahead, j * size))
                        sums[j] = builder.add(total, e.load(e.offset(place, j * size), kind))
                    builder.store(e.offset(place, READ_SUMS * size), at)

                _summing(e, builder.sdiv(num_bytes, I64(READ_SUMS * size)), READ_SUMS, kind, step)
        return context.get_dummy_value()

    return types.void(types.int64, types.int64, types.int64), codegen


def _int4_blocks(args: int, scratch: int, index: int) -> None:
    count, shape = unpack(args, 2)
    _int4_peak(count, shape)


def _int8_blocks(args: int, scratch: int, index: int) -> None:
    count, shape = unpack(args, 2)
    _int8_peak(count, shape)


def _float_blocks(args: int, scratch: int, index: int) -> None:
    (count,) = unpack(args, 1)
    _float_peak(count)


def _bfloat_blocks(args: int, scratch: int, index: int) -> None:
    (count,) = unpack(args, 1)
    _bfloat_peak(count)


def _tile_int8_dots(args: int, scratch: int, index: int) -> None:
    (count,) = unpack(args, 1)
    _tile_int8_peak(count, scratch)


def _tile_bfloat_dots(args: int, scratch: int, index: int) -> None:
    (count,) = unpack(args, 1)
    _tile_bfloat_peak(count, scratch)


def _read(args: int, scratch: int, index: int) -> None:
    """Read piece `index` of a buffer."""
    start, num_bytes, ahead = unpack(args, 3)
    _read_sum(start + index * num_bytes, num_bytes, ahead)


_INT4, _INT8, _FLOAT, _BFLOAT, READ = map(Task, (_int4_blocks, _int8_blocks, _float_blocks, _bfloat_blocks, _read))
TILE_INT8, TILE_BFLOAT = Task(_tile_int8_dots), Task(_tile_bfloat_dots)
TILE_SCRATCH = SLOTS + CONFIGURATION


def loops() -> list[Loop]:
    """The arithmetic loops that run on the level in use."""
    host = isa.host()
    sums = 2 * COUNT * FLOAT_SUMS * FLOAT_STEPS * host.lanes
    found: list[Loop] = []
    for number, (rows, vectors) in enumerate(SHAPES):
        dots = 2 * COUNT * BLOCK * host.lanes * rows * vectors
        found.append(Loop(f"4-bit dot, {rows} x {vectors}", ("int4",), _INT4, (COUNT, number), dots))
        found.append(Loop(f"8-bit dot, {rows} x {vectors}", ("int8",), _INT8, (COUNT, number), dots))
    found.append(Loop("float32 FMA", ("bfloat16", "float"), _FLOAT, (COUNT,), sums))
    if host.lanes == 16 and isa.obstacle(replace(host, needs=_BF16)) is None:
        found.append(Loop("vdpbf16ps", ("bfloat16",), _BFLOAT, (COUNT,), 2 * sums))
    if host.tiles:
        dots = 4 * COUNT * 2 * ROWS * (ROW_BYTES // 4) * ROW_BYTES
        found.append(Loop("AMX int8", ("int4", "int8"), TILE_INT8, (COUNT,), dots, TILE_SCRATCH))
        found.append(Loop("AMX bfloat16", ("bfloat16",), TILE_BFLOAT, (COUNT,), dots // 2, TILE_SCRATCH))
    return found
