"""Blocked KV storage on the CPU: writing tokens (ops.rope_append, ops.kv_append)."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from numba import carray
from torch import Tensor

from lmkit.kernels import ops
from lmkit.kernels.cpu import threads
from lmkit.kernels.cpu.intrinsics import (
    float_to_bfloat,
    float_to_half,
    half_to_float,
    order,
    pointer,
    rint,
    unorder,
    unpack,
)
from lmkit.kernels.cpu.jit import Task, inline
from lmkit.kernels.cpu.panels import as_type
from lmkit.kernels.ops import KVTensor
from lmkit.kernels.reference.elementwise import accepts_rope
from lmkit.kernels.reference.kv import accepts_heads
from lmkit.kernels.registry import implements

FLOAT32, BFLOAT16, FLOAT16, INT8, INT4 = range(5)
KINDS = {"float32": FLOAT32, "bfloat16": BFLOAT16, "float16": FLOAT16, "int8": INT8, "int4": INT4}
HALF_MAX = np.float32(65504)
SERIAL_VALUES = 1 << 14


def storage(cache: KVTensor) -> tuple[int, int, int]:
    """What compiled code needs of it: (kind, address of data, address of params)."""
    assert cache.data.is_contiguous()
    assert cache.params.is_contiguous()
    return KINDS[cache.dtype], cache.data.data_ptr(), cache.params.data_ptr()


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
def _store_codes(x: Any, dim: int, kind: int, data: int, params: int, where: int, scratch: int) -> None:
    low, high = _limits(x, dim)
    levels = np.float32(255 if kind == INT8 else 15)
    minimum_bits = float_to_half(low)
    minimum = half_to_float(minimum_bits)
    scale_bits = np.uint32(0)
    if high > low:
        scale_bits = float_to_half(max(high - minimum, np.float32(0)) / levels)
    scale = half_to_float(scale_bits)
    pair = carray(pointer(params + 4 * where), 2, np.uint16)
    pair[0], pair[1] = scale_bits, minimum_bits
    size = dim if kind == INT8 else dim // 2
    codes = carray(pointer(data + where * dim if kind == INT8 else scratch), dim, np.uint8)
    if scale == 0:
        codes[:] = 0
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
def _store(source: int, dim: int, kind: int, data: int, params: int, where: int, scratch: int) -> None:
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
    else:
        _store_codes(x, dim, kind, data, params, where, scratch)


@inline
def _rotate(head: int, half: int, cos: int, sin: int) -> None:
    """The first 2 * half elements of a head, by angles float32 [half]."""
    c, s = carray(pointer(cos), half, np.float32), carray(pointer(sin), half, np.float32)
    first, second = carray(pointer(head), half, np.float32), carray(pointer(head + 4 * half), half, np.float32)
    for i in range(half):
        a, b = first[i], second[i]
        first[i] = a * c[i] - b * s[i]
        second[i] = b * c[i] + a * s[i]


def _append(args: int, scratch: int, index: int) -> None:
    """Token `index`: rotate all heads of q and k, if there are angles; store its keys and its values."""
    (q, q_stride, q_heads, cos, sin, half, slots, heads, dim, block_size, k, k_stride, k_kind, k_data, k_params,
     v, v_stride, v_kind, v_data, v_params) = unpack(args, 20)  # fmt: skip
    c, s = cos + 4 * index * half, sin + 4 * index * half
    if half:
        for h in range(q_heads):
            _rotate(q + index * q_stride + 4 * h * dim, half, c, s)
        for h in range(heads):
            _rotate(k + index * k_stride + 4 * h * dim, half, c, s)
    slot = np.int64(carray(pointer(slots + 4 * index), 1, np.int32)[0])
    if slot < 0:
        return
    for head in range(2 * heads):
        is_value = head >= heads
        h = head - heads if is_value else head
        where = (slot // block_size * heads + h) * block_size + slot % block_size
        source = v + index * v_stride if is_value else k + index * k_stride
        kind = v_kind if is_value else k_kind
        data, params = (v_data, v_params) if is_value else (k_data, k_params)
        _store(source + 4 * h * dim, dim, kind, data, params, where, scratch)


APPEND = Task(_append)


@implements(ops.kv_append, "cpu", device="cpu", accepts=accepts_heads, priority=20)
def kv_append(k: Tensor, v: Tensor, k_cache: KVTensor, v_cache: KVTensor, slots: Tensor) -> None:
    _run(rows_of(k), rows_of(v), k_cache, v_cache, slots, (0, 0, 0, 0, 0, 0), 0)


@implements(ops.rope_append, "cpu", device="cpu", accepts=accepts_rope, priority=20)
def rope_append(
    q: Tensor, k: Tensor, v: Tensor, cos: Tensor, sin: Tensor, k_cache: KVTensor, v_cache: KVTensor, slots: Tensor
) -> None:
    wide_q, wide_k, cos, sin = rows_of(q), rows_of(k), cos.contiguous(), sin.contiguous()
    angles = (cos.data_ptr(), sin.data_ptr(), cos.shape[1])
    queries = (wide_q.data_ptr(), 4 * wide_q.stride(0), q.shape[1], *angles)
    _run(wide_k, rows_of(v), k_cache, v_cache, slots, queries, q.numel())
    for x, wide in ((q, wide_q), (k, wide_k)):
        if wide is not x:  # widened or copied: the op works in place
            x.copy_(wide)


def _run(
    k: Tensor, v: Tensor, k_cache: KVTensor, v_cache: KVTensor, slots: Tensor, queries: tuple[int, ...], values: int
) -> None:
    slots = slots.contiguous()
    num_tokens, heads, dim = k.shape
    assert slots.dtype == torch.int32
    threads.run(
        APPEND,
        num_tokens,
        (*queries, slots.data_ptr(), heads, dim, k_cache.block_size,
         k.data_ptr(), 4 * k.stride(0), *storage(k_cache), v.data_ptr(), 4 * v.stride(0), *storage(v_cache)),
        parallel=values // 4 + k.numel() > SERIAL_VALUES,
        scratch=dim,
    )  # fmt: skip
