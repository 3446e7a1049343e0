"""The measured peak rates of this machine: bytes read per second, integer dot products, float32 multiply-adds.

    python -m benchmarks.ceilings [--json FILE]

The arithmetic loops use registers alone. A dot product's ceiling is the best of several shapes of independent sums. A
single shape may be too short for an instruction's latency, or need more registers than there are.
"""

from __future__ import annotations

import argparse
import mmap
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any, Literal

import numba
import numpy as np
import torch
from numba import types
from numba.extending import intrinsic

from benchmarks.contention import undisturbed
from benchmarks.report import interleaved, machine, save
from lmkit.config import default_num_threads
from lmkit.kernels.cpu import isa, threads
from lmkit.kernels.cpu.dots import BLOCK, dot_for
from lmkit.kernels.cpu.emit import F32, I32, I64, Emitter, Value, constant
from lmkit.kernels.cpu.intrinsics import pointer, unpack
from lmkit.kernels.cpu.jit import Task

# Dot products of (rows, weight vectors). One shape hides the instruction's latency, another one fits 16 registers.
SHAPES = ((4, 2), (4, 3), (6, 2), (8, 1))
FLOAT_SUMS, FLOAT_STEPS = 12, 8
Kind = Literal["int4", "int8", "float"]  # of multiply-adds


@dataclass(frozen=True)
class Ceilings:
    """Peak rates. A multiply-add counts as two operations."""

    bytes_per_s: float
    int4_ops: float  # 4-bit codes with int8 activations, int32 sums
    int8_ops: float  # 8-bit codes
    float_ops: float

    def roofline(self, num_bytes: float, num_ops: float, kind: Kind) -> float:
        """The least seconds that a call can take."""
        return max(num_bytes / self.bytes_per_s, num_ops / float(getattr(self, f"{kind}_ops")))

    def describe(self) -> str:
        return (
            f"reads {self.bytes_per_s / 1e9:.1f} GB/s; 4-bit dot {self.int4_ops / 1e9:.0f} GOP/s, "
            f"8-bit {self.int8_ops / 1e9:.0f}, float32 {self.float_ops / 1e9:.0f} GFLOP/s"
        )


def _loop(e: Emitter, count: Value, num_sums: int, kind: Any, step: Callable[[list[Value]], None]) -> None:
    """A loop of `count` iterations. In each, `step` replaces the values of the sums."""
    b, variables = e.builder, e.variables(1, num_sums, kind)[0]
    for variable in variables:
        b.store(constant(kind, 0), variable)
    with e.loop(count):
        values = [b.load(variable) for variable in variables]
        step(values)
        for variable, value in zip(variables, values, strict=True):
            b.store(e.opaque(value), variable)


def _int_peak(bits: int, count: Any, shape: Any) -> Any:
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
    b, kind = e.builder, e.vector(I32)
    *sums, weights = e.variables(rows + 1, vectors, kind)
    (activations,) = e.variables(1, rows, kind)
    totals = [variable for row in sums for variable in row]
    for variable in (*totals, *weights, *activations):
        b.store(constant(kind, 0), variable)
    with e.loop(count):
        values = [[b.load(variable) for variable in row] for row in sums]
        ws = [b.load(variable) for variable in weights]
        xs = [e.opaque(b.load(variable)) for variable in activations]

        def quads() -> Iterator[list[Value]]:
            for _ in range(BLOCK // 4):
                ws[:] = [e.opaque(weight) for weight in ws]
                yield list(ws)

        dot_for(isa.host(), bits).block(e, quads(), lambda row, byte: xs[row], values)
        computed = [value for row in values for value in row]
        for variable, value in zip(totals + weights + activations, computed + ws + xs, strict=True):
            b.store(value, variable)
    for variable in totals:
        e.opaque(b.load(variable))  # marks the sums as used


@intrinsic
def int4_peak(typing: Any, count: Any, shape: Any) -> Any:
    return _int_peak(4, count, shape)


@intrinsic
def int8_peak(typing: Any, count: Any, shape: Any) -> Any:
    return _int_peak(8, count, shape)


@intrinsic
def float_peak(typing: Any, count: Any) -> Any:
    """`count` times FLOAT_STEPS multiply-adds on FLOAT_SUMS registers."""

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        e = Emitter(builder, isa.host().lanes)
        x = e.opaque(constant(e.vector(F32), 0))

        def step(sums: list[Value]) -> None:
            for _ in range(FLOAT_STEPS):
                sums[:] = [e.fma(x, x, value) for value in sums]

        _loop(e, args[0], FLOAT_SUMS, e.vector(F32), step)
        return context.get_dummy_value()

    return types.void(types.int64), codegen


def _int4_blocks(args: int, scratch: int, index: int) -> None:
    count, shape = unpack(args, 2)
    int4_peak(count, shape)


def _int8_blocks(args: int, scratch: int, index: int) -> None:
    count, shape = unpack(args, 2)
    int8_peak(count, shape)


def _float_blocks(args: int, scratch: int, index: int) -> None:
    (count,) = unpack(args, 1)
    float_peak(count)


def _read(args: int, scratch: int, index: int) -> None:
    """Add up one piece of a buffer."""
    start, length, out = unpack(args, 3)
    piece, total = numba.carray(pointer(start + 8 * index * length), length, np.int64), np.int64(0)
    for i in range(length):
        total += piece[i]
    numba.carray(pointer(out + 8 * index), 1, np.int64)[0] = total


INT4_BLOCKS, INT8_BLOCKS, FLOAT_BLOCKS, READ = (Task(f) for f in (_int4_blocks, _int8_blocks, _float_blocks, _read))


READ_BYTES = 512 << 20


def measure_ceilings(seconds: float = 5) -> Ceilings:
    """Measure the peak rates on all threads that the kernels use."""
    lanes, count, pieces = isa.host().lanes, 10_000, 8 * threads.num_threads()
    sums = torch.zeros(pieces, dtype=torch.int64)
    # The pages behind a buffer change its speed: those of a mapping, as packed weights have, or of an allocation.
    buffers = {
        "allocated": torch.ones(READ_BYTES, dtype=torch.uint8),
        "mapped": torch.frombuffer(mmap.mmap(-1, READ_BYTES), dtype=torch.uint8).fill_(1),
    }
    functions: dict[Any, Callable[[], None]] = {
        "float": lambda: threads.run(FLOAT_BLOCKS, pieces, (count,)),
    }
    for name, buffer in buffers.items():
        places = (buffer.data_ptr(), READ_BYTES // 8 // pieces, sums.data_ptr())
        functions["read", name] = partial(threads.run, READ, pieces, places)
    for number, shape in enumerate(SHAPES):
        functions["int4", shape] = partial(threads.run, INT4_BLOCKS, pieces, (count, number))
        functions["int8", shape] = partial(threads.run, INT8_BLOCKS, pieces, (count, number))
    # A ceiling is the best value ever measured, not the usual one.
    best, _ = undisturbed(lambda: interleaved(functions, seconds=seconds, pick=min))
    dots = pieces * count * 2 * BLOCK * lanes
    return Ceilings(
        max(READ_BYTES / best["read", name] for name in buffers),
        max(dots * rows * vectors / best["int4", (rows, vectors)] for rows, vectors in SHAPES),
        max(dots * rows * vectors / best["int8", (rows, vectors)] for rows, vectors in SHAPES),
        pieces * count * 2 * FLOAT_STEPS * FLOAT_SUMS * lanes / best["float"],
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--json", type=Path, help="also write the figures here")
    arguments = parser.parse_args()
    threads.configure(default_num_threads())
    ceilings = measure_ceilings()
    print(f"{machine()['cpu']}, {threads.num_threads()} threads, {isa.describe()}: {ceilings.describe()}")
    if arguments.json:
        save(arguments.json, "ceilings", [asdict(ceilings)], isa=isa.host().name)


if __name__ == "__main__":
    main()
