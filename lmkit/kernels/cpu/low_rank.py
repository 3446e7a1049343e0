"""Additions of low rank to linears (adapters), and the gated activation of panels that stand in turns."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch
from numba import carray
from torch import Tensor

from lmkit.kernels import low_rank_ops
from lmkit.kernels.cpu import threads, workspace
from lmkit.kernels.cpu.elementwise import SERIAL_VALUES
from lmkit.kernels.cpu.emit import F32, I16, I32, Emitter, Value, constant
from lmkit.kernels.cpu.intrinsics import bits_to_float, copy, pointer, tile, unpack
from lmkit.kernels.cpu.jit import Task, inline
from lmkit.kernels.cpu.panels import ACTIVATION_NUMBERS, multiply_gates
from lmkit.kernels.cpu.structs import num_bytes, numbers, read
from lmkit.kernels.cpu.tiles import Tile, register
from lmkit.kernels.registry import implements
from lmkit.low_rank import MAX_RANK, PANEL, AdapterRows, Add, Parts

LANES = 16
ELEMENTS = ("float32", "bfloat16", "float16")  # in the order of lmkit.low_rank.DTYPES
AHEAD = 8192  # bytes
ROWS = 64  # whose sums are kept at a time; turbo/engine/memory.py counts on it


def _load(e: Emitter, element: str, address: Value) -> Value:
    """LANES numbers as float32."""
    if element == "float32":
        return e.load(address, e.vector(F32))
    bits = e.builder.zext(e.load(address, e.vector(I16)), e.vector(I32))
    return e.bfloat_to_float(bits) if element == "bfloat16" else e.half_to_float(bits)


def _load_row(e: Emitter, element: str, address: Value) -> list[Value]:
    """The row of a panel at `address`. The row that stands AHEAD of it is asked for."""
    size = _size(element)
    for line in range(0, PANEL * size, 64):
        e.prefetch(e.offset(address, AHEAD + line), level=1)
    return [_load(e, element, e.offset(address, size * column)) for column in range(0, PANEL, LANES)]


def _size(element: str) -> int:
    return 4 if element == "float32" else 2


def factors_tile(element: str) -> Tile:
    """sums [rank, LANES] += x [panels * PANEL] times A, in panels; the lanes of a sum are still to be added up."""

    def body(e: Emitter, rows: int, arguments: list[Value]) -> None:
        x, a, panels, rank, sums = arguments
        with e.loop(panels) as panel:
            source = e.offset(x, e.times(panel, 4 * PANEL))
            values = [_load(e, "float32", e.offset(source, 4 * column)) for column in range(0, PANEL, LANES)]
            first = e.builder.mul(panel, rank)
            with e.loop(rank) as r:
                weights = _load_row(e, element, e.offset(a, e.times(e.offset(first, r), PANEL * _size(element))))
                place = e.offset(sums, e.times(r, 4 * LANES))
                total = e.load(place, e.vector(F32))
                for value, weight in zip(values, weights, strict=True):
                    total = e.fma(value, weight, total)
                e.store(total, place)

    return register(f"low_rank_factors.{element}", LANES, (1,), 5, body)


def outputs_tile(element: str) -> Tile:
    """out [PANEL] = factors [rank] times one panel of B."""

    def body(e: Emitter, rows: int, arguments: list[Value]) -> None:
        factors, b, rank, out = arguments
        (sums,) = e.variables(1, PANEL // LANES, e.vector(F32))
        for total in sums:
            e.builder.store(constant(e.vector(F32), 0), total)
        with e.loop(rank) as r:
            factor = e.splat(e.load(e.offset(factors, e.times(r, 4)), F32))
            weights = _load_row(e, element, e.offset(b, e.times(r, PANEL * _size(element))))
            for total, weight in zip(sums, weights, strict=True):
                e.builder.store(e.fma(factor, weight, e.builder.load(total)), total)
        for j, total in enumerate(sums):
            e.store(e.builder.load(total), e.offset(out, 4 * LANES * j))

    return register(f"low_rank_outputs.{element}", LANES, (1,), 4, body)


OF_FLOATS, OF_BFLOATS, OF_HALVES = (factors_tile(element).name for element in ELEMENTS)
TO_FLOATS, TO_BFLOATS, TO_HALVES = (outputs_tile(element).name for element in ELEMENTS)


@inline
def _factors(kind: int, x: int, a: int, panels: int, rank: int, sums: int) -> None:
    if kind == 0:
        tile(OF_FLOATS, 1, (x, a, panels, rank, sums))
    elif kind == 1:
        tile(OF_BFLOATS, 1, (x, a, panels, rank, sums))
    else:
        tile(OF_HALVES, 1, (x, a, panels, rank, sums))


@inline
def _outputs(kind: int, factors: int, b: int, rank: int, out: int) -> None:
    if kind == 0:
        tile(TO_FLOATS, 1, (factors, b, rank, out))
    elif kind == 1:
        tile(TO_BFLOATS, 1, (factors, b, rank, out))
    else:
        tile(TO_HALVES, 1, (factors, b, rank, out))


class Additions(NamedTuple):
    """What is added to rows: sums float32 [rows, parts], each part of whole panels. Each one's PART follows."""

    numbers: int
    sums: int
    stride: int
    parts: int


class SumsArgs(NamedTuple):
    x: int
    x_stride: int
    inputs: int
    additions: Additions


class AddArgs(NamedTuple):
    y: int
    y_stride: int
    additions: Additions


SUMS_BYTES, ADD_BYTES = num_bytes(SumsArgs), num_bytes(AddArgs)
PART = 6  # numbers: addresses of the adapters' entries, bytes before the part in a row of sums, and the columns
SCRATCH = 4 * (PANEL + MAX_RANK + LANES * MAX_RANK)


@inline
def _entry(entries: int, numbers_at: int, row: int) -> Any:
    """The entry of a row's adapter, see LowRanks. Its first number is 0 if nothing is added."""
    number = carray(pointer(numbers_at), row + 1, np.int32)[row]
    return unpack(entries + 40 * number, 5) if number >= 0 else (0, 0, 0, 0, 0)


def _low_rank_sums(args: int, scratch: int, index: int) -> None:
    """Compute what is added to one part of a row."""
    asked = read(args, SumsArgs)
    additions = asked.additions
    row, part = index // additions.parts, index % additions.parts
    entries, before, outputs = unpack(args + SUMS_BYTES + 8 * PART * part, 3)
    a, b, rank, kind, scale_bits = _entry(entries, additions.numbers, row)
    if a == 0:
        return
    panel_bytes = PANEL * rank * (4 if kind == 0 else 2)
    factors_at, sums_at = scratch + 4 * PANEL, scratch + 4 * (PANEL + MAX_RANK)
    factors, scale = carray(pointer(factors_at), rank, np.float32), bits_to_float(np.uint32(scale_bits))
    sums = carray(pointer(sums_at), LANES * rank, np.float32)
    for i in range(LANES * rank):
        sums[i] = np.float32(0)
    x, panels, rest = asked.x + row * asked.x_stride, asked.inputs // PANEL, asked.inputs % PANEL
    _factors(kind, x, a, panels, rank, sums_at)
    if rest:
        panel = carray(pointer(scratch), PANEL, np.float32)
        for i in range(PANEL):
            panel[i] = np.float32(0)
        copy(x + 4 * (asked.inputs - rest), scratch, 4 * rest)
        _factors(kind, scratch, a + panels * panel_bytes, 1, rank, sums_at)
    factors[:] = np.float32(0)
    for i in range(LANES):
        for r in range(rank):
            factors[r] += sums[r * LANES + i]
    for r in range(rank):
        factors[r] *= scale
    out = additions.sums + row * additions.stride + before
    for _ in range(0, outputs, PANEL):
        _outputs(kind, factors_at, b, rank, out)
        b += panel_bytes
        out += 4 * PANEL


@inline
def _add_to_row(args: int, index: int) -> None:
    asked = read(args, AddArgs)
    additions = asked.additions
    for part in range(additions.parts):
        entries, before, outputs, start, width, stride = unpack(args + ADD_BYTES + 8 * PART * part, 6)
        if _entry(entries, additions.numbers, index)[0] != 0:
            source = additions.sums + index * additions.stride + before
            target = asked.y + index * asked.y_stride + 4 * start
            for done in range(0, outputs, width):
                size = min(width, outputs - done)
                added, y = carray(pointer(source), size, np.float32), carray(pointer(target), size, np.float32)
                for i in range(size):
                    y[i] += added[i]
                source += 4 * width
                target += 4 * stride


def _add_sums(args: int, scratch: int, index: int) -> None:
    """Add what is added to row `index`."""
    _add_to_row(args, index)


def _gated_panels(args: int, scratch: int, index: int) -> None:
    """Add what is added to row `index`, and compute it."""
    gate_up, row_bytes, y, size, width, activation = unpack(args, 6)
    _add_to_row(args + 8 * 6, index)
    done, at = 0, gate_up + index * row_bytes
    while done < size:
        count = min(width, size - done)
        gate, up = carray(pointer(at), count, np.float32), carray(pointer(at + 4 * width), count, np.float32)
        multiply_gates(gate, up, carray(pointer(y + 4 * (index * size + done)), count, np.float32), count, activation)
        done, at = done + count, at + 8 * width


NOTHING = tuple(numbers(AddArgs(0, 0, Additions(0, 0, 0, parts=0))))
LOW_RANK_SUMS, ADD_SUMS, GATED_PANELS = Task(_low_rank_sums), Task(_add_sums), Task(_gated_panels)


@dataclass(frozen=True)
class _Addition:
    """What is added to up to ROWS rows. It is being computed, until `join` is called."""

    numbers: Tensor
    sums: Tensor
    table: tuple[int, ...]  # Additions, and the parts
    join: Callable[[], None]

    @classmethod
    def begin(cls, x: Tensor, numbers: Tensor, parts: Parts) -> _Addition:
        width, table = 0, list[int]()
        for additions, at in parts:
            table += additions.addresses.data_ptr(), 4 * width, at.size, at.start, at.width, at.stride
            width += -(-at.size // PANEL) * PANEL
        sums = workspace.empty(len(x), width)
        of_sums = (*Additions(numbers.data_ptr(), sums.data_ptr(), 4 * width, len(parts)), *table)
        args = x.data_ptr(), 4 * x.stride(0), x.shape[1], *of_sums
        return cls(numbers, sums, of_sums, threads.run_aside(LOW_RANK_SUMS, len(x) * len(parts), args, scratch=SCRATCH))

    def args(self, y: Tensor) -> tuple[int, ...]:
        """AddArgs, and the parts after them, once the sums are there."""
        self.join()
        return y.data_ptr(), 4 * y.stride(0), *self.table

    def __call__(self, y: Tensor) -> None:
        threads.run(ADD_SUMS, len(y), self.args(y), parallel=y.numel() > SERIAL_VALUES >> 3)


@implements(low_rank_ops.add_low_rank, "cpu", device="cpu", priority=20)
def add_low_rank(x: Tensor, rows: AdapterRows, parts: Parts) -> Add:
    if len(x) <= ROWS:
        return _Addition.begin(x, rows.numbers, parts)

    def add(y: Tensor) -> None:
        for start in range(0, len(x), ROWS):
            block = slice(start, start + ROWS)
            _Addition.begin(x[block], rows.numbers[block], parts)(y[block])

    return add


@implements(low_rank_ops.gated_panels, "cpu", device="cpu", priority=20)
def gated_panels(
    gate_up: Tensor,
    activation: str,
    width: int,
    size: int,
    dtype: torch.dtype | None = None,
    add: Add | None = None,
) -> Tensor:
    assert dtype in (None, torch.float32)
    if isinstance(add, _Addition):
        of_addition = add.args(gate_up)
    else:
        of_addition = NOTHING
        if add is not None:
            add(gate_up)
    y = workspace.empty(len(gate_up), size)
    of_gates = gate_up.data_ptr(), 4 * gate_up.stride(0), y.data_ptr(), size, width, ACTIVATION_NUMBERS[activation]
    threads.run(GATED_PANELS, len(gate_up), (*of_gates, *of_addition), parallel=2 * y.numel() > SERIAL_VALUES)
    return y
