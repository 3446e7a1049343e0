"""Attention over rows that are keys and values at once: csrc/latent_attention.cu."""

from __future__ import annotations

from functools import cache
from typing import NamedTuple

import torch
from torch import Tensor

from lmkit.attention_spec import AttentionSpec
from lmkit.kernels.cuda.append import STORAGE, problem
from lmkit.kernels.cuda.gpus import Capability, gpu_of
from lmkit.kernels.cuda.module import NUM_COUNTERS, Kernel, backend, counters
from lmkit.kernels.cuda.prefill import LOG2E
from lmkit.kernels.ops import BatchGeometry, KVTensor
from lmkit.kv_dtype import INT4, KVDtype

THREADS, WARPS = 256, 8
MIN_TILES = 4  # of keys, for a range of its own
MAX_RANGES = 64
BLOCKS_PER_SM = 2


class Shape(NamedTuple):
    """The dimensions of a block of threads."""

    rows: int  # query tokens x heads
    keys: int  # of a tile


def latent_attention(q: Tensor, cache: KVTensor, geometry: BatchGeometry, spec: AttentionSpec) -> Tensor:
    """ops.paged_attention of q [T, heads, D] over rows that are keys and values. `latent_problem` is None for them."""
    q = q.contiguous()
    num_tokens, heads, dim = q.shape
    tables, num_seqs = geometry.block_tables, len(geometry.context_lens)
    out = torch.empty_like(q)
    if not num_tokens:
        return out
    shape = shape_of(dim, cache.dtype, num_tokens * heads // num_seqs, backend(q.device.type).capability())
    assert shape is not None
    tiles = num_tokens * heads // shape.rows + (num_seqs if heads % shape.rows else 0)
    ranges = num_ranges(tiles, tables.shape[1] * cache.block_size, shape.keys, q.device.type)
    records = q.new_empty(tiles * ranges * shape.rows * (dim + 2) if ranges > 1 else 0, dtype=torch.float32)
    args = [
        q, cache.data, cache.params, tables, tables.stride(0), geometry.query_start, geometry.context_lens, num_seqs,
        heads, cache.block_size, spec.scale * LOG2E, out, records, counters(q.device.type),
    ]  # fmt: skip
    kernel = latent_kernel(dim, cache.dtype, q.dtype == torch.bfloat16, shape)
    kernel((tiles, ranges), THREADS, args, shared=shared_bytes(dim, cache.dtype, shape))
    return out


def latent_problem(q: Tensor, cache: KVTensor, spec: AttentionSpec, sink_logits: Tensor | None) -> str | None:
    """Why the kernel cannot attend, or None."""
    if (reason := problem((q,), (cache, cache))) is not None:
        return reason
    if cache.hadamard or cache.mean is not None or cache.scales is not None:
        return "rows that are turned, or have a mean or fixed scales"
    if spec.window or spec.softcap or sink_logits is not None:
        return "rows that are keys and values, with a window, a soft cap or learned sinks"
    dim = q.shape[2]
    if shape_of(dim, cache.dtype, 1, backend(q.device.type).capability()) is None:
        return f"rows of {dim}, which shared memory cannot hold"
    return None


def num_ranges(tiles: int, max_keys: int, tile_keys: int, device: str) -> int:
    """The number of ranges that the keys of each tile of rows are split into, so that few tiles occupy a whole GPU. It
    depends on shapes alone."""
    if tiles > NUM_COUNTERS:
        return 1
    places = BLOCKS_PER_SM * backend(device).num_sms()
    return max(1, min(places // tiles, max_keys // (MIN_TILES * tile_keys), MAX_RANGES))


@cache
def latent_kernel(dim: int, stored: KVDtype, bf16: bool, shape: Shape) -> Kernel:
    defines = {"DIM": dim, "STORED": STORAGE[stored], "ROWS": shape.rows, "KEYS": shape.keys}
    return Kernel("latent_attention.cu", "latent_attention", **defines, **({"LM_BF16": 1} if bf16 else {}))


@cache
def shape_of(dim: int, stored: KVDtype, rows: int, capability: Capability) -> Shape | None:
    """The shape for `rows` rows of a sequence, or None if none fits into shared memory. Tiles of more keys wait less
    often for each other. A block of 32 rows of 4-bit codes has no registers for its sums."""
    most = 16 if rows <= 16 or stored == INT4 else 32
    fitting = [
        Shape(count, keys)
        for count in (most, 16)
        for keys in (32, 16)
        if shared_bytes(dim, stored, Shape(count, keys)) <= gpu_of(capability).block_shared
    ]
    return fitting[0] if fitting else None


def shared_bytes(dim: int, stored: KVDtype, shape: Shape) -> int:
    """Bytes of the kernel's `Shared`."""
    rows, keys = shape
    parts = WARPS * 256 // (rows * keys)
    queries, stride = rows * (2 * dim + 16), (-(-dim * stored.bits // 256) * 2 + 1) * 16
    stages = 2 * keys * (stride + 4)
    return queries + stages + 4 * parts * rows * (keys + 4) + rows * (2 * keys + 16) + 16 * rows + 16
