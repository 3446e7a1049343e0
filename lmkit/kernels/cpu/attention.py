"""Paged attention on the CPU (ops.paged_attention): one path for prefill, chunked prefill and decode.

A *tile* is a few consecutive tokens of one sequence times the query heads that share one KV head: its rows read the
same keys. Keys are taken in blocks of 64, widened to float32 in the cache; blocks make partitions of 256. Within a
partition the softmax is online (Milakov and Gimelshein, arXiv 1805.02867); partitions are merged in order
(Flash-Decoding). Blocks and partitions begin at multiples of their size, whatever the batch: a row adds up the same
numbers in the same order in every batch, chunk and split, and masked keys add exact zeros.

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

from lmkit.kernels.cpu import threads, tiles, workspace
from lmkit.kernels.cpu.intrinsics import (
    add,
    bits_to_float,
    exp,
    fma,
    pointer,
    tile,
    unpack,
)
from lmkit.kernels.cpu.isa import Isa
from lmkit.kernels.cpu.jit import Task, float_bits, inline
from lmkit.kernels.cpu.kv import read_rows, rows_of, storage
from lmkit.kernels.cpu.panels import address, as_type
from lmkit.kernels.ops import KVTensor
from lmkit.kernels.reference.kv import accepts_heads
from lmkit.kernels.registry import Implementation

KEYS, PARTITION = 64, 256
TILE_ROWS = 48  # aimed at: enough to pay for widening the keys
UNITS_PER_THREAD = 4  # with fewer tiles, partitions become units
SERIAL_PRODUCTS = 1 << 20
NO_SCORE = np.float32(-3e38)  # the maximum of no scores: finite, so that two of them differ by 0


def _plan(args: int, scratch: int, index: int) -> None:
    """plan[b] = the first unit of sequence b, plan[B] = the number of units, plan[B + 1] = 1 if tiles are split,
    plan[B + 2] = at most the number of products of a query with a key.
    """
    plan_at, num_seqs, starts_at, lens_at, heads, tile_tokens, wanted = unpack(args, 7)
    plan = carray(pointer(plan_at), num_seqs + 5, np.int64)
    starts = carray(pointer(starts_at), num_seqs + 1, np.int32)
    lens = carray(pointer(lens_at), num_seqs, np.int32)
    plan[num_seqs + 2] = 0
    for b in range(num_seqs):
        plan[num_seqs + 2] += np.int64(starts[b + 1] - starts[b]) * lens[b]
    for split in range(2):
        total = 0
        for b in range(num_seqs):
            plan[b] = total
            num_tiles = (starts[b + 1] - starts[b] + tile_tokens - 1) // tile_tokens
            total += num_tiles * heads * ((lens[b] + PARTITION - 1) // PARTITION if split else 1)
        plan[num_seqs], plan[num_seqs + 1] = total, split
        if total >= wanted:
            break
    plan[num_seqs + 3], plan[num_seqs + 4] = plan[num_seqs], 1


PLAN = Task(_plan)
KEEP = []


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
def _read_keys(kind: int, data: int, params: int, table: Any, block_size: int, heads: int, head: int, first: int,
               count: int, dim: int, padded: int, target: int) -> None:  # fmt: skip
    """Keys (or values) first .. first + count of a sequence to float32 [count, padded]; the padding is 0."""
    done = 0
    while done < count:  # the rows of one KV block are contiguous
        offset = (first + done) % block_size
        run = min(count - done, block_size - offset)
        where = (np.int64(table[(first + done) // block_size]) * heads + head) * block_size + offset
        read_rows(kind, data, params, where, run, dim, padded, target + 4 * done * padded)
        done += run


@inline
def _clear(record: int, rows: int, padded: int) -> None:
    values = carray(pointer(record), rows * (padded + 2), np.float32)
    values[:] = 0
    values[rows * padded : rows * (padded + 1)] = NO_SCORE


@inline
def _merge(total: int, record: int, rows: int, padded: int) -> None:
    """Add a partition's record to the total's."""
    both = rows * (padded + 2)
    a, b = carray(pointer(total), both, np.float32), carray(pointer(record), both, np.float32)
    for r in range(rows):
        at_max, at_sum = rows * padded + r, rows * (padded + 1) + r
        maximum = max(a[at_max], b[at_max])
        keep, take_ = exp(a[at_max] - maximum), exp(b[at_max] - maximum)
        a[at_max] = maximum
        a[at_sum] = fma(b[at_sum], take_, a[at_sum] * keep)
        for i in range(r * padded, r * padded + padded):
            a[i] = fma(b[i], take_, a[i] * keep)


@functools.cache
def attend_task(isa: Isa) -> Task:
    """The task of one unit."""
    score, product = tiles.score_tile(isa).name, tiles.float_tile(isa).name
    softmax, width, lanes = tiles.softmax_tile(isa, KEYS).name, isa.float_tile, isa.lanes

    def attend(args: int, scratch: int, index: int) -> None:
        (plan_at, num_seqs, starts_at, lens_at, tables, table_stride, q, q_stride, scale_bits, out, records, counters,
         heads, group, dim, padded, block_size, window, tile_tokens, k_kind, k_data, k_params, v_kind, v_data,
         v_params) = unpack(args, 25)  # fmt: skip
        plan = carray(pointer(plan_at), num_seqs + 2, np.int64)
        starts = carray(pointer(starts_at), num_seqs + 1, np.int32)
        split = plan[num_seqs + 1]
        if index >= plan[num_seqs]:
            return
        b = _find(plan, num_seqs, index)
        start, length = np.int64(starts[b]), np.int64(carray(pointer(lens_at), num_seqs, np.int32)[b])
        table = carray(pointer(tables + 4 * b * table_stride), table_stride, np.int32)
        parts = (length + PARTITION - 1) // PARTITION if split else 1
        at = index - plan[b]
        part, head, first_token = at % parts, at // parts % heads, at // parts // heads * tile_tokens
        num_tokens = min(tile_tokens, starts[b + 1] - start - first_token)
        position = length - (starts[b + 1] - start) + first_token
        first_key = max(0, position - window + 1) if window else 0
        end_key = position + num_tokens
        rows, row_bytes = num_tokens * group, 4 * padded
        record_bytes = 4 * tile_tokens * group * (padded + 2)
        queries, keys = scratch, scratch + tile_tokens * group * row_bytes
        values, scores = keys + KEYS * row_bytes, keys + 2 * KEYS * row_bytes
        total = scores + 4 * tile_tokens * group * KEYS
        record = records + index * record_bytes if split else total + record_bytes

        maxima, totals = record + rows * row_bytes, record + rows * (row_bytes + 4)

        scale = bits_to_float(np.uint32(scale_bits))
        for r in range(rows):
            token = start + first_token + r // group
            source = carray(pointer(q + token * q_stride + 4 * (head * group + r % group) * dim), dim, np.float32)
            row = carray(pointer(queries + r * row_bytes), padded, np.float32)
            for i in range(dim):
                row[i] = source[i] * scale
            for i in range(dim, padded):
                row[i] = 0

        _clear(total, rows, padded)
        first_part, end_part = first_key // PARTITION, (end_key + PARTITION - 1) // PARTITION
        if split:
            first_part, end_part = part, part + 1
        for p in range(first_part, end_part):
            _clear(record, rows, padded)
            first_block = max(first_key // KEYS * KEYS, p * PARTITION)
            for block in range(first_block, min(end_key, (p + 1) * PARTITION), KEYS):
                count = min(KEYS, end_key - block)
                fours = (count + 3) // 4
                _read_keys(k_kind, k_data, k_params, table, block_size, heads, head, block, count, dim, padded, keys)
                carray(pointer(keys + count * row_bytes), (4 * fours - count) * padded, np.float32)[:] = 0
                r = 0
                while r < rows:
                    of_rows, out_rows = queries + r * row_bytes, scores + 4 * r * KEYS
                    sizes = (4 * KEYS, padded // lanes, fours)
                    r += tile(score, rows - r, (of_rows, row_bytes, keys, row_bytes, out_rows, *sizes))
                for r in range(rows):
                    last = position + r // group
                    low = last - window + 1 - block if window else 0
                    high = min(count, last + 1 - block)
                    place, sums = scores + 4 * r * KEYS, record + r * row_bytes
                    tile(softmax, 1, (place, low, high, maxima + 4 * r, totals + 4 * r, sums, padded // lanes))
                _read_keys(v_kind, v_data, v_params, table, block_size, heads, head, block, count, dim, padded, values)
                for column in range(0, padded, width):
                    r = 0
                    while r < rows:
                        weights, sums = scores + 4 * r * KEYS, record + r * row_bytes + 4 * column
                        given = (weights, 4 * KEYS, values + 4 * column, row_bytes, sums, row_bytes, count)
                        r += tile(product, rows - r, given)
            if not split:
                _merge(total, record, rows, padded)
        if split:
            if (add(counters + 8 * (index - part), 1) + 1) % parts:
                return
            for p in range(parts):
                _merge(total, records + (index - part + p) * record_bytes, rows, padded)

        sums = carray(pointer(total), rows * (padded + 2), np.float32)
        for r in range(rows):
            token = start + first_token + r // group
            y = carray(pointer(out + 4 * ((token * heads + head) * group + r % group) * dim), dim, np.float32)
            inverse = np.float32(1) / sums[rows * (padded + 1) + r]
            for i in range(dim):
                y[i] = sums[r * padded + i] * inverse

    return Task(attend)


def paged_attention(
    isa: Isa,
    q: Tensor,
    k_cache: KVTensor,
    v_cache: KVTensor,
    block_tables: Tensor,
    query_start: Tensor,
    context_lens: Tensor,
    scale: float,
    window: int,
) -> Tensor:
    dtype = q.dtype
    q, query_start, context_lens = rows_of(q), query_start.contiguous(), context_lens.contiguous()
    assert block_tables.dtype == query_start.dtype == context_lens.dtype == torch.int32
    assert block_tables.stride(1) == 1 or block_tables.shape[1] == 1
    num_tokens, num_heads, dim = q.shape
    num_seqs, heads = context_lens.shape[0], k_cache.data.shape[1]
    group, padded = num_heads // heads, -(-dim // isa.float_tile) * isa.float_tile
    tile_tokens = min(max(1, TILE_ROWS // group), num_tokens - num_seqs + 1)
    plan = workspace.empty(num_seqs + 5, dtype=torch.int64)
    sequences = (plan.data_ptr(), num_seqs, query_start.data_ptr(), context_lens.data_ptr())
    threads.run(PLAN, 1, (*sequences, heads, tile_tokens, UNITS_PER_THREAD * threads.num_threads()), parallel=False)
    wanted = UNITS_PER_THREAD * threads.num_threads()
    parts = -(-block_tables.shape[1] * k_cache.block_size // PARTITION)
    units = (-(-num_tokens // tile_tokens) + num_seqs) * heads
    if units < wanted + num_seqs * heads:
        units *= parts
    record = tile_tokens * group * (padded + 2)
    records = workspace.empty(units * record)
    counters = torch.zeros(units, dtype=torch.int64)
    KEEP.append(counters)
    out = workspace.empty(num_tokens, num_heads, dim)
    threads.run(
        attend_task(isa),
        units,
        (*sequences, block_tables.data_ptr(), block_tables.stride(0), q.data_ptr(), 4 * q.stride(0), float_bits(scale),
         out.data_ptr(), address(records), counters.data_ptr(), heads, group, dim, padded, k_cache.block_size,
         window, tile_tokens, *storage(k_cache), *storage(v_cache)),
        parallel=True,
        scratch=4 * (padded * (tile_tokens * group + 2 * KEYS) + tile_tokens * group * KEYS + 2 * record),
    )  # fmt: skip
    return as_type(out, dtype)


def implementation(isa: Isa) -> Implementation:
    return Implementation(f"cpu.{isa.name}", "cpu", functools.partial(paged_attention, isa), accepts_heads, priority=20)
