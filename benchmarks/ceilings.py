"""What this machine can do at best, measured: bytes read per second, integer dot products, float32 multiply-adds.

    python -m benchmarks.ceilings [--json FILE]

The arithmetic loops use registers alone and as many independent sums as hide an instruction's latency.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from dataclasses import asdict, dataclass
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
from lmkit.kernels.cpu.emit import F32, I32, Emitter, Value, constant
from lmkit.kernels.cpu.intrinsics import pointer, unpack
from lmkit.kernels.cpu.jit import Task

INT_SUMS = 4  # rows of one weight vector: with their int16 sums, weights and activations they fit 16 registers
FLOAT_SUMS, FLOAT_STEPS = 12, 8
Kind = Literal["int4", "int8", "float"]  # of multiply-adds


@dataclass(frozen=True)
class Ceilings:
    """A multiply-add counts as two operations."""

    bytes_per_s: float
    int4_ops: float  # 4-bit codes with int8 activations, int32 sums
    int8_ops: float  # 8-bit codes
    float_ops: float

    def roofline(self, num_bytes: float, num_ops: float, kind: Kind) -> float:
        """Seconds that a call takes at best."""
        return max(num_bytes / self.bytes_per_s, num_ops / float(getattr(self, f"{kind}_ops")))

    def describe(self) -> str:
        return (
            f"reads {self.bytes_per_s / 1e9:.1f} GB/s; 4-bit dot {self.int4_ops / 1e9:.0f} GOP/s, "
            f"8-bit {self.int8_ops / 1e9:.0f}, float32 {self.float_ops / 1e9:.0f} GFLOP/s"
        )


def _loop(e: Emitter, count: Value, num_sums: int, kind: Any, step: Callable[[list[Value]], None]) -> None:
    """`count` times: `step` replaces the values of the sums."""
    b, variables = e.builder, e.variables(1, num_sums, kind)[0]
    for variable in variables:
        b.store(constant(kind, 0), variable)
    with e.loop(count):
        values = [b.load(variable) for variable in variables]
        step(values)
        for variable, value in zip(variables, values, strict=True):
            b.store(e.opaque(value), variable)


def _int_peak(bits: int, count: Any) -> Any:
    """`count` blocks of the dot product, INT_SUMS rows with one weight vector."""

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        level = isa.host()
        e = Emitter(builder, level.lanes)
        zero = constant(e.vector(I32), 0)
        activations = [e.opaque(zero) for _ in range(INT_SUMS)]  # before the loop, each in a register
        weights = e.opaque(zero)

        def step(sums: list[Value]) -> None:
            rows = [[value] for value in sums]
            quads = ([e.opaque(weights)] for _ in range(BLOCK // 4))
            dot_for(level, bits).block(e, quads, lambda row, byte: activations[row], rows)
            sums[:] = [row[0] for row in rows]

        _loop(e, args[0], INT_SUMS, e.vector(I32), step)
        return context.get_dummy_value()

    return types.void(types.int64), codegen


@intrinsic
def int4_peak(typing: Any, count: Any) -> Any:
    return _int_peak(4, count)


@intrinsic
def int8_peak(typing: Any, count: Any) -> Any:
    return _int_peak(8, count)


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
    (count,) = unpack(args, 1)
    int4_peak(count)


def _int8_blocks(args: int, scratch: int, index: int) -> None:
    (count,) = unpack(args, 1)
    int8_peak(count)


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


def measure_ceilings(seconds: float = 3) -> Ceilings:
    """On all the threads that the kernels use."""
    lanes, count, pieces = isa.host().lanes, 20_000, 8 * threads.num_threads()
    buffer, sums = torch.ones(512 << 20, dtype=torch.uint8), torch.zeros(pieces, dtype=torch.int64)
    length = buffer.nbytes // 8 // pieces
    functions = {
        "int4": lambda: threads.run(INT4_BLOCKS, pieces, (count,)),
        "int8": lambda: threads.run(INT8_BLOCKS, pieces, (count,)),
        "float": lambda: threads.run(FLOAT_BLOCKS, pieces, (count,)),
        "read": lambda: threads.run(READ, pieces, (buffer.data_ptr(), length, sums.data_ptr())),
    }
    # A ceiling is the best ever seen, not the usual.
    best, _ = undisturbed(lambda: interleaved(functions, seconds=seconds, pick=min))
    dots = pieces * count * 2 * BLOCK * INT_SUMS * lanes
    return Ceilings(
        buffer.nbytes / best["read"],
        dots / best["int4"],
        dots / best["int8"],
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
