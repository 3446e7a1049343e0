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
from lmkit.kernels.cpu.elementwise import SERIAL_VALUES
from lmkit.kernels.cpu.intrinsics import bfloat_to_float, bits_to_float, half_to_float, pointer
from lmkit.kernels.cpu.isa import Isa
from lmkit.kernels.cpu.jit import Task, float_bits
from lmkit.kernels.cpu.packed_dense import BFLOAT16, CODE_BITS, PackedDense
from lmkit.kernels.cpu.packed_weight import PackedWeight
from lmkit.kernels.cpu.panels import address
from lmkit.kernels.cpu.plane_tiles import Planes
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
def plane_task(form: Planes) -> Task:
    """The task of one row of planes (packed_planes.py)."""
    bits, per_unit, parts, side_units, side_bytes = form.bits, form.groups, form.parts, form.side_units, form.side_bytes
    factors, shifted, group, unit_of_factors = form.factors, form.shifted, form.group, 2.0**-form.shift
    zero = 0 if shifted else form.middle
    nibbles, twos, ones = (bits & plane > 0 for plane in (4, 2, 1))
    whole = bits == 8
    after_nibbles, after_twos = (4 if nibbles else 0), (4 if nibbles else 0) + (2 if twos else 0)

    def row_of_planes(args: int, scratch: int, index: int) -> None:
        a = read(args, RowsArgs)
        factor, row = bits_to_float(np.uint32(a.factor_bits)), carray(pointer(a.rows), index + 1, np.int64)[index]
        out, number = carray(pointer(a.out + 4 * index * a.inputs), a.inputs, np.float32), pointer(a.table)
        table, width, lane = carray(number, 256, np.float32), a.width, row % a.width
        panel, row_bytes, units = a.data + row // width * a.panel_bytes, 4 * width, a.inputs // 32
        of_panel = a.scales + row // width * (units // side_units) * side_bytes * width
        for unit in range(units):
            codes = carray(pointer(panel + unit * bits * row_bytes), bits * row_bytes, np.uint8)
            side = of_panel + unit // side_units * side_bytes * width
            halves = carray(pointer(side), parts * max(per_unit, 1) * width, np.uint16)
            small = carray(pointer(side), side_bytes * width, np.int8)
            start = (2 * parts + unit % side_units * parts * per_unit) * width + lane
            for g in range(per_unit):
                if factors:
                    scale = half_to_float(np.uint32(halves[lane])) * np.float32(unit_of_factors)
                    scale *= np.float32(small[start + g * width])
                else:
                    scale = half_to_float(np.uint32(halves[g * width + lane]))
                offset = np.float32(0)
                if shifted and factors:
                    at = start + (per_unit + g) * width
                    offset = half_to_float(np.uint32(halves[width + lane])) * np.float32(small[at])
                elif shifted:
                    offset = half_to_float(np.uint32(halves[(per_unit + g) * width + lane]))
                for i in range(g * group, (g + 1) * group):
                    quad, at = i // 4, 4 * lane + i % 4
                    code = np.int64(codes[quad * row_bytes + at]) if whole else np.int64(0)
                    if nibbles:
                        code = np.int64(codes[quad // 2 * row_bytes + at]) >> (quad % 2 * 4) & 15
                    if twos:
                        found = np.int64(codes[(after_nibbles + quad // 4) * row_bytes + at])
                        code |= (found >> (quad % 4 * 2) & 3) << after_nibbles
                    if ones:
                        found = np.int64(codes[after_twos * row_bytes + at])
                        code |= (found >> quad & 1) << after_twos
                    out[unit * 32 + i] = ((table[code] - np.float32(zero)) * scale - offset) * factor

    return Task(row_of_planes)


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


def quantized_rows(isa: Isa, packed: PackedWeight, rows: Tensor, factor: float = 1.0) -> Tensor:
    """See registry.Implementation.rows."""
    dot, half = packed.form.dot(isa), packed.scales.dtype == torch.float16
    task = code_task(packed.form.bits, dot.inputs, dot.flipped, half_scales=half, byte_zeros=True)
    table = _integers(dot.flipped, packed.values)
    return _rows(task, packed, packed.codes, rows, factor, table, packed.scales, packed.zeros)


def plane_rows(isa: Isa, packed: PackedWeight, rows: Tensor, factor: float = 1.0) -> Tensor:
    """See registry.Implementation.rows."""
    assert isinstance(packed.form, Planes)
    table = _integers(0, packed.form.values)
    return _rows(plane_task(packed.form), packed, packed.codes, rows, factor, table, packed.scales)


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
        packed.width, address(table), address(scales), address(zeros), packed.groups,
        packed.group_size,
    )  # fmt: skip
    threads.run(task, len(rows), numbers(args), parallel=y.numel() > SERIAL_VALUES)
    return y
