"""Additions of low rank to linears (adapters), and the gated activation of panels that stand in turns."""

from __future__ import annotations

from typing import Any

import numba
import numpy as np
import torch
from numba import carray
from torch import Tensor

from lmkit.kernels import ops
from lmkit.kernels.cpu import threads, workspace
from lmkit.kernels.cpu.elementwise import SERIAL_VALUES
from lmkit.kernels.cpu.intrinsics import (
    bfloat_to_float,
    bits_to_float,
    half_to_float,
    pointer,
    prefetch,
    unpack,
)
from lmkit.kernels.cpu.jit import FASTMATH, Task, inline
from lmkit.kernels.cpu.panels import ACTIVATION_NUMBERS, multiply_gates
from lmkit.kernels.registry import implements
from lmkit.low_rank import MAX_RANK, AdapterRows, Columns, LowRanks

FLOAT32, BFLOAT16 = 0, 1  # of lmkit.low_rank.DTYPES
BLOCK = 512  # elements that are computed between two requests for more
AHEAD = 2048  # bytes


@numba.njit(forceinline=True, fastmath=FASTMATH | {"reassoc"})
def _dot(x: Any, address: int, kind: int, size: int) -> Any:
    """x . a. Lanes are added up in an order that the compiler fixes."""
    total = np.float32(0)
    if kind == FLOAT32:
        wide = carray(pointer(address), size, np.float32)
        for i in range(size):
            total += x[i] * wide[i]
        return total
    bits = carray(pointer(address), size, np.uint16)
    if kind == BFLOAT16:
        for i in range(size):
            total += x[i] * bfloat_to_float(np.uint32(bits[i]))
    else:
        for i in range(size):
            total += x[i] * half_to_float(np.uint32(bits[i]))
    return total


@inline
def _add(y: Any, factor: Any, address: int, kind: int, size: int) -> None:
    """y += factor * b."""
    if kind == FLOAT32:
        wide = carray(pointer(address), size, np.float32)
        for i in range(size):
            y[i] += factor * wide[i]
        return
    bits = carray(pointer(address), size, np.uint16)
    if kind == BFLOAT16:
        for i in range(size):
            y[i] += factor * bfloat_to_float(np.uint32(bits[i]))
    else:
        for i in range(size):
            y[i] += factor * half_to_float(np.uint32(bits[i]))


@inline
def _fetch(address: int, num_bytes: int) -> None:
    """Ask for what is read soon."""
    for line in range(num_bytes >> 6):
        prefetch(address + AHEAD + (line << 6))


def _add_low_rank(args: int, scratch: int, index: int) -> None:
    """Add the addition of row `index`."""
    x, x_stride, y, y_stride, numbers, entries, inputs, outputs, start, width, stride = unpack(args, 11)
    number = carray(pointer(numbers), index + 1, np.int32)[index]
    if number < 0:
        return
    a, b, rank, kind, scale_bits = unpack(entries + 40 * number, 5)
    if a == 0:
        return
    factors = carray(pointer(scratch), rank, np.float32)
    scale = bits_to_float(np.uint32(scale_bits))
    element = 4 if kind == FLOAT32 else 2
    for r in range(rank):
        total, done = np.float32(0), 0
        while done < inputs:
            size, at = min(BLOCK, inputs - done), a + (r * inputs + done) * element
            _fetch(at, size * element)
            part = carray(pointer(x + index * x_stride + 4 * done), size, np.float32)
            total += _dot(part, at, kind, size)
            done += size
        factors[r] = scale * total
    in_panels = width < outputs
    target = scratch + 4 * MAX_RANK if in_panels else y + index * y_stride + 4 * start
    if in_panels:
        carray(pointer(target), outputs, np.float32)[:] = np.float32(0)
    for r in range(rank):
        done = 0
        while done < outputs:
            size, at = min(outputs - done, BLOCK), b + (r * outputs + done) * element
            _fetch(at, size * element)
            _add(carray(pointer(target + 4 * done), size, np.float32), factors[r], at, kind, size)
            done += size
    if in_panels:
        done, out = 0, y + index * y_stride + 4 * start
        while done < outputs:
            size = min(width, outputs - done)
            part, more = carray(pointer(out), size, np.float32), carray(pointer(target + 4 * done), size, np.float32)
            for i in range(size):
                part[i] += more[i]
            done, out = done + size, out + 4 * stride


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
    threads.run(ADD_LOW_RANK, len(x), args, parallel=len(x) > 1, scratch=4 * (MAX_RANK + columns.size))


@implements(ops.gated_panels, "cpu", device="cpu", priority=20)
def gated_panels(gate_up: Tensor, activation: str, width: int, size: int, dtype: torch.dtype | None = None) -> Tensor:
    assert dtype in (None, torch.float32)
    y = workspace.empty(len(gate_up), size)
    row_bytes, number = 4 * gate_up.stride(0), ACTIVATION_NUMBERS[activation]
    args = (gate_up.data_ptr(), row_bytes, y.data_ptr(), size, width, number)
    threads.run(GATED_PANELS, len(gate_up), args, parallel=2 * y.numel() > SERIAL_VALUES)
    return y
