"""Attention over blocked KV: sequences with one new token go to csrc/decode_attention.cu, others to prefill's kernel.

A step with exactly one token per sequence is one launch: rotation, append, attention and merge. If keys are balanced,
or position 0 lacks a part, it is three: append.cu, turn.cu for the queries, and attention.
"""

from __future__ import annotations

import math
from functools import cache
from typing import Any, NamedTuple

import torch
from torch import Tensor

from lmkit.attention_spec import AttentionSpec
from lmkit.kernels import ops
from lmkit.kernels.cuda.append import (
    MAX_HEAD_DIM,
    STORAGE,
    accepts,
    leaves_out,
    problem,
    rope_append,
    row_stride,
    storage,
    stored_bytes,
    strided,
)
from lmkit.kernels.cuda.gemm_table import SplitKey, table
from lmkit.kernels.cuda.gpus import RESERVED_SHARED, Capability, gpu_of
from lmkit.kernels.cuda.module import NUM_COUNTERS, Kernel, backend, counters
from lmkit.kernels.cuda.prefill import MAX_MEAN_PAIRS, in_bits, prefill_attention
from lmkit.kernels.cuda.switches import off, switches
from lmkit.kernels.cuda.turn import turned
from lmkit.kernels.cuda.wide import is_wide, wide_attention, wide_problem
from lmkit.kernels.ops import BatchGeometry, KVTensor
from lmkit.kernels.registry import implements
from lmkit.kv_dtype import KVDtype

THREADS, WARPS, UNIT, TILE = 128, 4, 16, 64  # of csrc/decode_attention.cu; UNIT: tokens of a warp's step
MAX_SPLITS = 64
MAX_WAVES = 4  # of split sequences: more only add merges
# By bits of the storage: what a block costs besides its tiles, in tiles, if it was not measured (gemm_table.py).
SPLIT_COSTS = {16: 2, 8: 3, 4: 6, 3: 6, 2: 6}
MAX_STAGES = 5


def _accepts(*, head_dim: int, latent: bool = False, **traits: Any) -> str | None:
    wide = latent or head_dim > MAX_HEAD_DIM
    if wide:
        reason = off("wide_attention.cu")
    else:
        reason = off("prefill_attention.cu") if not _has_own_kernel() else None
    return reason or accepts(head_dim=head_dim, latent=latent, **traits)


@implements(ops.paged_attention, "cuda", device="cuda", accepts=_accepts, priority=20)
def paged_attention(
    q: Tensor,
    k_cache: KVTensor,
    v_cache: KVTensor,
    geometry: BatchGeometry,
    spec: AttentionSpec,
    sink_logits: Tensor | None = None,
) -> Tensor:
    num_seqs = len(geometry.context_lens)
    decodes, wide = _decodes(q, geometry), is_wide(q.shape[2], k_cache, v_cache)
    if wide:
        reason = wide_problem(q, k_cache, v_cache, spec, sink_logits)
    else:
        reason = attention_problem((q,), k_cache, v_cache, decodes)
    if reason is not None:
        reference = ops.paged_attention.fall_back("reference", reason)
        y: Tensor = reference(q, k_cache, v_cache, geometry, spec, sink_logits)
        return y
    if wide:
        return wide_attention(q, k_cache, v_cache, geometry, spec)
    out = q.new_empty(*q.shape[:2], v_cache.dim)
    mixed = not decodes and num_seqs > 1 and _has_own_kernel()
    rows, shares = turned(q, k_cache, v_cache)
    if decodes or mixed:
        decode_attention(rows, None, k_cache, v_cache, geometry, spec, out, sink_logits, shares)
    if not decodes:
        rows = rows if rows.stride(1) == rows.shape[2] else rows.contiguous()
        learned = {"sink_logits": sink_logits, "shares": shares}
        prefill_attention(rows, k_cache, v_cache, geometry, spec, out, skip_single=mixed, **learned)
    return out


@implements(ops.rope_paged_attention, "cuda", device="cuda", accepts=_accepts, priority=20)
def rope_paged_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cos: Tensor,
    sin: Tensor,
    k_cache: KVTensor,
    v_cache: KVTensor,
    geometry: BatchGeometry,
    spec: AttentionSpec,
    sink_logits: Tensor | None = None,
    positions: Tensor | None = None,
) -> Tensor:
    decodes = _decodes(q, geometry)
    if is_wide(q.shape[2], k_cache, v_cache) or not k.shape[1]:  # no keys: those of another layer are read
        rope_append(q, k, v, cos, sin, k_cache, v_cache, geometry.slots, positions)
        rows: Tensor = paged_attention(q, k_cache, v_cache, geometry, spec, sink_logits)
        return rows
    if (reason := attention_problem((q, k, v), k_cache, v_cache, decodes)) is not None:
        reference = ops.rope_paged_attention.fall_back("reference", reason)
        y: Tensor = reference(q, k, v, cos, sin, k_cache, v_cache, geometry, spec, sink_logits, positions)
        return y
    if decodes and not leaves_out(k_cache, v_cache):
        out = torch.empty_like(q, memory_format=torch.contiguous_format)
        decode_attention(q, (k, v, cos, sin), k_cache, v_cache, geometry, spec, out, sink_logits)
        return out
    rope_append(q, k, v, cos, sin, k_cache, v_cache, geometry.slots, positions)
    y = paged_attention(q, k_cache, v_cache, geometry, spec, sink_logits)
    return y


def _decodes(q: Tensor, geometry: BatchGeometry) -> bool:
    """Whether every sequence has one query, and a kernel of its own attends."""
    return len(q) == len(geometry.context_lens) and _has_own_kernel()


def _has_own_kernel() -> bool:
    """Whether sequences with one query have a kernel of their own. With `invariant` one kernel has all queries, because
    the two add up in different orders."""
    return not switches().invariant and off("decode_attention.cu") is None


def decode_attention(
    q: Tensor,
    new: tuple[Tensor, Tensor, Tensor, Tensor] | None,
    k_cache: KVTensor,
    v_cache: KVTensor,
    geometry: BatchGeometry,
    spec: AttentionSpec,
    out: Tensor,
    sink_logits: Tensor | None = None,
    shares: Tensor | None = None,
) -> None:
    """Write the rows of `out` [T, num_heads, D] of sequences with exactly one query; zeros for empty sequences.

    `new` is (k, v, cos, sin) of ops.rope_append: the kernel then rotates and appends too. None: q is already rotated
    and everything is appended. q and `shares` are turn.Queries.
    """
    num_heads, dim = q.shape[1:]
    kv_heads = k_cache.data.shape[1]
    group = num_heads // kv_heads
    k, v, cos, sin = new or (None, None, None, None)
    slots, tables, num_seqs = geometry.slots if new else None, geometry.block_tables, len(geometry.context_lens)
    cos, sin = (None, None) if cos is None or sin is None else (cos.contiguous(), sin.contiguous())
    mean = k_cache.mean
    means: tuple[Any, ...] = (None, None, None, 0, 0, 0)
    if mean is not None:
        half, _, positions = mean.table.shape
        means = (mean.vector, mean.pairs, mean.table, half, mean.pairs.shape[1], positions)

    capability, with_shares = backend(q.device.type).capability(), shares is not None
    shape = shape_of(dim, k_cache.dtype, v_cache.dtype, group, mean is not None, capability, with_shares=with_shares)
    head_tiles = -(-group // (8 * shape.n_tiles))
    blocks = num_seqs * kv_heads * head_tiles
    tiles = -(-tables.shape[1] * k_cache.block_size // TILE)
    bits = min(k_cache.dtype.bits, v_cache.dtype.bits)
    cost = table(q.device.type).split_costs.get(SplitKey(dim, group, bits), SPLIT_COSTS[bits])
    places, heads = backend(q.device.type).num_sms() * shape.blocks_per_sm, kv_heads * head_tiles
    listed = switches().work_list and num_seqs > 1 and tiles > 1 and blocks <= NUM_COUNTERS
    if listed:
        grid = num_items(num_seqs, heads, places), heads, 1
    else:
        grid = 1 if blocks > NUM_COUNTERS else num_splits(blocks, tiles, places, cost), heads, num_seqs
    splits = listed or grid[0] > 1
    rows = min(group, 8 * shape.n_tiles)
    partials = torch.empty(math.prod(grid) * rows * (dim + 2) if splits else 0, device=q.device)
    kernel = decode_kernel(
        dim, (k_cache.dtype, v_cache.dtype), out.dtype == torch.bfloat16, k_cache.block_size, shape,
        mean=mean is not None, capped=spec.softcap > 0, with_shares=with_shares,
    )  # fmt: skip
    args = [
        *strided(q), *strided(k), *strided(v), cos, sin, 0 if cos is None else cos.shape[1],
        *storage(k_cache), *storage(v_cache)[:3], *means, slots, tables, tables.stride(0), geometry.query_start,
        geometry.context_lens, *in_bits(spec), spec.window, spec.sinks,
        None if sink_logits is None else sink_logits.float(), out, partials, counters(q.device.type), kv_heads, group,
        num_seqs, places if listed else 0, cost, *(() if shares is None else (shares, v_cache.first)),
    ]  # fmt: skip
    kernel(grid, THREADS, args, shared=shape.shared)


@cache
def decode_kernel(
    dim: int, stored: tuple[KVDtype, KVDtype], bf16: bool, block_size: int, shape: Shape, *, mean: bool, capped: bool,
    with_shares: bool = False,
) -> Kernel:  # fmt: skip
    keys, values = (STORAGE[dtype] for dtype in stored)
    defines = ({"LM_BF16": 1} if bf16 else {}) | ({"SHARES": 1} if with_shares else {})
    return Kernel(
        "decode_attention.cu", "decode_attention", DIM=dim, KEYS=keys, VALUES=values, NT=shape.n_tiles,
        BLOCK=block_size, STAGES=shape.stages, MEAN=int(mean), SOFTCAP=int(capped), **defines,
    )  # fmt: skip


def num_splits(blocks: int, tiles: int, places: int, cost: int) -> int:
    """The number of splits of each sequence's tiles, at most `tiles`. There are `blocks` blocks before splitting, and
    the device runs `places` blocks at a time. The result minimizes the waves times what a block takes: its tiles, and
    as long as `cost` tiles to begin and to end. Splits make no more than MAX_WAVES waves.

    It depends on shapes alone, so that a captured launch stays valid while contexts grow.
    """
    most = max(1, min(tiles, MAX_SPLITS, MAX_WAVES * places // max(blocks, 1)))
    return min(range(1, most + 1), key=lambda s: -(-blocks * s // places) * (tiles / s + cost))


def num_items(num_seqs: int, heads: int, places: int) -> int:
    """The most items of a work list (csrc/work.cuh) of so many sequences, each of which `heads` blocks compute: as many
    as run at once; or, of more sequences than that, one wave of blocks more than they need without splits."""
    waves = 1 if num_seqs * heads <= places else -(-num_seqs * heads // places) + 1
    return max(num_seqs, waves * places // heads)


class Shape(NamedTuple):
    """The dimensions of a block of csrc/decode_attention.cu."""

    n_tiles: int  # of 8 query heads
    stages: int  # of each warp's ring
    shared: int  # bytes
    blocks_per_sm: int
    fits: bool  # whether it fits into the device's shared memory


@cache
def shape_of(
    dim: int, keys: KVDtype, values: KVDtype, group: int, mean: bool, capability: Capability, *,
    with_shares: bool = False,
) -> Shape:  # fmt: skip
    """The block's shape. The rings of two blocks keep an SM's share of the memory's bandwidth in flight. With rows
    longer than 128 there are no registers for a second tile of heads."""
    n_tiles = 2 if group > 8 and dim <= 128 else 1
    rows, strides = 8 * n_tiles, row_stride(keys, dim) + row_stride(values, dim)
    stage = WARPS * UNIT * (stored_bytes(keys, dim) + stored_bytes(values, dim) + 8)
    unpacked = WARPS * UNIT * sum(row_stride(dtype, dim) for dtype in (keys, values) if dtype.levels)
    rest = strides + rows * (2 * dim + 12 + 8 * WARPS) + 128 + (rows * 6 * dim if mean else 0)  # the kernel's `Shared`
    rest += 4 * rows if with_shares else 0
    whole = gpu_of(capability).shared
    stages = max(2, min(MAX_STAGES, (whole // 2 - RESERVED_SHARED - rest - unpacked) // stage))
    shared = max(stages * stage + unpacked, WARPS * rows * dim * 4) + rest
    by_registers = 4 if n_tiles * dim <= 128 else 2  # the kernel's launch bounds
    blocks_per_sm = max(1, min(by_registers, whole // (shared + RESERVED_SHARED)))
    return Shape(n_tiles, stages, shared, blocks_per_sm, shared + RESERVED_SHARED <= whole)


def attention_problem(rows: tuple[Tensor, ...], k_cache: KVTensor, v_cache: KVTensor, decodes: bool) -> str | None:
    """Why kernels cannot attend, or None. `decodes`: every sequence has one query."""
    needed = (*(() if decodes else ("prefill_attention.cu",)), *(("turn.cu",) if leaves_out(k_cache, v_cache) else ()))
    if (reason := off(*needed) or problem(rows, (k_cache, v_cache))) is not None:
        return reason
    if k_cache.block_size % UNIT:
        return f"blocks of {k_cache.block_size} tokens, not of a multiple of {UNIT}"
    if v_cache.hadamard or v_cache.mean is not None or v_cache.balance is not None:
        return "values that are turned, or stored without a mean"
    if decodes and v_cache.dim != k_cache.dim:
        return "new tokens with values of another width than keys"
    pairs = 0 if k_cache.mean is None else k_cache.mean.pairs.shape[1]
    if pairs > MAX_MEAN_PAIRS and not decodes:
        return f"a key mean of {pairs} pairs, more than {MAX_MEAN_PAIRS}"
    heads, dim = rows[0].shape[1:]
    group, capability = heads // k_cache.data.shape[1], backend(rows[0].device.type).capability()
    kinds, with_shares = (k_cache.dtype, v_cache.dtype), leaves_out(k_cache, v_cache)
    if not shape_of(dim, *kinds, group, pairs > 0, capability, with_shares=with_shares).fits:
        return f"{group} queries of {dim} for a KV head, which shared memory cannot hold"
    return None
