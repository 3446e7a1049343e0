"""Blocked KV storage on the CPU: writing tokens (ops.rope_append, ops.kv_append)."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
import torch
from numba import carray
from torch import Tensor

from lmkit.kernels import ops
from lmkit.kernels.cpu import threads
from lmkit.kernels.cpu.attention_codes import levels_tile
from lmkit.kernels.cpu.intrinsics import (
    copy,
    float_to_bfloat,
    float_to_e4m3,
    float_to_half,
    fma,
    half_to_float,
    order,
    pointer,
    rint,
    tile,
    unorder,
)
from lmkit.kernels.cpu.jit import Task, inline
from lmkit.kernels.cpu.panels import address, as_type
from lmkit.kernels.cpu.structs import numbers, read
from lmkit.kernels.ops import KVTensor
from lmkit.kernels.reference.elementwise import accepts_rope
from lmkit.kernels.reference.kv import accepts_heads
from lmkit.kernels.registry import implements
from lmkit.kv_dtype import KV_DTYPES, KVDtype

# Numbers for compiled code, in KV_DTYPES' order.
FLOAT32, BFLOAT16, FLOAT16, INT8, FP8, INT4, INT3, INT2 = range(len(KV_DTYPES))
KINDS = {dtype: kind for kind, dtype in enumerate(KV_DTYPES.values())}
HALF_MAX = np.float32(65504)
E4M3_MAX = np.float32(448)
SERIAL_VALUES = 1 << 14


def _bounds(dtype: KVDtype) -> np.ndarray:
    """What x must exceed for each code above 0, in standard deviations, float32 [units, codes]."""
    levels = np.asarray(dtype.levels, np.float32) - np.float32(dtype.largest / 2)
    bounds: np.ndarray = np.asarray(dtype.units, np.float32)[:, None] * ((levels[1:] + levels[:-1]) / 2)
    return bounds


ONES, THREES = np.uint64(0x0101010101010101), np.uint64(0x0303030303030303)
GATHER = np.uint64(0x0102040810204080)  # byte i's last bit -> bit 56 + i
MAGNITUDE, INFINITE, HALF_NAN = np.uint32(0x7FFFFFFF), np.uint32(0x7F800000), np.uint16(0x7E00)
LEVELS_3, LEVELS_2 = (levels_tile(KV_DTYPES[name]).name for name in ("int3", "int2"))
BOUNDS_3, BOUNDS_2 = (_bounds(KV_DTYPES[name]) for name in ("int3", "int2"))


def rows_of(x: Tensor) -> Tensor:
    """x [T, heads, D] as float32 with contiguous tokens (the token stride is free)."""
    x = as_type(x, torch.float32)
    return x if x.stride(2) == 1 and x.stride(1) == x.shape[2] else x.contiguous()


@inline
def _limits(x: Any, dim: int) -> Any:
    low, high = order(HALF_MAX), order(-HALF_MAX)
    for i in range(dim):
        low, high = min(low, order(x[i])), max(high, order(x[i]))
    return max(unorder(low), -HALF_MAX), min(unorder(high), HALF_MAX)


@inline
def _store_codes(x: Any, dim: int, kind: int, data: int, params: int, where: int, fixed: Any, scratch: int) -> None:
    """Store codes of x. `fixed` is the scale, or 0 to use the vector's own."""
    low, high = _limits(x, dim)
    levels = np.float32(255 if kind == INT8 else 15)
    scale_bits, minimum_bits = float_to_half(fixed), np.uint32(0)
    if kind == FP8:
        if fixed == 0:
            scale_bits = float_to_half(max(high, -low) / E4M3_MAX)
    elif fixed == 0:
        minimum_bits = float_to_half(low)
        if high > low:
            scale_bits = float_to_half(max(high - half_to_float(minimum_bits), np.float32(0)) / levels)
    else:
        minimum_bits = float_to_half(fixed * np.float32(-128 if kind == INT8 else -8))
    scale, minimum = half_to_float(scale_bits), half_to_float(minimum_bits)
    pair = carray(pointer(params + 4 * where), 2, np.uint16)
    pair[0], pair[1] = scale_bits, minimum_bits
    size = dim // 2 if kind == INT4 else dim
    codes = carray(pointer(scratch if kind == INT4 else data + where * dim), dim, np.uint8)
    if scale == 0:
        codes[:] = 0
    elif kind == FP8:
        for i in range(dim):
            step = min(max(x[i], -HALF_MAX), HALF_MAX) / scale
            codes[i] = float_to_e4m3(min(max(step, -E4M3_MAX), E4M3_MAX))
    else:
        for i in range(dim):
            value = min(max(x[i], -HALF_MAX), HALF_MAX)
            step = rint((value - minimum) / scale)
            codes[i] = np.int32(min(max(step, np.float32(0)), levels))
    if kind == INT4:
        packed = carray(pointer(data + where * size), size, np.uint8)
        for i in range(size):
            packed[i] = codes[i] | codes[size + i] << 4


@inline
def _store_levels(source: int, dim: int, bits: int, data: int, params: int, where: int, scratch: int) -> None:
    """Store the nearest levels of x in the best unit, and the scale that then has the least squared error: NaN if x has
    one."""
    bits_of, has_nan = carray(pointer(source), dim, np.uint32), False
    given, x = carray(pointer(source), dim, np.float32), carray(pointer(scratch), dim, np.float32)
    codes = carray(pointer(scratch + 4 * dim), dim, np.uint8)
    sums = carray(pointer(scratch + 5 * dim), 16, np.float32)
    bounds = BOUNDS_3 if bits == 3 else BOUNDS_2
    power = np.float32(0)
    for i in range(dim):
        has_nan |= (bits_of[i] & MAGNITUDE) > INFINITE  # compared as integers: fast arithmetic knows no NaN
        x[i] = min(max(given[i], -HALF_MAX), HALF_MAX)
        power += x[i] * x[i]
    deviation = np.float32(np.sqrt(power / np.float32(dim)))
    sums[15] = deviation
    places = (scratch, dim // 8, scratch + 5 * dim + 60, scratch + 5 * dim)
    if bits == 3:
        tile(LEVELS_3, 1, places)
    else:
        tile(LEVELS_2, 1, places)
    best, best_unit, scale = np.float32(-1), 0, np.float32(0)
    for unit in range(len(bounds)):
        product, square = sums[2 * unit], sums[2 * unit + 1]
        gain = product * product / square
        if gain > best:
            best, best_unit, scale = gain, unit, product / square
    codes[:] = 0
    for code in range(bounds.shape[1]):
        bound = bounds[best_unit, code] * deviation
        for i in range(dim):
            codes[i] += np.uint8(x[i] > bound)
    carray(pointer(params + 2 * where), 1, np.uint16)[0] = HALF_NAN if has_nan else np.uint16(float_to_half(scale))
    row, size = data + where * (dim // 8 * bits), 4 * bits
    words = carray(pointer(scratch + 4 * dim), dim // 8, np.uint64)  # eight codes each
    for unit in range(dim // 32):
        low = carray(pointer(row + size * unit), 1, np.uint64)
        low[0] = np.uint64(0)
        for group in range(4):
            word = words[4 * unit + group]
            low[0] |= (word & THREES) << np.uint64(2 * group)
            if bits == 3:  # bit 2 of all bytes meets in the highest byte of a product
                third = (word >> np.uint64(2) & ONES) * GATHER >> np.uint64(56)
                carray(pointer(row + size * unit + 8 + group), 1, np.uint8)[0] = third


@inline
def _store(source: int, dim: int, kind: int, data: int, params: int, where: int, fixed: Any, scratch: int) -> None:
    x = carray(pointer(source), dim, np.float32)
    if kind == FLOAT32:
        wide = carray(pointer(data + 4 * where * dim), dim, np.float32)
        for i in range(dim):
            wide[i] = x[i]
    elif kind == BFLOAT16:
        brain = carray(pointer(data + 2 * where * dim), dim, np.uint16)
        for i in range(dim):
            brain[i] = float_to_bfloat(x[i])
    elif kind == FLOAT16:
        half = carray(pointer(data + 2 * where * dim), dim, np.uint16)
        for i in range(dim):
            half[i] = float_to_half(x[i])
    elif kind == INT3:
        _store_levels(source, dim, 3, data, params, where, scratch)
    elif kind == INT2:
        _store_levels(source, dim, 2, data, params, where, scratch)
    else:
        _store_codes(x, dim, kind, data, params, where, fixed, scratch)


@inline
def turn_hadamard(at: int, dim: int) -> None:
    """Multiply float32 [dim] by the orthonormal Walsh-Hadamard matrix, in place. dim is a power of two."""
    x = carray(pointer(at), dim, np.float32)
    step = 1
    while step < dim:
        for first in range(0, dim, 2 * step):
            for i in range(first, first + step):
                a, b = x[i], x[i + step]
                x[i], x[i + step] = a + b, a - b
        step *= 2
    norm = np.float32(np.float64(1) / np.sqrt(np.float64(dim)))
    for i in range(dim):
        x[i] *= norm


@inline
def multiply(source: int, matrix: int, dim: int, target: int) -> None:
    """target = source @ matrix: float32 [dim], [dim, dim]. Sums are in the order of the rows."""
    x, y = carray(pointer(source), dim, np.float32), carray(pointer(target), dim, np.float32)
    y[:] = 0
    whole = dim // 4 * 4
    for i in range(0, whole, 4):  # four rows at a time: y is loaded and stored once for them
        a, b, c, d = x[i], x[i + 1], x[i + 2], x[i + 3]
        rows = carray(pointer(matrix + 4 * i * dim), 4 * dim, np.float32)
        for j in range(dim):
            y[j] = fma(d, rows[j + 3 * dim], fma(c, rows[j + 2 * dim], fma(b, rows[j + dim], fma(a, rows[j], y[j]))))
    for i in range(whole, dim):
        row = carray(pointer(matrix + 4 * i * dim), dim, np.float32)
        for j in range(dim):
            y[j] = fma(x[i], row[j], y[j])


@inline
def _rotate(head: int, half: int, cos: int, sin: int) -> None:
    """Rotate the first 2 * half elements of a head by angles with cos and sin float32 [half]."""
    c, s = carray(pointer(cos), half, np.float32), carray(pointer(sin), half, np.float32)
    first, second = carray(pointer(head), half, np.float32), carray(pointer(head + 4 * half), half, np.float32)
    for i in range(half):
        a, b = first[i], second[i]
        first[i] = a * c[i] - b * s[i]
        second[i] = b * c[i] + a * s[i]


@inline
def _subtract(head: int, mean: int, dim: int) -> None:
    x, b = carray(pointer(head), dim, np.float32), carray(pointer(mean), dim, np.float32)
    for i in range(dim):
        x[i] -= b[i]


class Rows(NamedTuple):
    """Vectors [T, heads, D], float32, and the storage that they go to."""

    data: int
    stride: int  # bytes between tokens
    kind: int  # of KINDS
    stored: int
    params: int
    scales: int  # fixed scales, or 0
    first: int  # what is subtracted at position 0, or 0
    hadamard: int
    matrices: int  # that rows are multiplied with, or 0


class Queries(NamedTuple):
    """The rotated queries, and the angles for them and the keys. All 0: nothing is rotated."""

    q: int = 0
    stride: int = 0
    heads: int = 0
    cos: int = 0
    sin: int = 0
    half: int = 0  # R / 2


class AppendArgs(NamedTuple):
    queries: Queries
    slots: int
    positions: int  # or 0
    heads: int  # KV heads
    dim: int
    block_size: int
    mean: int  # of keys, or 0
    keys: Rows
    values: Rows


def _append(args: int, scratch: int, index: int) -> None:
    """Token `index`: rotate all heads of q and k, if there are angles; then store its keys and values."""
    a = read(args, AppendArgs)
    turned, keys, values, heads, dim, block_size = a.queries, a.keys, a.values, a.heads, a.dim, a.block_size
    half = turned.half
    c, s = turned.cos + 4 * index * half, turned.sin + 4 * index * half
    if half:
        for h in range(turned.heads):
            _rotate(turned.q + index * turned.stride + 4 * h * dim, half, c, s)
        for h in range(heads):
            if a.mean:
                _subtract(keys.data + index * keys.stride + 4 * h * dim, a.mean + 4 * h * dim, dim)
            _rotate(keys.data + index * keys.stride + 4 * h * dim, half, c, s)
    slot = np.int64(carray(pointer(a.slots + 4 * index), 1, np.int32)[0])
    if slot < 0:
        return
    is_first = a.positions != 0 and carray(pointer(a.positions + 4 * index), 1, np.int32)[0] == 0
    for head in range(2 * heads):
        is_value = head >= heads
        rows, h = (values, head - heads) if is_value else (keys, head)
        where = (slot // block_size * heads + h) * block_size + slot % block_size
        source = rows.data + index * rows.stride + 4 * h * dim
        if rows.hadamard or (is_first and rows.first):
            copy(source, scratch, 4 * dim)
            source = scratch
        if is_first and rows.first:
            _subtract(source, rows.first + 4 * h * dim, dim)
        if rows.hadamard:
            turn_hadamard(source, dim)
        if rows.matrices:
            multiply(source, rows.matrices + 4 * h * dim * dim, dim, scratch + 4 * dim)
            source = scratch + 4 * dim
        fixed = carray(pointer(rows.scales + 4 * h), 1, np.float32)[0] if rows.scales else np.float32(0)
        _store(source, dim, rows.kind, rows.stored, rows.params, where, fixed, scratch + 8 * dim)


APPEND = Task(_append)


@implements(ops.kv_append, "cpu", device="cpu", accepts=accepts_heads, priority=20)
def kv_append(
    k: Tensor, v: Tensor, k_cache: KVTensor, v_cache: KVTensor, slots: Tensor, positions: Tensor | None = None
) -> None:
    _run(rows_of(k), rows_of(v), k_cache, v_cache, slots, positions, Queries(), 0)


@implements(ops.rope_append, "cpu", device="cpu", accepts=accepts_rope, priority=20)
def rope_append(
    q: Tensor, k: Tensor, v: Tensor, cos: Tensor, sin: Tensor, k_cache: KVTensor, v_cache: KVTensor, slots: Tensor,
    positions: Tensor | None = None,
) -> None:  # fmt: skip
    wide_q, wide_k, cos, sin = rows_of(q), rows_of(k), cos.contiguous(), sin.contiguous()
    queries = Queries(wide_q.data_ptr(), 4 * wide_q.stride(0), q.shape[1], cos.data_ptr(), sin.data_ptr(), cos.shape[1])
    _run(wide_k, rows_of(v), k_cache, v_cache, slots, positions, queries, q.numel())
    for x, wide in ((q, wide_q), (k, wide_k)):
        if wide is not x:  # x was widened or copied, but the op works in place
            x.copy_(wide)


def _rows(x: Tensor, cache: KVTensor) -> Rows:
    assert cache.data.is_contiguous()
    assert cache.params.is_contiguous()
    assert cache.balance is None or cache.balance.keys.is_contiguous()
    matrices = None if cache.balance is None else cache.balance.keys
    return Rows(
        x.data_ptr(),
        4 * x.stride(0),
        KINDS[cache.dtype],
        cache.data.data_ptr(),
        cache.params.data_ptr(),
        address(cache.scales),
        address(cache.first),
        int(cache.hadamard),
        address(matrices),
    )


def _run(
    k: Tensor, v: Tensor, k_cache: KVTensor, v_cache: KVTensor, slots: Tensor, positions: Tensor | None,
    queries: Queries, values: int,
) -> None:  # fmt: skip
    slots = slots.contiguous()
    num_tokens, heads, dim = k.shape
    assert slots.dtype == torch.int32
    assert positions is None or (positions.dtype == torch.int32 and positions.is_contiguous())
    mean = k_cache.mean.vector.data_ptr() if k_cache.mean is not None else 0
    args = AppendArgs(
        queries, slots.data_ptr(), address(positions), heads, dim, k_cache.block_size, mean,
        keys=_rows(k, k_cache), values=_rows(v, v_cache),
    )  # fmt: skip
    parallel = values // 4 + k.numel() > SERIAL_VALUES
    threads.run(APPEND, num_tokens, numbers(args), parallel=parallel, scratch=14 * dim + 64)
