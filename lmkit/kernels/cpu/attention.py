"""Paged attention on the CPU (ops.paged_attention): one path for prefill, chunked prefill and decode.

A *tile* is a few consecutive tokens of one sequence times the query heads that share one KV head. All rows of a tile
read the same keys. Keys are cut into partitions of 256. attention_stages.py computes one partition at a time, and the
partitions are merged in order (Flash-Decoding; the online softmax of Milakov and Gimelshein, arXiv 1805.02867).
Partitions begin at multiples of their size, independent of the batch. A row therefore adds up the same numbers in the
same order in every batch, chunk and split, and masked keys add exact zeros. With a sliding window, partitions between
the sinks and the window are skipped. Keys that no row of a tile sees are not read, because their blocks may be in use
for something else.

A tile's rows take turns in *strips*, whose scores fit the first-level cache. Its first strip copies the keys and values
of a partition for all others. A strip ends with the last key that it sees.

A *unit* is the work of one task. Usually it is a tile. If there are too few tiles to keep all threads busy (decode of
few sequences), it is one partition of a tile, and the task that finishes a tile's last partition merges them.

A *record* is a partial result: outputs [rows, padded D], then each row's maximum score times log2(e), then its sum.
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
from lmkit.kernels.cpu.attention_arguments import (
    FLOATS,
    FORM_BYTES,
    PARTITION,
    AttendArgs,
    Mean,
    MeanArgs,
    Partition,
    PlanArgs,
    ScoreArgs,
    Sequences,
    ValueArgs,
    buffers,
)
from lmkit.kernels.cpu.attention_keys import ask_for, locate, num_parts, skipped_parts, span
from lmkit.kernels.cpu.attention_queries import prepare_queries, queries_of
from lmkit.kernels.cpu.attention_stages import mean_task
from lmkit.kernels.cpu.attention_storage import DIRECT_ROWS, query_form, query_limit, scratch_bytes, storage, tile_rows
from lmkit.kernels.cpu.attention_tiles import LOG2_E
from lmkit.kernels.cpu.intrinsics import add, call, copy, exp, fma, pointer, tile
from lmkit.kernels.cpu.isa import Isa
from lmkit.kernels.cpu.jit import Task, float_bits, inline
from lmkit.kernels.cpu.kv import rope_append, rows_of
from lmkit.kernels.cpu.panels import address, as_type
from lmkit.kernels.cpu.structs import numbers, read, write
from lmkit.kernels.ops import BatchGeometry, KeyMean, KVTensor
from lmkit.kernels.reference.elementwise import accepts_rope
from lmkit.kernels.reference.kv import accepts_heads
from lmkit.kernels.registry import Implementation

UNITS_PER_THREAD = 4  # with fewer tiles, partitions become units
SERIAL_PRODUCTS = 1 << 20
MERGE, SOFTCAP = attention_rows.merge_tile().name, attention_rows.softcap_tile().name


def _plan(args: int, scratch: int, index: int) -> None:
    """Write the plan: plan[b] is the first unit of sequence b, plan[B] the number of units, plan[B + 1] is 1 if tiles
    are split. The counters follow the plan and become 0.
    """
    a = read(args, PlanArgs)
    num_seqs = a.sequences.num_seqs
    plan = carray(pointer(a.sequences.plan), num_seqs + 2 + a.counters, np.int64)
    starts = carray(pointer(a.sequences.starts), num_seqs + 1, np.int32)
    lens = carray(pointer(a.sequences.lens), num_seqs, np.int32)
    plan[num_seqs + 2 :] = 0
    for split in range(2):
        total = 0
        for b in range(num_seqs):
            plan[b] = total
            num_tokens = np.int64(starts[b + 1] - starts[b])
            num_tiles = (num_tokens + a.tile_tokens - 1) // a.tile_tokens
            total += num_tiles * a.heads * (num_parts(lens[b], num_tokens, a.window, a.sinks) if split else 1)
        plan[num_seqs], plan[num_seqs + 1] = total, split
        if total >= a.wanted:
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
def _locate_angles(mean: Mean, head: int, places: int) -> None:
    """Write the places of the cosines and sines of a head's pairs."""
    size = mean.num_pairs
    index = carray(pointer(mean.pairs + 4 * head * size), size, np.int32)
    at = carray(pointer(places), 2 * size, np.int64)
    for p in range(size):
        at[2 * p] = mean.angles + 8 * np.int64(index[p]) * mean.positions
        at[2 * p + 1] = at[2 * p] + 4 * mean.positions


@inline
def _add_first_keys(scores: int, rows: int, shares: int, num_shares: int) -> None:
    """Add to the scores of position 0 what its key lacks: the last of a row's shares."""
    for r in range(rows):
        s = carray(pointer(scores + 4 * r * PARTITION), 1, np.float32)
        s[0] += carray(pointer(shares + 4 * r * num_shares), num_shares, np.float32)[num_shares - 1]


@inline
def _weight(score: Any, maximum: Any) -> Any:
    """A score's weight, as `softmax_tile` computes them, for a maximum of a record."""
    return exp(fma(score, np.float32(LOG2_E), -maximum) * np.float32(1 / LOG2_E))


@inline
def _add_first_values(vector: int, dim: int, first_scores: int, record: int, maxima_at: int, rows: int, padded: int,
                      seeing: int) -> None:  # fmt: skip
    """Add what the value of position 0 lacks to the outputs of the first `seeing` rows."""
    v = carray(pointer(vector), dim, np.float32)
    maxima = carray(pointer(maxima_at), rows, np.float32)
    scores = carray(pointer(first_scores), rows, np.float32)
    for r in range(min(rows, seeing)):
        weight = _weight(scores[r], maxima[r])
        y = carray(pointer(record + 4 * r * padded), dim, np.float32)
        for i in range(dim):
            y[i] = fma(weight, v[i], y[i])


@inline
def _merge(total: int, rows: int, row: int, record: int, count: int, padded: int) -> None:
    """Add a record of `count` rows to as many rows of a total of `rows`, from `row` on."""
    into, ends, ends_of_record = total + 4 * row * padded, total + 4 * rows * padded, record + 4 * count * padded
    places = (into, ends + 4 * row, ends + 4 * (rows + row), record, ends_of_record, ends_of_record + 4 * count)
    tile(MERGE, 1, (*places, count, padded // 8))


@inline
def _finish(total: int, rows: int, padded: int, group: int, dim: int, sink_logits: int, out: int, stride: int) -> None:
    """Write the outputs, divided by their sums, to `out`. `sink_logits`: those of the rows' heads, or 0."""
    sums = carray(pointer(total), rows * (padded + 2), np.float32)
    for r in range(rows):
        y = carray(pointer(out + r // group * stride + 4 * (r % group) * dim), dim, np.float32)
        sum_of_weights = sums[rows * (padded + 1) + r]
        if sink_logits:
            logit = carray(pointer(sink_logits), group, np.float32)[r % group]
            sum_of_weights += _weight(logit, sums[rows * padded + r])
        inverse = np.float32(1) / sum_of_weights
        for i in range(dim):
            y[i] = sums[r * padded + i] * inverse


@inline
def _attend_unit(a: AttendArgs, scratch: int, index: int) -> None:
    num_seqs, window, sinks, group, dim, padded = a.sequences.num_seqs, a.window, a.sinks, a.group, a.dim, a.padded
    plan = carray(pointer(a.sequences.plan), num_seqs + 2, np.int64)
    starts, split = carray(pointer(a.sequences.starts), num_seqs + 1, np.int32), plan[num_seqs + 1]
    b = _find(plan, num_seqs, index)
    start, length = np.int64(starts[b]), np.int64(carray(pointer(a.sequences.lens), num_seqs, np.int32)[b])
    table = carray(pointer(a.tables + 4 * b * a.table_width), a.table_width, np.int32)
    num_new, at = np.int64(starts[b + 1]) - start, index - plan[b]
    parts = num_parts(length, num_new, window, sinks) if split else 1
    part, head, first_token = at % parts, at // parts % a.heads, at // parts // a.heads * a.tile_tokens
    num_tokens = min(a.tile_tokens, num_new - first_token)
    position, token = length - num_new + first_token, start + first_token
    first_key, end_key = max(0, position - window + 1) if window else 0, position + num_tokens
    if first_key <= sinks:
        first_key = 0
    rows, record_bytes = num_tokens * group, 4 * a.tile_tokens * group * (padded + 2)
    memory = buffers(scratch, a.tile_tokens * group, a.strip, padded, a.mean.num_pairs)
    job, scores, total = memory.job, memory.scores, memory.total

    source = a.queries.q + token * a.queries.stride + head * a.queries.head_bytes
    few = rows <= DIRECT_ROWS
    form = a.few_query_form if few else a.query_form
    first_part, end_part = 0 if sinks else first_key // PARTITION, (end_key + PARTITION - 1) // PARTITION
    if split:
        first_part = part if part * PARTITION < sinks else part + skipped_parts(length - num_new, window, sinks)
        end_part, total = first_part + 1, a.records + index * record_bytes
    queries, query_bytes = memory.floats if form == FLOATS else memory.words, FORM_BYTES[form] * padded
    num_shares = 2 * a.mean.num_pairs + 1
    key_stage, value_stage = a.keys.stage, a.values.stage
    if few:
        key_stage, value_stage = a.keys.few_stage, a.values.few_stage
    of_keys = (a.keys.data, a.keys.row_bytes, a.keys.params, a.keys.lowest, memory.key_places, memory.key_params)
    of_values = (
        a.values.data, a.values.row_bytes, a.values.params, a.values.lowest, memory.value_places, memory.value_params
    )  # fmt: skip
    here = (table, a.heads, head, a.block_size)
    p, where = first_part, span(first_part, first_key, end_key, sinks)
    asked = where[0] + where[1], where[0] + where[2]
    if few:  # what they read first comes while the queries are prepared
        ask_for(*here, *asked, a.keys.data, a.keys.row_bytes)
    if a.keys.params:
        ask_for(*here, *asked, a.keys.params, a.keys.param_bytes)
        ask_for(*here, *asked, a.values.params, a.values.param_bytes)
    prepare_queries(a, source, head, rows, form, memory)
    _locate_angles(a.mean, head, memory.angle_places)
    locate(*here, *where, *of_keys)
    while p < end_part:
        begin, first, end, hidden, _ = where
        after = p + 1 if (p + 1) * PARTITION < sinks else max(p + 1, first_key // PARTITION)
        where = span(after, first_key, end_key, sinks)
        locate(*here, begin, first, end, hidden, first_key - begin, *of_values)
        if after < end_part and a.keys.params:
            ask_for(*here, where[0] + where[1], where[0] + where[2], a.keys.params, a.keys.param_bytes)
        has_first, row, fresh, num_next = begin == 0 and first == 0 and end > 0, 0, end, 0
        while row < rows:
            count = min(a.strip, rows - row)
            seen = position + (row + count - 1) // group + 1 - begin
            if seen <= first and p > first_part:
                row += count
                continue
            shape = Partition(count, dim, padded, first, min(end, seen) if seen > first else end)
            of_row = memory.shares + 4 * row * num_shares
            write(job, ScoreArgs(
                shape, places=memory.key_places, params=memory.key_params, direct=a.keys.direct & few,
                queries=queries + row * query_bytes, steps=memory.steps + 8 * row, scores=scores,
                value_lines=(a.values.row_bytes + 63) // 64, value_places=memory.value_places, fresh=fresh,
            ))  # fmt: skip
            call(key_stage, job, memory.copies, 0)
            if a.mean.num_pairs:
                write(job, MeanArgs(
                    count, first, shape.end, begin, of_row, num_shares, memory.angle_places, num_shares - 1, scores
                ))  # fmt: skip
                call(a.mean.stage, job, memory.copies, 0)
            if has_first and a.first_keys:
                _add_first_keys(scores, count, of_row, num_shares)
            if a.softcap_bits:
                for r in range(count):
                    at_first, chunks = scores + 4 * (r * PARTITION + first), (shape.end - first + 7) // 8
                    tile(SOFTCAP, 1, (at_first, chunks, a.softcap_bits))
            if has_first:  # the next stage overwrites the scores
                for r in range(count):
                    copy(scores + 4 * r * PARTITION, memory.first_scores + 4 * r, 4)
            if row + count == rows and after < end_part:
                locate(*here, *where, *of_keys)
                num_next = where[2] - where[1]
                if a.values.params:
                    ask_for(*here, where[0] + where[1], where[0] + where[2], a.values.params, a.values.param_bytes)
            record, maxima, of_rows = memory.other, memory.other + 4 * count * padded, count
            if p == first_part:
                record, maxima, of_rows = total + 4 * row * padded, total + 4 * (rows * padded + row), rows
            write(job, ValueArgs(
                shape, places=memory.value_places, params=memory.value_params, direct=a.values.direct & few,
                group=group, position=position + row // group - begin, skipped=row % group, window=window,
                sinks=sinks - begin, scores=scores, words=memory.weights, word_steps=memory.word_steps,
                offset=memory.offset, record=record, maxima=maxima, sums=maxima + 4 * of_rows, fresh=fresh,
                next_places=memory.key_places + 8 * where[1], num_next=num_next,
                next_lines=(a.keys.row_bytes + 63) // 64,
            ))  # fmt: skip
            call(value_stage, job, memory.copies + a.stage_bytes, 0)
            if has_first and a.first_values:
                seeing = rows if sinks or window == 0 else max(0, window - position) * group
                of_head = a.first_values + 4 * head * dim
                _add_first_values(of_head, dim, memory.first_scores, record, maxima, count, padded, seeing - row)
            if p > first_part:
                _merge(total, rows, row, memory.other, count, padded)
            row, fresh = row + count, 0
        p = after
    if split:
        if add(a.counters + 8 * (index - part), 1) < parts - 1:
            return
        total = a.records + (index - part) * record_bytes
        for p in range(1, parts):
            _merge(total, rows, 0, total + p * record_bytes, rows, padded)
    stride = 4 * a.heads * group * dim
    logits = a.sink_logits + 4 * head * group if a.sink_logits else 0
    _finish(total, rows, padded, group, dim, logits, a.out + token * stride + 4 * head * group * dim, stride)


def _attend(args: int, scratch: int, index: int) -> None:
    """Compute every `tasks`-th unit from `index` on."""
    a = read(args, AttendArgs)
    num_units = carray(pointer(a.sequences.plan), a.sequences.num_seqs + 1, np.int64)[a.sequences.num_seqs]
    while index < num_units:
        _attend_unit(a, scratch, index)
        index += a.tasks


ATTEND = Task(_attend)


def _mean(isa: Isa, mean: KeyMean | None) -> Mean:
    if mean is None:
        return Mean()
    half, _, positions = mean.table.shape
    pairs = mean_task(isa).address, mean.pairs.shape[1], mean.vector.data_ptr(), mean.pairs.data_ptr()
    return Mean(*pairs, half, mean.table.data_ptr(), positions)


def _tile_tokens(num_tokens: int, heads: int, group: int, least: int, most: int) -> int:
    """Tokens of a tile. The more rows, the fewer copies of keys and values, but all threads shall have tiles."""
    while most > least and heads * num_tokens * group < UNITS_PER_THREAD * threads.num_threads() * most:
        most //= 2
    return max(1, most // group)


def _max_units(num_tokens: int, num_seqs: int, heads: int, tile_tokens: int, max_parts: int) -> tuple[int, int]:
    """(upper bound of units, number of tiles below which tiles are split), known from shapes alone."""
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
    sink_logits: Tensor | None = None,
) -> Tensor:
    sink_logits = None if sink_logits is None else sink_logits.float()
    dtype, window, block_tables = q.dtype, spec.window, geometry.block_tables
    q, query_start, context_lens = rows_of(q), geometry.query_start.contiguous(), geometry.context_lens.contiguous()
    assert block_tables.dtype == query_start.dtype == context_lens.dtype == torch.int32
    assert block_tables.stride(1) == 1 or block_tables.shape[1] == 1
    num_tokens, num_heads, dim = q.shape
    num_seqs, heads, max_keys = len(context_lens), k_cache.data.shape[1], block_tables.shape[1] * k_cache.block_size
    group, padded = num_heads // heads, -(-dim // isa.value_tile) * isa.value_tile
    least, most, strip = tile_rows(isa, k_cache.dtype, v_cache.dtype, dim)
    tile_tokens = min(_tile_tokens(num_tokens, heads, group, least, most), num_tokens - num_seqs + 1)
    strip = min(strip, tile_tokens * group) if least < most else tile_tokens * group
    sinks, max_parts = spec.sinks if window else 0, -(-max_keys // PARTITION)
    if window:
        max_parts = min(max_parts, (sinks + window + num_tokens - num_seqs + 1) // PARTITION + 3)
    units, wanted = _max_units(num_tokens, num_seqs, heads, tile_tokens, max_parts)
    tasks = min(units, 2 * wanted) if wanted else units  # most units of short contexts do not exist
    counters = units if wanted else 0
    plan = workspace.empty(num_seqs + 2 + counters, dtype=torch.int64)
    records = workspace.empty(counters * tile_tokens * group * (padded + 2))
    out = workspace.empty(num_tokens, num_heads, dim)
    sequences = Sequences(plan.data_ptr(), num_seqs, query_start.data_ptr(), context_lens.data_ptr())
    mean = _mean(isa, k_cache.mean)
    queries, _kept = queries_of(isa, q, k_cache, mean, spec.scale)
    to_plan = PlanArgs(sequences, heads, tile_tokens, window, sinks, wanted, counters)
    threads.run(PLAN, 1, numbers(to_plan), parallel=False)
    args = AttendArgs(
        sequences,
        tables=block_tables.data_ptr(), table_width=block_tables.stride(0), queries=queries,
        softcap_bits=float_bits(spec.softcap),
        sink_logits=address(sink_logits), out=out.data_ptr(),
        records=address(records), counters=plan.data_ptr() + 8 * (num_seqs + 2), heads=heads, group=group, dim=dim,
        padded=padded, tasks=tasks, block_size=k_cache.block_size, window=window, sinks=sinks, tile_tokens=tile_tokens,
        strip=strip, hadamard=int(k_cache.hadamard), query_limit=query_limit(k_cache.dtype, dim),
        query_form=query_form(isa, k_cache.dtype, dim, few=False),
        few_query_form=query_form(isa, k_cache.dtype, dim, few=True), mean=mean,
        first_keys=address(k_cache.first), first_values=address(v_cache.first), stage_bytes=scratch_bytes(isa, padded),
        keys=storage(isa, k_cache, dim, keys=True), values=storage(isa, v_cache, dim, keys=False),
    )  # fmt: skip
    threads.run(
        ATTEND,
        tasks,
        numbers(args),
        parallel=num_tokens * max_keys * num_heads * dim > SERIAL_PRODUCTS,
        scratch=buffers.py_func(0, tile_tokens * group, strip, padded, mean.num_pairs).copies
        + 2 * scratch_bytes(isa, padded),
    )
    return as_type(out, dtype)


def implementation(isa: Isa) -> Implementation:
    return Implementation(f"cpu.{isa.name}", "cpu", functools.partial(paged_attention, isa), accepts_heads, priority=20)


def after_append(isa: Isa) -> Implementation:
    """`paged_attention` after `rope_append`, as two programs."""

    def rope_paged_attention(
        q: Tensor, k: Tensor, v: Tensor, cos: Tensor, sin: Tensor, k_cache: KVTensor, v_cache: KVTensor,
        geometry: BatchGeometry, spec: AttentionSpec, sink_logits: Tensor | None = None,
        positions: Tensor | None = None,
    ) -> Tensor:  # fmt: skip
        rope_append(q, k, v, cos, sin, k_cache, v_cache, geometry.slots, positions)
        return paged_attention(isa, q, k_cache, v_cache, geometry, spec, sink_logits)

    return Implementation(f"cpu.{isa.name}", "cpu", rope_paged_attention, accepts_rope, priority=20)
