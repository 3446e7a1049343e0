"""Additions of low rank to linears (adapters), and the gated activation of panels that stand in turns."""

from __future__ import annotations

import numpy as np
import torch
from numba import carray
from torch import Tensor

from lmkit.kernels import ops
from lmkit.kernels.cpu import threads, workspace
from lmkit.kernels.cpu.elementwise import SERIAL_VALUES
from lmkit.kernels.cpu.emit import F32, I16, I32, Emitter, Value, constant
from lmkit.kernels.cpu.intrinsics import bits_to_float, copy, pointer, tile, unpack
from lmkit.kernels.cpu.jit import Task, inline
from lmkit.kernels.cpu.panels import ACTIVATION_NUMBERS, multiply_gates
from lmkit.kernels.cpu.tiles import Tile, register
from lmkit.kernels.registry import implements
from lmkit.low_rank import MAX_RANK, PANEL, AdapterRows, Columns, LowRanks

LANES = 16
ELEMENTS = ("float32", "bfloat16", "float16")  # in the order of lmkit.low_rank.DTYPES
AHEAD = 8192  # bytes


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
    """out [PANEL] += factors [rank] times one panel of B."""

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
            place = e.offset(out, 4 * LANES * j)
            e.store(e.builder.fadd(e.load(place, e.vector(F32)), e.builder.load(total)), place)

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


SCRATCH = 4 * (PANEL + MAX_RANK + LANES * MAX_RANK)


def _add_low_rank(args: int, scratch: int, index: int) -> None:
    """Add the addition of row `index`."""
    x, x_stride, y, y_stride, numbers, entries, inputs, outputs, start, width, stride = unpack(args, 11)
    number = carray(pointer(numbers), index + 1, np.int32)[index]
    if number < 0:
        return
    a, b, rank, kind, scale_bits = unpack(entries + 40 * number, 5)
    if a == 0:
        return
    panel_bytes = PANEL * rank * (4 if kind == 0 else 2)
    factors_at, sums_at = scratch + 4 * PANEL, scratch + 4 * (PANEL + MAX_RANK)
    panel, factors = carray(pointer(scratch), PANEL, np.float32), carray(pointer(factors_at), rank, np.float32)
    sums, scale = carray(pointer(sums_at), LANES * rank, np.float32), bits_to_float(np.uint32(scale_bits))
    for i in range(LANES * rank):
        sums[i] = np.float32(0)
    row, panels, rest = x + index * x_stride, inputs // PANEL, inputs % PANEL
    _factors(kind, row, a, panels, rank, sums_at)
    if rest:
        for i in range(PANEL):
            panel[i] = np.float32(0)
        copy(row + 4 * (inputs - rest), scratch, 4 * rest)
        _factors(kind, scratch, a + panels * panel_bytes, 1, rank, sums_at)
    factors[:] = np.float32(0)
    for i in range(LANES):
        for r in range(rank):
            factors[r] += sums[r * LANES + i]
    for r in range(rank):
        factors[r] *= scale
    done, place, row = 0, 0, y + index * y_stride + 4 * start  # `place` in the group of columns that begins at `row`
    while done < outputs:
        end = min(done + PANEL, outputs)
        if place + PANEL <= width and done + PANEL == end:
            _outputs(kind, factors_at, b, rank, row + 4 * place)
            done, place = end, place + PANEL
        else:
            panel[:] = np.float32(0)
            _outputs(kind, factors_at, b, rank, scratch)
        column = 0
        while done < end:
            size = min(end - done, width - place)
            part = carray(pointer(row + 4 * place), size, np.float32)
            for i in range(size):
                part[i] += panel[column + i]
            done, column, place = done + size, column + size, place + size
            if place == width:
                row, place = row + 4 * stride, 0
        if place == width:
            row, place = row + 4 * stride, 0
        b += panel_bytes


def _gated_panels(args: int, scratch: int, index: int) -> None:
    """Compute row `index`."""
    gate_up, row_bytes, y, size, width, activation = unpack(args, 6)
    done, at = 0, gate_up + index * row_bytes
    while done < size:
        count = min(width, size - done)
        gate, up = carray(pointer(at), count, np.float32), carray(pointer(at + 4 * width), count, np.float32)
        multiply_gates(gate, up, carray(pointer(y + 4 * (index * size + done)), count, np.float32), count, activation)
        done, at = done + count, at + 8 * width


ADD_LOW_RANK, GATED_PANELS = Task(_add_low_rank), Task(_gated_panels)


@implements(ops.add_low_rank, "cpu", device="cpu", priority=20)
def add_low_rank(x: Tensor, y: Tensor, rows: AdapterRows, additions: LowRanks, columns: Columns) -> None:
    args = (
        x.data_ptr(), 4 * x.stride(0), y.data_ptr(), 4 * y.stride(0), rows.numbers.data_ptr(),
        additions.addresses.data_ptr(), x.shape[1], columns.size, columns.start, columns.width, columns.stride,
    )  # fmt: skip
    threads.run(ADD_LOW_RANK, len(x), args, parallel=len(x) > 1, scratch=SCRATCH)


@implements(ops.gated_panels, "cpu", device="cpu", priority=20)
def gated_panels(gate_up: Tensor, activation: str, width: int, size: int, dtype: torch.dtype | None = None) -> Tensor:
    assert dtype in (None, torch.float32)
    y = workspace.empty(len(gate_up), size)
    row_bytes, number = 4 * gate_up.stride(0), ACTIVATION_NUMBERS[activation]
    args = (gate_up.data_ptr(), row_bytes, y.data_ptr(), size, width, number)
    threads.run(GATED_PANELS, len(gate_up), args, parallel=2 * y.numel() > SERIAL_VALUES)
    return y
