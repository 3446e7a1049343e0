"""Attention over rows of more than 256 elements, and over rows that are keys and values at once:
csrc/wide_attention.cu."""

from __future__ import annotations

from functools import cache
from typing import NamedTuple

import torch
from torch import Tensor

from lmkit.attention_spec import AttentionSpec
from lmkit.kernels.cuda.append import MAX_HEAD_DIM, STORAGE, are_one, leaves_out, problem, row_stride, stored_bytes
from lmkit.kernels.cuda.gemm_table import WideKey, table
from lmkit.kernels.cuda.gpus import Capability, gpu_of
from lmkit.kernels.cuda.module import NUM_COUNTERS, Kernel, backend, counters
from lmkit.kernels.cuda.prefill import LOG2E
from lmkit.kernels.cuda.switches import off
from lmkit.kernels.ops import BatchGeometry, KVTensor
from lmkit.kv_dtype import KVDtype

THREADS, WARPS = 256, 8
MIN_TILES = 4  # of keys, for a range of its own
MAX_RANGES = 64
BLOCKS_PER_SM = 2  # if it was not measured (gemm_table.py)


class Storage(NamedTuple):
    """How the rows of keys and of values are stored. None: values are the keys' rows."""

    keys: KVDtype
    values: KVDtype | None


class Shape(NamedTuple):
    """The dimensions of a block of threads."""

    rows: int  # query tokens x heads of a KV head
    keys: int  # of a tile


def is_wide(dim: int, k_cache: KVTensor, v_cache: KVTensor) -> bool:
    """Whether this kernel attends, and not those of plain heads."""
    return dim > MAX_HEAD_DIM or are_one(k_cache, v_cache)


def wide_attention(
    q: Tensor, k_cache: KVTensor, v_cache: KVTensor, geometry: BatchGeometry, spec: AttentionSpec
) -> Tensor:
    """ops.paged_attention, if `wide_problem` is None."""
    q = q.contiguous()
    num_tokens, num_heads, dim = q.shape
    kv_heads, tables, num_seqs = k_cache.data.shape[1], geometry.block_tables, len(geometry.context_lens)
    group, out, stored = num_heads // kv_heads, torch.empty_like(q), storage_of(k_cache, v_cache)
    if not num_tokens:
        return out
    shape = shape_of(dim, stored, num_tokens * group // num_seqs, backend(q.device.type).capability())
    assert shape is not None
    tiles = num_tokens * group // shape.rows + (num_seqs if group % shape.rows else 0)
    key = WideKey(dim, group, min(x.bits for x in stored if x is not None), stored.values is None)
    places = backend(q.device.type).num_sms() * table(q.device.type).wide_blocks.get(key, BLOCKS_PER_SM)
    ranges = num_ranges(tiles * kv_heads, tables.shape[1] * k_cache.block_size, shape.keys, places)
    size = kv_heads * tiles * ranges * shape.rows * (dim + 2) if ranges > 1 else 0
    args = [
        q, k_cache.data, k_cache.params, v_cache.data, v_cache.params, tables, tables.stride(0), geometry.query_start,
        geometry.context_lens, num_seqs, group, k_cache.block_size, spec.scale * LOG2E, out,
        q.new_empty(size, dtype=torch.float32), counters(q.device.type),
    ]  # fmt: skip
    kernel = wide_kernel(dim, stored, q.dtype == torch.bfloat16, shape)
    kernel((tiles, ranges, kv_heads), THREADS, args, shared=shared_bytes(dim, stored, shape))
    return out


def wide_problem(
    q: Tensor, k_cache: KVTensor, v_cache: KVTensor, spec: AttentionSpec, sink_logits: Tensor | None
) -> str | None:
    """Why the kernel cannot attend, or None."""
    if (reason := off("wide_attention.cu") or problem((q,), (k_cache, v_cache))) is not None:
        return reason
    if leaves_out(k_cache, v_cache) or any(cache.hadamard or cache.mean is not None for cache in (k_cache, v_cache)):
        return "wide rows that are turned, or stored without a mean"
    if spec.window or spec.softcap or sink_logits is not None:
        return "wide rows with a window, a soft cap or learned sinks"
    dim, stored = q.shape[2], storage_of(k_cache, v_cache)
    packed = next((dtype for dtype in stored if dtype is not None and dtype.levels), None)
    if packed is not None and k_cache.block_size % 2:
        return f"wide rows of {packed.name} in blocks of {k_cache.block_size} tokens, an odd number"
    if shape_of(dim, stored, 1, backend(q.device.type).capability()) is None:
        return f"rows of {dim}, which shared memory cannot hold"
    return None


def storage_of(k_cache: KVTensor, v_cache: KVTensor) -> Storage:
    return Storage(k_cache.dtype, None if are_one(k_cache, v_cache) else v_cache.dtype)


def num_ranges(tiles: int, max_keys: int, tile_keys: int, places: int) -> int:
    """The number of ranges that the keys of each tile of rows are split into, so that few tiles are as many blocks as
    `places`. It depends on shapes alone."""
    if tiles > NUM_COUNTERS:
        return 1
    return max(1, min(places // tiles, max_keys // (MIN_TILES * tile_keys), MAX_RANGES))


@cache
def wide_kernel(dim: int, stored: Storage, bf16: bool, shape: Shape) -> Kernel:
    values = stored.values or stored.keys
    defines = {"DIM": dim, "K_STORED": STORAGE[stored.keys], "V_STORED": STORAGE[values], "ROWS": shape.rows}
    defines |= {"KEYS": shape.keys, "SHARED": int(stored.values is None)} | ({"LM_BF16": 1} if bf16 else {})
    return Kernel("wide_attention.cu", "wide_attention", **defines)


@cache
def shape_of(dim: int, stored: Storage, rows: int, capability: Capability) -> Shape | None:
    """The shape for `rows` rows of a sequence, or None if none fits into shared memory. Tiles of more keys wait less
    often for each other. A block of 32 rows has no registers for its sums of 4-bit codes."""
    most = 16 if rows <= 16 or any(dtype.bits <= 4 for dtype in stored if dtype is not None) else 32
    fitting = [
        Shape(count, keys)
        for count in (most, 16)
        for keys in (32, 16)
        if shared_bytes(dim, stored, Shape(count, keys)) <= gpu_of(capability).block_shared
    ]
    return fitting[0] if fitting else None


def shared_bytes(dim: int, stored: Storage, shape: Shape) -> int:
    """Bytes of the kernel's `Shared`."""
    rows, keys = shape
    parts = WARPS * 256 // (rows * keys)
    stages = 0
    for dtype in stored:
        if dtype is not None:
            stages += 2 * keys * (stored_bytes(dtype, dim) + 4) + (keys * row_stride(dtype, dim) if dtype.levels else 0)
    return rows * (2 * dim + 16) + stages + 4 * parts * rows * (keys + 4) + rows * (2 * keys + 16) + 16 * rows + 16
