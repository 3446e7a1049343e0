"""Rows of packed weights as float32: a tied head's panels also give the embeddings, which take no memory of their own.

Input i of an output lies at (i / unit, output, i % unit) of its panel, where `unit` inputs lie side by side. In codes
of 4 bits, two neighbouring units share their bytes.
"""

from __future__ import annotations

import functools
from typing import NamedTuple

import numpy as np
import torch
from numba import carray
from torch import Tensor

from lmkit.kernels.cpu import threads, workspace
from lmkit.kernels.cpu.dots import dot_for
from lmkit.kernels.cpu.elementwise import SERIAL_VALUES
from lmkit.kernels.cpu.intrinsics import bfloat_to_float, bits_to_float, half_to_float, pointer
from lmkit.kernels.cpu.isa import Isa
from lmkit.kernels.cpu.jit import Task, float_bits
from lmkit.kernels.cpu.packed_dense import BFLOAT16, CODE_BITS, PackedDense
from lmkit.kernels.cpu.packed_weight import PackedWeight
from lmkit.kernels.cpu.panels import address
from lmkit.kernels.cpu.structs import numbers, read
from lmkit.kernels.cpu.tiles import FLOAT8

FLOATS = {"float32": 0, BFLOAT16: 1, "float16": 2}


class RowsArgs(NamedTuple):
    rows: int  # int64 [T]
    out: int  # float32 [T, inputs]
    inputs: int
    factor_bits: int
    data: int
    panel_bytes: int
    width: int  # outputs of a panel
    table: int  # float32 [256]: the number of each stored code, or 0
    scales: int  # [panels, groups, width]
    zeros: int  # of the same shape, or 0
    groups: int
    group: int


@functools.cache
def float_task(kind: str) -> Task:
    """The task of one row of floats."""
    number, unit = FLOATS[kind], 2 if kind == BFLOAT16 else 1

    def row_of_floats(args: int, scratch: int, index: int) -> None:
        a = read(args, RowsArgs)
        factor, row = bits_to_float(np.uint32(a.factor_bits)), carray(pointer(a.rows), index + 1, np.int64)[index]
        out = carray(pointer(a.out + 4 * index * a.inputs), a.inputs, np.float32)
        panel, size = a.data + row // a.width * a.panel_bytes, a.inputs * a.width
        words, halves = carray(pointer(panel), size, np.float32), carray(pointer(panel), size, np.uint16)
        start, step = unit * (row % a.width), unit * a.width
        for i in range(a.inputs):
            at = i // unit * step + start + i % unit
            if number == 0:
                out[i] = words[at] * factor
            elif number == 1:
                out[i] = bfloat_to_float(np.uint32(halves[at])) * factor
            else:
                out[i] = half_to_float(np.uint32(halves[at])) * factor

    return Task(row_of_floats)


@functools.cache
def code_task(bits: int, unit: int, flipped: int, half_scales: bool, byte_zeros: bool) -> Task:
    """The task of one row of codes. Scales are float16 or float32, and zeros bytes, of which these bits are flipped, or
    float32."""
    shared, mask = 8 // bits, (1 << bits) - 1

    def row_of_codes(args: int, scratch: int, index: int) -> None:
        a = read(args, RowsArgs)
        factor, row = bits_to_float(np.uint32(a.factor_bits)), carray(pointer(a.rows), index + 1, np.int64)[index]
        out, table = carray(pointer(a.out + 4 * index * a.inputs), a.inputs, np.float32), pointer(a.table)
        panel = carray(pointer(a.data + row // a.width * a.panel_bytes), a.panel_bytes, np.uint8)
        first, number = row // a.width * a.groups * a.width + row % a.width, carray(table, 256, np.float32)
        last = first + a.groups * a.width
        scales, halves = carray(pointer(a.scales), last, np.float32), carray(pointer(a.scales), last, np.uint16)
        zeros, bytes_ = carray(pointer(a.zeros), last, np.float32), carray(pointer(a.zeros), last, np.uint8)
        start, step = unit * (row % a.width), unit * a.width
        for g in range(a.groups):
            place, zero = first + g * a.width, np.float32(0)
            if byte_zeros:
                zero = np.float32(np.int64(bytes_[place]) ^ flipped)
            elif a.zeros:
                zero = zeros[place]
            scale = half_to_float(np.uint32(halves[place])) if half_scales else scales[place]
            for i in range(g * a.group, min(a.inputs, (g + 1) * a.group)):
                at = i // unit // shared * step + start + i % unit
                code = np.int64(panel[at]) >> (i // unit % shared * bits) & mask
                out[i] = (number[code] - zero) * scale * factor

    return Task(row_of_codes)


@functools.cache
def _integers(flipped: int, values: tuple[int, ...]) -> Tensor:
    """The number of each stored code; `values` are looked up."""
    return torch.tensor([*values, *[0] * (256 - len(values))] if values else [i ^ flipped for i in range(256)]).float()


@functools.cache
def _float8() -> Tensor:
    return torch.arange(256, dtype=torch.uint8).view(torch.float8_e4m3fn).float()


def dense_rows(packed: PackedDense, rows: Tensor, factor: float = 1.0) -> Tensor:
    """See registry.Implementation.rows."""
    if packed.kind not in CODE_BITS:
        return _rows(float_task(packed.kind), packed, packed.data, rows, factor)
    task = code_task(CODE_BITS[packed.kind], 1, 0, half_scales=False, byte_zeros=False)
    table = _float8() if packed.kind == FLOAT8 else _integers(0, ())
    return _rows(task, packed, packed.data, rows, factor, table, packed.scales, packed.zeros)


def quantized_rows(isa: Isa, bits: int, packed: PackedWeight, rows: Tensor, factor: float = 1.0) -> Tensor:
    """See registry.Implementation.rows."""
    bits = 4 if packed.values else bits
    dot, half = dot_for(isa, bits), packed.scales.dtype == torch.float16
    task = code_task(bits, dot.inputs, dot.flipped, half_scales=half, byte_zeros=True)
    table = _integers(dot.flipped, packed.values)
    return _rows(task, packed, packed.codes, rows, factor, table, packed.scales, packed.zeros)


def _rows(
    task: Task, packed: PackedDense | PackedWeight, data: Tensor, rows: Tensor, factor: float,
    table: Tensor | None = None, scales: Tensor | None = None, zeros: Tensor | None = None,
) -> Tensor:  # fmt: skip
    rows = rows.contiguous()
    assert rows.dtype == torch.int64
    assert packed.activation is None
    y = workspace.empty(len(rows), packed.in_features)
    args = RowsArgs(
        rows.data_ptr(), y.data_ptr(), packed.in_features, float_bits(factor), data.data_ptr(), data[0].nbytes,
        packed.width, address(table), address(scales), address(zeros), 0 if scales is None else scales.shape[1],
        packed.group_size,
    )  # fmt: skip
    threads.run(task, len(rows), numbers(args), parallel=y.numel() > SERIAL_VALUES)
    return y
