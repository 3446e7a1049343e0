"""Attention of sequences with several query tokens over blocked KV: csrc/prefill_attention.cu."""

from __future__ import annotations

import math
from functools import cache

import numpy as np
import torch
from torch import Tensor

from lmkit.attention_spec import AttentionSpec
from lmkit.kernels.cuda.append import STORAGE
from lmkit.kernels.cuda.gpus import Capability, gpu_of
from lmkit.kernels.cuda.module import Kernel, backend, counters
from lmkit.kernels.cuda.switches import switches
from lmkit.kernels.ops import BatchGeometry, KVTensor
from lmkit.kv_dtype import KVDtype

ROWS = 128  # of a block of threads: query tokens x heads of a KV head
WORK_BYTES = 128
MAX_MEAN_PAIRS = 16
MAX_SPLITS = 16  # of a tile's keys
BLOCKS_PER_SM = 2
PART_KEYS = 1024  # with `invariant`: keys of a range, or a little fewer
MAX_PART_BYTES = 64 << 20  # of the records of all ranges
LOG2E = math.log2(math.e)
LARGE_SHARED = 200 << 10  # bytes; an SM with at least these has room for tiles of more keys


def in_bits(spec: AttentionSpec) -> tuple[float, float]:
    """The scale and the soft cap of scores times log2(e): kernels compute weights as powers of 2."""
    return spec.scale * LOG2E, spec.softcap * LOG2E


def prefill_attention(
    q: Tensor,
    k_cache: KVTensor,
    v_cache: KVTensor,
    geometry: BatchGeometry,
    spec: AttentionSpec,
    out: Tensor,
    *,
    skip_single: bool,
    sink_logits: Tensor | None = None,
    shares: Tensor | None = None,
) -> None:
    """ops.paged_attention into `out` [T, num_heads, v_cache.dim], contiguous. `skip_single` skips sequences of one
    query. q and `shares` are turn.Queries.

    q is float16 or bfloat16 [T, num_heads, D]; its tokens are any multiple of 16 bytes apart. Sequences without queries
    or without context are skipped. The result does not depend on how blocks of threads are scheduled.
    """
    (num_tokens, num_heads, dim), value_dim = q.shape, out.shape[2]
    num_kv_heads, num_seqs = k_cache.data.shape[1], len(geometry.context_lens)
    group, mean, tables = num_heads // num_kv_heads, k_cache.mean, geometry.block_tables
    if not num_seqs or num_tokens < 1 + skip_single:
        return
    pairs = 0 if mean is None else mean.pairs.shape[1]
    stored, bf16 = (k_cache.dtype, v_cache.dtype), out.dtype == torch.bfloat16
    fixed = PART_KEYS if switches().invariant else 0
    kernel, keys, shared = variant(
        bf16,
        (dim, value_dim),
        stored,
        pairs,
        q.device.type,
        capped=spec.softcap > 0,
        part_keys=fixed,
        with_shares=shares is not None,
    )
    part = kernel.defines.get("PART", 0) * keys
    slots = num_tokens * group // ROWS + num_seqs
    blocks, max_keys = slots * num_kv_heads, tables.shape[1] * k_cache.block_size
    rows = min(ROWS, -(-group // 8) * 8) if part and num_tokens == num_seqs else ROWS
    record = rows * (value_dim + 2)
    if part:
        splits = num_parts(blocks, max_keys, part, 4 * record, q.device.type)
    else:
        splits = num_splits(blocks, max_keys, keys, q.device.type)
    has_records = splits > 1 or 0 < part < max_keys
    records = q.new_empty(blocks * splits * record, dtype=torch.float32) if has_records else None
    means = (mean.vector, mean.pairs, mean.table, *mean.table.shape[::2]) if mean else (None, None, None, 0, 0)
    args = [
        q, np.int64(q.stride(0)), k_cache.data, k_cache.params, v_cache.data, v_cache.params, *means, tables,
        tables.stride(0), geometry.query_start, geometry.context_lens, num_seqs, group, k_cache.block_size,
        spec.window, spec.sinks, k_cache.hadamard, skip_single, *in_bits(spec),
        None if sink_logits is None else sink_logits.float(), out, records, rows, counters(q.device.type),
        *(() if shares is None else (shares, v_cache.first)),
    ]  # fmt: skip
    kernel((num_kv_heads, slots, splits), 128 if value_dim <= 128 else 256, args, shared=shared)


def num_splits(blocks: int, max_keys: int, tile_keys: int, device: str) -> int:
    """The number of ranges that the keys of each tile of queries are split into, so that few tiles occupy a whole GPU.

    `blocks` is a bound from shapes. It grows with the number of sequences, even if they have no queries for this
    kernel. A short chunk in a step of many sequences is therefore not split.
    """
    return max(1, min(BLOCKS_PER_SM * backend(device).num_sms() // blocks, max_keys // (4 * tile_keys), MAX_SPLITS))


def num_parts(blocks: int, max_keys: int, part_keys: int, record_bytes: int, device: str) -> int:
    """The number of blocks of threads for each tile of queries, whose keys are in ranges at fixed positions: one for
    each range if half of the GPU would have nothing to do without them, else one for all. Results are the same.
    """
    parts = -(-max_keys // part_keys)
    is_idle = 2 * blocks <= BLOCKS_PER_SM * backend(device).num_sms()
    return parts if is_idle and blocks * parts * record_bytes <= MAX_PART_BYTES else 1


@cache
def variant(
    bf16: bool,
    dims: tuple[int, int],
    stored: tuple[KVDtype, KVDtype],
    mean_pairs: int,
    device: str,
    *,
    capped: bool,
    part_keys: int = 0,
    with_shares: bool = False,
) -> tuple[Kernel, int, int]:
    """(the kernel, keys of its tile, its bytes of shared memory). dims: those of keys and of values. part_keys: those
    of a range at a fixed position, rounded to whole tiles; 0 = ranges as `num_splits` has them."""
    dim, value_dim = dims
    keys = tile_keys(dim, mean_pairs, backend(device).capability())
    k, v = stored
    defines = {"HEAD_DIM": dim, "KEYS": keys, "K_STORAGE": STORAGE[k], "V_STORAGE": STORAGE[v]}
    defines |= {"MEAN_PAIRS": mean_pairs, "SOFTCAP": int(capped)} | ({"LM_BF16": 1} if bf16 else {})
    defines |= {} if value_dim == dim else {"VALUE_DIM": value_dim}
    defines |= {"SHARES": 1} if with_shares else {}
    defines |= {"PART": max(1, part_keys // keys)} if part_keys else {}
    kernel = Kernel("prefill_attention.cu", "prefill_attention", **defines)
    return kernel, keys, shared_bytes(dims, k, v, mean_pairs, keys)


def tile_keys(dim: int, mean_pairs: int, capability: Capability) -> int:
    """The most keys whose scores fit the registers, and whose tiles fit shared memory for two blocks of threads."""
    if dim > 128 or gpu_of(capability).shared < LARGE_SHARED:
        return 32
    if dim <= 96:
        return 64
    return 32 if mean_pairs else 48


def shared_bytes(dims: tuple[int, int], k: KVDtype, v: KVDtype, mean_pairs: int, keys: int) -> int:
    """Bytes of shared memory in the kernel's layout."""
    dim, value_dim = dims
    key_dim = dim + -(-6 * mean_pairs // 16) * 16
    total = ROWS * _stride(key_dim) + 2 * keys * 4 + WORK_BYTES
    for dtype, width, columns in ((k, dim, key_dim), (v, value_dim, value_dim)):
        tile = keys * _stride(columns)
        total += tile + keys * (dtype.columns(width) + 4) if dtype.coded else 2 * tile
    return total


def _stride(columns: int) -> int:
    return (columns // 8 | 1) * 16
