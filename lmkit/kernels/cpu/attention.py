"""Paged attention on the CPU (ops.paged_attention): one path for prefill, chunked prefill and decode.

A *tile* is a few consecutive tokens of one sequence times the query heads that share one KV head: its rows read the
same keys. Keys make partitions of 256, of which attention_stages.py computes one at a time; partitions are merged in
order (Flash-Decoding; the online softmax of Milakov and Gimelshein, arXiv 1805.02867). Partitions begin at multiples
of their size, whatever the batch: a row adds up the same numbers in the same order in every batch, chunk and split,
and masked keys add exact zeros. With a sliding window, partitions between the sinks and the window are skipped; keys
that no row of a tile sees are not read, because their blocks may be in use for something else.

A *unit* is what one task does: a tile; or, when there are too few tiles to keep all threads busy (decode of few
sequences), one partition of a tile, and the task that finishes a tile's last partition merges them.

A *record* is a partial result: outputs [rows, padded D], then each row's maximum score, then each row's sum.
"""

from __future__ import annotations

import functools
from typing import Any

import numpy as np
import torch
from numba import carray
from torch import Tensor

from lmkit.attention_spec import AttentionSpec
from lmkit.kernels.cpu import attention_rows, threads, workspace
from lmkit.kernels.cpu.attention_keys import ask_for, locate, num_parts, skipped_parts, span
from lmkit.kernels.cpu.attention_stages import (
    DIRECT_ROWS,
    PARTITION,
    copy_bytes,
    reads_directly,
    score_task,
    value_task,
)
from lmkit.kernels.cpu.attention_tiles import KEYS, LARGEST_WORD
from lmkit.kernels.cpu.emit import I8, I16
from lmkit.kernels.cpu.intrinsics import add, bits_to_float, call, fma, pointer, tile, unpack
from lmkit.kernels.cpu.isa import Isa
from lmkit.kernels.cpu.jit import Task, float_bits, inline
from lmkit.kernels.cpu.kv import rope_append, rows_of, turn_hadamard
from lmkit.kernels.cpu.panels import address, as_type
from lmkit.kernels.ops import BatchGeometry, KVTensor
from lmkit.kernels.reference.attention import SMALL_QUERY, small_query_limit
from lmkit.kernels.reference.elementwise import accepts_rope
from lmkit.kernels.reference.kv import accepts_heads
from lmkit.kernels.registry import Implementation
from lmkit.kv_dtype import INT4, KVDtype

TILE_ROWS = 48  # aimed at: enough to pay for copying the keys
UNITS_PER_THREAD = 4  # with fewer tiles, partitions become units
SERIAL_PRODUCTS = 1 << 20
JOB_BYTES = 192  # the arguments of a stage
WORDS, SMALL = (attention_rows.words_tile(element).name for element in (I16, I8))
MERGE = attention_rows.merge_tile().name


def _plan(args: int, scratch: int, index: int) -> None:
    """plan[b] = the first unit of sequence b, plan[B] = the number of units, plan[B + 1] = 1 if tiles are split; the
    counters, which follow, become 0.
    """
    plan_at, num_seqs, starts_at, lens_at, heads, tile_tokens, window, sinks, wanted, counters = unpack(args, 10)
    plan = carray(pointer(plan_at), num_seqs + 2 + counters, np.int64)
    starts = carray(pointer(starts_at), num_seqs + 1, np.int32)
    lens = carray(pointer(lens_at), num_seqs, np.int32)
    plan[num_seqs + 2 :] = 0
    for split in range(2):
        total = 0
        for b in range(num_seqs):
            plan[b] = total
            num_tokens = np.int64(starts[b + 1] - starts[b])
            num_tiles = (num_tokens + tile_tokens - 1) // tile_tokens
            total += num_tiles * heads * (num_parts(lens[b], num_tokens, window, sinks) if split else 1)
        plan[num_seqs], plan[num_seqs + 1] = total, split
        if total >= wanted:
            return


PLAN = Task(_plan)


@inline
def _find(plan: Any, num_seqs: int, unit: int) -> int:
    low, high = 0, num_seqs
    while high - low > 1:
        middle = (low + high) // 2
        if plan[middle] <= unit:
            low = middle
        else:
            high = middle
    return low


@inline
def _buffers(at: int, rows: int, padded: int, num_pairs: int) -> Any:
    """Where things lie in a thread's scratch: (job, floats, words, steps, scores, weights, word steps, offset,
    key places, value places, key params, value params, total, record, shares, copies).
    """
    record = rows * (padded + 2)
    job = at
    floats = job + JOB_BYTES
    words = floats + 4 * rows * padded
    steps = words + 2 * rows * padded
    scores = steps + 8 * rows
    weights = scores + 4 * rows * PARTITION
    word_steps = weights + 2 * rows * PARTITION
    offset = word_steps + 4 * rows * (PARTITION // KEYS)
    places = (offset + 4) // 64 * 64 + 64
    params = places + 16 * PARTITION
    total = params + 16 * PARTITION
    shares = total + 8 * record
    copies = (shares + 8 * rows * num_pairs) // 64 * 64 + 64
    return (job, floats, words, steps, scores, weights, word_steps, offset, places, places + 8 * PARTITION, params,
            params + 8 * PARTITION, total, total + 4 * record, shares, copies)  # fmt: skip


@inline
def _mean_shares(query: int, mean: Any, out: int) -> None:
    """What a query makes of its head's key mean: float32 (of the cosine, of the sine) of each pair, as
    ops.KeyMean has them. `mean` = (the head's vector, the head's pairs, their number, R / 2).
    """
    vector, pairs, count, half = mean
    index = carray(pointer(pairs), count, np.int32)
    x, b = carray(pointer(query), 2 * half, np.float32), carray(pointer(vector), 2 * half, np.float32)
    share = carray(pointer(out), 2 * count, np.float32)
    for p in range(count):
        i = np.int64(index[p])
        share[2 * p] = x[i] * b[i] + x[i + half] * b[i + half]
        share[2 * p + 1] = x[i + half] * b[i] - x[i] * b[i + half]


@inline
def _add_mean(scores: int, rows: int, first: int, end: int, shares: int, count: int, pairs: int, table: int,
              positions: int) -> None:  # fmt: skip
    """The key mean's part of the scores of keys first .. end; `table` begins at the partition's first position."""
    index = carray(pointer(pairs), count, np.int32)
    for r in range(rows):
        s = carray(pointer(scores + 4 * r * PARTITION), PARTITION, np.float32)
        share = carray(pointer(shares + 8 * r * count), 2 * count, np.float32)
        for p in range(count):
            at = table + 8 * np.int64(index[p]) * positions
            cos = carray(pointer(at), PARTITION, np.float32)
            sin = carray(pointer(at + 4 * positions), PARTITION, np.float32)
            of_cos, of_sin = share[2 * p], share[2 * p + 1]
            for i in range(first, end):
                s[i] = fma(of_sin, sin[i], fma(of_cos, cos[i], s[i]))


@inline
def _prepare_queries(source: int, stride: int, group: int, dim: int, padded: int, scale: Any, rows: int, floats: int,
                     words: int, limit: int, small: int, steps: int, mean: Any, shares: int,
                     hadamard: int) -> None:  # fmt: skip
    """Queries times `scale`, filled up with 0; and, unless `limit` is 0, as words, or bytes if `small`, up to `limit`.
    `mean`: see _mean_shares.
    """
    for r in range(rows):
        x = carray(pointer(source + r // group * stride + 4 * (r % group) * dim), dim, np.float32)
        row = carray(pointer(floats + 4 * r * padded), padded, np.float32)
        for i in range(dim):
            row[i] = x[i] * scale
        for i in range(dim, padded):
            row[i] = 0
        _mean_shares(floats + 4 * r * padded, mean, shares + 8 * r * mean[2])
        if hadamard:
            turn_hadamard(floats + 4 * r * padded, dim)
        sizes = (padded // 8, limit, steps + 8 * r)
        if limit and small:
            tile(SMALL, 1, (floats + 4 * r * padded, words + r * padded, *sizes))
        elif limit:
            tile(WORDS, 1, (floats + 4 * r * padded, words + 2 * r * padded, *sizes))


@inline
def _merge(total: int, record: int, rows: int, padded: int) -> None:
    """Add a partition's record to the total's."""
    for r in range(rows):
        at = 4 * r * padded
        sizes = (padded // 8, 4 * (rows * padded + r) - at, 4 * (rows * (padded + 1) + r) - at)
        tile(MERGE, 1, (total + at, record + at, *sizes))


@inline
def _finish(total: int, rows: int, padded: int, group: int, dim: int, out: int, stride: int) -> None:
    """Outputs divided by their sums, to `out`."""
    sums = carray(pointer(total), rows * (padded + 2), np.float32)
    for r in range(rows):
        y = carray(pointer(out + r // group * stride + 4 * (r % group) * dim), dim, np.float32)
        inverse = np.float32(1) / sums[rows * (padded + 1) + r]
        for i in range(dim):
            y[i] = sums[r * padded + i] * inverse


@inline
def _write(at: int, values: Any) -> None:
    """The opposite of `unpack`."""
    items = carray(pointer(at), len(values), np.int64)
    for i in range(len(values)):
        items[i] = values[i]


def _attend(args: int, scratch: int, index: int) -> None:
    """One unit."""
    (plan_at, num_seqs, starts_at, lens_at, tables, table_stride, q, q_stride, scale_bits, out, records, counters,
     heads, group, dim, padded, block_size, window, sinks, tile_tokens, hadamard, num_pairs, vectors, pairs, half,
     angles, positions, score, k_data, k_params, k_bytes, k_direct, k_limit, value, v_data, v_params, v_bytes,
     v_direct) = unpack(args, 38)  # fmt: skip
    plan = carray(pointer(plan_at), num_seqs + 2, np.int64)
    if index >= plan[num_seqs]:
        return
    starts, split = carray(pointer(starts_at), num_seqs + 1, np.int32), plan[num_seqs + 1]
    b = _find(plan, num_seqs, index)
    start, length = np.int64(starts[b]), np.int64(carray(pointer(lens_at), num_seqs, np.int32)[b])
    table = carray(pointer(tables + 4 * b * table_stride), table_stride, np.int32)
    num_new, at = np.int64(starts[b + 1]) - start, index - plan[b]
    parts = num_parts(length, num_new, window, sinks) if split else 1
    part, head, first_token = at % parts, at // parts % heads, at // parts // heads * tile_tokens
    num_tokens = min(tile_tokens, num_new - first_token)
    position, token = length - num_new + first_token, start + first_token
    first_key, end_key = max(0, position - window + 1) if window else 0, position + num_tokens
    if first_key <= sinks:
        first_key = 0
    rows, record_bytes = num_tokens * group, 4 * tile_tokens * group * (padded + 2)
    (job, floats, words, steps, scores, weights, word_steps, offset, k_places, v_places, k_scales, v_scales, total,
     other, shares, copies) = _buffers(scratch, tile_tokens * group, padded, num_pairs)  # fmt: skip
    pairs += 4 * head * num_pairs

    source = q + token * q_stride + 4 * head * group * dim
    scale = bits_to_float(np.uint32(scale_bits))
    mean = (vectors + 4 * head * dim, pairs, num_pairs, half)
    few = rows <= DIRECT_ROWS
    _prepare_queries(source, q_stride, group, dim, padded, scale, rows, floats, words, k_limit,
                     k_direct & few and k_limit <= SMALL_QUERY, steps, mean, shares, hadamard)  # fmt: skip
    first_part, end_part = 0 if sinks else first_key // PARTITION, (end_key + PARTITION - 1) // PARTITION
    if split:
        first_part = part if part * PARTITION < sinks else part + skipped_parts(length - num_new, window, sinks)
        end_part, total = first_part + 1, records + index * record_bytes
    queries = words if k_limit else floats
    of_keys = (k_data, k_bytes, k_params, k_places, k_scales)
    of_values = (v_data, v_bytes, v_params, v_places, v_scales)
    here = (table, heads, head, block_size)
    p, where = first_part, span(first_part, first_key, end_key, sinks)
    locate(*here, *where, *of_keys)
    while p < end_part:
        begin, first, end, hidden, _ = where
        after = p + 1 if (p + 1) * PARTITION < sinks else max(p + 1, first_key // PARTITION)
        where = span(after, first_key, end_key, sinks)
        locate(*here, begin, first, end, hidden, first_key - begin, *of_values)
        if after < end_part and k_params:
            ask_for(*here, where[0] + where[1], where[0] + where[2], k_params, 4)
        shape, record = (rows, dim, padded, first, end), total if p == first_part else other
        lines = ((v_bytes + 63) // 64, v_places)
        _write(job, (*shape, k_places, k_scales, k_direct & few, queries, steps, scores, *lines))
        call(score, job, copies, 0)
        if num_pairs:
            _add_mean(scores, rows, first, end, shares, num_pairs, pairs, angles + 4 * begin, positions)
        num_next = 0
        if after < end_part:
            locate(*here, *where, *of_keys)
            num_next = (where[2] - where[1]) * (k_direct & few)
            if v_params:
                ask_for(*here, where[0] + where[1], where[0] + where[2], v_params, 4)
        of_rows = (group, position - begin, window, sinks - begin, scores, weights, word_steps, offset, record)
        following = (k_places + 8 * where[1], num_next, (k_bytes + 63) // 64)
        _write(job, (*shape, v_places, v_scales, v_direct & few, *of_rows, *following))
        call(value, job, copies, 0)
        if p > first_part:
            _merge(total, other, rows, padded)
        p = after
    if split:
        if add(counters + 8 * (index - part), 1) < parts - 1:
            return
        total = records + (index - part) * record_bytes
        for p in range(1, parts):
            _merge(total, total + p * record_bytes, rows, padded)
    _finish(total, rows, padded, group, dim, out + 4 * (token * heads + head) * group * dim, 4 * heads * group * dim)


ATTEND = Task(_attend)


def _storage(isa: Isa, cache: KVTensor, dim: int, *, keys: bool) -> tuple[int, int, int, int]:
    """(data, params or 0, bytes in a row, 1 if few rows may read it directly)."""
    assert cache.data.is_contiguous()
    assert cache.params.is_contiguous()
    row_bytes = cache.data.shape[3] * cache.data.element_size()
    params = cache.params.data_ptr() if cache.dtype.coded else 0
    return cache.data.data_ptr(), params, row_bytes, int(reads_directly(isa, cache.dtype, dim, keys=keys))


def _query_limit(kind: KVDtype, dim: int) -> int:
    """The largest word of a query for keys of a kind; 0 if it stays float. Sums of products with codes fit int32."""
    if kind == INT4:
        return small_query_limit(dim)
    return min(LARGEST_WORD, (2**31 - 1) // (255 * dim)) if kind.has_minimum else 0


def _keys(cache: KVTensor) -> tuple[int, int, int, int, int, int, int]:
    """(1 if keys are turned by Hadamard's matrix, pairs of a head's key mean, and, if there are any, the addresses of
    vectors and pairs, R / 2, the address of the angles, positions)."""
    mean = cache.mean
    if mean is None:
        return int(cache.hadamard), 0, 0, 0, 0, 0, 0
    half, _, positions = mean.table.shape
    sizes = mean.vector.data_ptr(), mean.pairs.data_ptr(), half, mean.table.data_ptr(), positions
    return int(cache.hadamard), mean.pairs.shape[1], *sizes


def _max_units(num_tokens: int, num_seqs: int, heads: int, tile_tokens: int, max_parts: int) -> tuple[int, int]:
    """(at most so many units, the number of tiles below which they are split), known from shapes alone."""
    tiles = heads * min(num_tokens, num_tokens // tile_tokens + num_seqs)
    fewest = heads * max(num_seqs, -(-num_tokens // tile_tokens))
    wanted = UNITS_PER_THREAD * threads.num_threads()
    if fewest >= wanted or max_parts == 1:
        return tiles, 0
    return max(tiles, min(tiles, wanted - 1) * max_parts), wanted


def paged_attention(
    isa: Isa,
    q: Tensor,
    k_cache: KVTensor,
    v_cache: KVTensor,
    geometry: BatchGeometry,
    spec: AttentionSpec,
) -> Tensor:
    dtype, window, block_tables = q.dtype, spec.window, geometry.block_tables
    q, query_start, context_lens = rows_of(q), geometry.query_start.contiguous(), geometry.context_lens.contiguous()
    assert block_tables.dtype == query_start.dtype == context_lens.dtype == torch.int32
    assert block_tables.stride(1) == 1 or block_tables.shape[1] == 1
    num_tokens, num_heads, dim = q.shape
    num_seqs, heads, max_keys = len(context_lens), k_cache.data.shape[1], block_tables.shape[1] * k_cache.block_size
    group, padded = num_heads // heads, -(-dim // isa.float_tile) * isa.float_tile
    tile_tokens = min(max(1, TILE_ROWS // group), num_tokens - num_seqs + 1)
    sinks, max_parts = spec.sinks if window else 0, -(-max_keys // PARTITION)
    if window:
        max_parts = min(max_parts, (sinks + window + num_tokens - num_seqs + 1) // PARTITION + 3)
    units, wanted = _max_units(num_tokens, num_seqs, heads, tile_tokens, max_parts)
    counters = units if wanted else 0
    plan = workspace.empty(num_seqs + 2 + counters, dtype=torch.int64)
    records = workspace.empty(counters * tile_tokens * group * (padded + 2))
    out = workspace.empty(num_tokens, num_heads, dim)
    sequences = (plan.data_ptr(), num_seqs, query_start.data_ptr(), context_lens.data_ptr())
    threads.run(PLAN, 1, (*sequences, heads, tile_tokens, window, sinks, wanted, counters), parallel=False)
    threads.run(
        ATTEND,
        units,
        (*sequences, block_tables.data_ptr(), block_tables.stride(0), q.data_ptr(), 4 * q.stride(0),
         float_bits(spec.scale), out.data_ptr(), address(records), plan.data_ptr() + 8 * (num_seqs + 2), heads, group,
         dim, padded,
         k_cache.block_size, window, sinks, tile_tokens, *_keys(k_cache),
         score_task(isa, k_cache.dtype).address, *_storage(isa, k_cache, dim, keys=True),
         _query_limit(k_cache.dtype, dim),
         value_task(isa, v_cache.dtype).address, *_storage(isa, v_cache, dim, keys=False)),
        parallel=num_tokens * max_keys * num_heads * dim > SERIAL_PRODUCTS,
        scratch=_buffers.py_func(0, tile_tokens * group, padded, _keys(k_cache)[1])[-1] + copy_bytes(padded),
    )  # fmt: skip
    return as_type(out, dtype)


def implementation(isa: Isa) -> Implementation:
    return Implementation(f"cpu.{isa.name}", "cpu", functools.partial(paged_attention, isa), accepts_heads, priority=20)


def after_append(isa: Isa) -> Implementation:
    """`paged_attention` behind `rope_append`: two programs."""

    def rope_paged_attention(
        q: Tensor, k: Tensor, v: Tensor, cos: Tensor, sin: Tensor, k_cache: KVTensor, v_cache: KVTensor,
        geometry: BatchGeometry, spec: AttentionSpec,
    ) -> Tensor:  # fmt: skip
        rope_append(q, k, v, cos, sin, k_cache, v_cache, geometry.slots)
        return paged_attention(isa, q, k_cache, v_cache, geometry, spec)

    return Implementation(f"cpu.{isa.name}", "cpu", rope_paged_attention, accepts_rope, priority=20)
