"""Linears with 4- and 8-bit weights on int8 activations (ops.linear_w4a8, ops.linear_w8a8).

Weights lie in panels of `tile` outputs, so that a micro-kernel reads one contiguous stream:

    8 bits   uint8 [panels, K/4, tile, 4]: four inputs of one output side by side
        4 bits   uint8 [panels, K/8, tile, 4]: the low nibbles hold one quad of inputs, the high nibbles the next quad
    scales, zeros [panels, groups, tile]

K is padded to whole groups and N to whole panels. A few rows read the packed codes and unpack them in registers. Many
rows share panels that are unpacked to bytes, a chunk of K at a time, which stays in the first-level cache. Both add up
groups in the same order with the same instructions. A token's result therefore does not depend on the number of tokens
computed with it.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch
from numba import carray
from torch import Tensor

from lmkit.kernels.cpu import threads, tiles, workspace
from lmkit.kernels.cpu.dots import BLOCK, dot_for
from lmkit.kernels.cpu.elementwise import SERIAL_VALUES, NormArgs, norm_arguments, norm_row
from lmkit.kernels.cpu.intrinsics import pointer, tile
from lmkit.kernels.cpu.isa import Isa
from lmkit.kernels.cpu.jit import Task
from lmkit.kernels.cpu.panels import (
    ACTIVATION_NUMBERS,
    ROW_BLOCK,
    SERIAL_PRODUCTS,
    Blocks,
    Results,
    address,
    as_float,
    as_type,
    block_of,
    panels_per_task,
    store_panels,
    to_panels,
)
from lmkit.kernels.cpu.structs import numbers, read
from lmkit.kernels.ops import Norm
from lmkit.kernels.registry import Implementation
from lmkit.qtensor import QTensor

SPREAD = 6  # in micro-kernels' rows; with fewer rows, unpacking in registers each time costs less than stores
CHUNK_BYTES = 32 << 10  # of a panel as bytes: the size of a first-level cache
SEGMENT = 512  # a whole-row group is computed as groups of this size with equal scales
AHEAD = 4096  # bytes between the weights that are read once and those that are prefetched
SMALLEST_STEP = np.float32(2.0**-120)  # the inverse of a smaller step would not be finite


@dataclass(frozen=True)
class PackedWeight:
    """Panels of one linear; see the module's docstring."""

    codes: Tensor
    scales: Tensor
    zeros: Tensor
    out_features: int
    in_features: int
    group_size: int  # of the panels, a multiple of 32
    whole_row: bool  # one activation scale per row
    activation: str | None  # not None: panels of gates alternate with panels of up; out_features counts both


def accepts(code_bits: int, /, *, group_size: int, bits: int | None = None, **traits: Any) -> str | None:
    if bits not in (None, code_bits):
        return f"{bits} bits"
    if group_size != -1 and (group_size < BLOCK or group_size % BLOCK):
        return f"group_size {group_size} is not a multiple of {BLOCK}"
    if max(group_size, SEGMENT) * 127 >= tiles.LARGEST_SUM:
        return f"group_size {group_size} overflows the sums of activations"
    return None


def pack(isa: Isa, weight: QTensor, activation: str | None = None) -> PackedWeight:
    """Rearrange codes, scales and zeros into panels of `isa.int_tile` outputs."""
    out_features, in_features = weight.codes.shape
    whole_row = weight.scheme.group_size == -1
    group = min(SEGMENT, -(-in_features // BLOCK) * BLOCK) if whole_row else weight.scheme.group_size
    groups = -(-in_features // group)
    width = isa.int_tile

    padded = torch.nn.functional.pad(weight.codes, (0, groups * group - in_features))
    codes = to_panels(padded.view(torch.int32), width, activation is not None).view(
        torch.uint8
    )  # [panels, K/4, width * 4]
    if weight.scheme.bits == 4:
        codes = codes[:, 0::2] | codes[:, 1::2] << 4
    kept = weight.scales if weight.scales.dtype == torch.float16 else weight.scales.float()
    scales, zeros = (to_panels(x.expand(-1, groups), width, activation is not None) for x in (kept, weight.zeros))
    return PackedWeight(codes, scales, zeros, out_features, in_features, group, whole_row, activation)


class Activations(NamedTuple):
    """Rows of activations as codes."""

    codes: int
    row_bytes: int
    scales: int  # float32 [rows, groups]
    sums: int  # int32 [rows, groups]: see tiles.sum_pair


class QuantizeArgs(NamedTuple):
    x: int
    x_stride: int  # bytes
    norm: NormArgs
    quantized: Activations
    inputs: int
    groups: int
    group: int
    whole_row: int


class ProductArgs(NamedTuple):
    blocks: Blocks
    activations: Activations
    codes: int
    scales: int
    zeros: int
    groups: int
    group_blocks: int  # blocks of 32 inputs in a group
    chunk: int  # groups computed at a time
    spread: int  # 1: the weights are unpacked to bytes first
    results: Results


@functools.cache
def quantize_task(wide: bool) -> Task:
    """The task of one row of activations: the norm, if any, then integers and each group's scale and scaled sum."""
    find_peak, round_to_codes = tiles.peak_tile().name, tiles.codes_tile(wide=wide).name
    code_bytes, lanes = 2 if wide else 1, tiles.ACTIVATION_LANES

    def quantize(args: int, scratch: int, index: int) -> None:
        a = read(args, QuantizeArgs)
        norm, num, groups, group, whole_row = a.norm, a.inputs, a.groups, a.group, a.whole_row
        peak = carray(pointer(scratch), 1, np.int32)  # the bits of a float
        value = carray(pointer(scratch), 1, np.float32)
        row, padded = scratch + 64, groups * group
        x = a.x + index * a.x_stride
        if norm.weight:
            residual = norm.residual + 4 * index * num if norm.residual else 0
            norm_row(x, residual, norm.weight, row, num, norm.eps_bits)
        else:
            carray(pointer(row), num, np.float32)[:] = carray(pointer(x), num, np.float32)
        carray(pointer(row + 4 * num), padded - num, np.float32)[:] = 0
        scale = carray(pointer(a.quantized.scales + 4 * index * groups), groups, np.float32)
        step = np.float32(0)
        for g in range(groups):
            source = row + 4 * g * group
            if g == 0 or not whole_row:
                peak[0] = 0
                tile(find_peak, 1, (source, (padded if whole_row else group) // lanes, scratch))
                step = value[0] / np.float32(127)
            value[0] = np.float32(1) / step if step > SMALLEST_STEP else np.float32(0)
            out = a.quantized.codes + index * a.quantized.row_bytes + g * group * code_bytes
            total = a.quantized.sums + 4 * (index * groups + g)
            tile(round_to_codes, 1, (source, out, group // lanes, scratch, total))
            scale[g] = step

    return Task(quantize)


@functools.cache
def product_task(isa: Isa, bits: int, half_scales: bool) -> Task:
    """The task of one block of rows times a few panels."""
    of_packed = tiles.int_tile(isa, bits, packed=bits == 4, half_scales=half_scales).name
    of_bytes = tiles.int_tile(isa, bits, packed=False, half_scales=half_scales).name
    to_bytes = tiles.unpack_tile(isa).name
    width, quad, per_byte = isa.int_tile, isa.int_tile * 4, 8 // bits
    scale_bytes, input_bytes = 2 if half_scales else 4, dot_for(isa, bits).input_bytes

    def product(args: int, scratch: int, index: int) -> None:
        a = read(args, ProductArgs)
        x, groups, blocks, chunk, spread = a.activations, a.groups, a.group_blocks, a.chunk, a.spread
        first, row, num_panels, num_rows = block_of(a.blocks, index)
        group_bytes, sums_bytes = blocks * BLOCK * width // per_byte, 4 * num_rows * width
        carray(pointer(scratch), num_panels * num_rows * width, np.float32)[:] = 0
        for p in range(num_panels):
            for g in range(0, groups, chunk):
                count, at = min(chunk, groups - g), (first + p) * groups + g
                source, unpacked = a.codes + at * group_bytes, scratch + num_panels * sums_bytes
                if spread:
                    tile(to_bytes, 1, (source, unpacked, count * group_bytes // quad))
                r = 0
                while r < num_rows:
                    # The first rows prefetch what they read themselves, unless they read bytes; the others what follows.
                    ahead = source + (count * group_bytes if r or spread else AHEAD)
                    of_row, of_group = (row + r) * groups + g, at * width
                    activations = x.codes + of_row * blocks * BLOCK * input_bytes
                    sums, left = scratch + p * sums_bytes + 4 * r * width, num_rows - r
                    step, total = x.scales + 4 * of_row, x.sums + 4 * of_row
                    scale, zero = a.scales + of_group * scale_bytes, a.zeros + of_group
                    panel = unpacked if spread else source
                    of_x, of_panel = (activations, x.row_bytes, panel, step, total, 4 * groups), (scale, zero, sums)
                    given = (*of_x, *of_panel, count, blocks, ahead)
                    r += tile(of_bytes, left, given) if spread else tile(of_packed, left, given)
        store_panels(a.results, scratch, width, row, num_rows, first, num_panels)

    return Task(product)


def linear(
    isa: Isa, bits: int, x: Tensor, packed: PackedWeight, bias: Tensor | None, norm: Norm | None = None
) -> Tensor:
    """x [T, K] -> [T, N]. See ops.linear_w4a8."""
    dtype, x = x.dtype, as_float(x)
    rows, group = x.shape[0], packed.group_size
    groups = packed.scales.shape[1]
    padded, code_bytes = groups * group, dot_for(isa, bits).input_bytes
    row_bytes, scales_bytes = padded * code_bytes, 4 * rows * groups
    quantized = workspace.empty(rows * row_bytes + 2 * scales_bytes, dtype=torch.uint8)  # codes, scales, scaled sums
    codes = quantized.data_ptr()
    activations = Activations(codes, row_bytes, codes + rows * row_bytes, codes + rows * row_bytes + scales_bytes)
    _kept, normed = (None, NormArgs()) if norm is None else norm_arguments(norm, x)
    sizes = packed.in_features, groups, group, packed.whole_row
    threads.run(
        quantize_task(code_bytes == 2),
        rows,
        numbers(QuantizeArgs(x.data_ptr(), 4 * x.stride(0), normed, activations, *sizes)),
        parallel=rows * padded > SERIAL_VALUES,
        scratch=64 + 4 * padded,
    )
    out = workspace.empty(rows, packed.out_features // 2 if packed.activation else packed.out_features)
    _multiply(isa, bits, activations, packed, None if bias is None else bias.float(), out)
    return as_type(out, dtype)


def _multiply(
    isa: Isa, bits: int, activations: Activations, packed: PackedWeight, bias: Tensor | None, out: Tensor
) -> None:
    (rows, features), width = out.shape, isa.int_tile
    (panels, groups), group = packed.scales.shape[:2], packed.group_size
    spread = bits == 4 and rows > SPREAD * isa.packed_rows[0]
    row_block = max(1, min(rows, ROW_BLOCK))
    chunk = min(groups, max(1, CHUNK_BYTES // (width * group))) if rows > isa.packed_rows[0] else groups
    per_task = panels_per_task(width * groups * group * bits // 8, panels, packed.activation is not None)
    args = ProductArgs(
        Blocks(rows, panels, per_task, row_block),
        activations, packed.codes.data_ptr(), packed.scales.data_ptr(), packed.zeros.data_ptr(),
        groups=groups, group_blocks=group // BLOCK, chunk=chunk, spread=spread,
        results=Results(out.data_ptr(), features, address(bias), ACTIVATION_NUMBERS[packed.activation]),
    )  # fmt: skip
    threads.run(
        product_task(isa, bits, packed.scales.dtype == torch.float16),
        -(-panels // per_task) * -(-rows // row_block),
        numbers(args),
        parallel=rows * panels * width * groups * group > SERIAL_PRODUCTS,
        scratch=4 * per_task * row_block * width + width * chunk * group,
    )


def implementation(isa: Isa, bits: int) -> Implementation:
    return Implementation(
        f"cpu.{isa.name}",
        "cpu",
        functools.partial(linear, isa, bits),
        functools.partial(accepts, bits),
        functools.partial(pack, isa),
        20,
    )
