"""The two stages of attention over one partition of keys: scores, then their softmax and the weighted sum of values.

There is one task for each storage type and instruction set. A few rows read the storage directly. Many rows share a
copy of each block, widened in the cache. Both give the same bits, because widening and sums of codes are exact. If rows
take turns in strips, the first strip copies all blocks of the partition, which stay in the stage's scratch.
"""

from __future__ import annotations

import functools

import numpy as np
from numba import carray

from lmkit.kernels.cpu import attention_rows
from lmkit.kernels.cpu import attention_tiles as tiles
from lmkit.kernels.cpu.attention_arguments import PARTITION, MeanArgs, ScoreArgs, ValueArgs
from lmkit.kernels.cpu.attention_panels import GROUP, LINE, float_panel_tile, key_panel_tile, panel_score_tile
from lmkit.kernels.cpu.attention_tiles import BYTES, KEYS
from lmkit.kernels.cpu.intrinsics import fma, pointer, tile
from lmkit.kernels.cpu.isa import Isa
from lmkit.kernels.cpu.jit import Task, float_bits, inline
from lmkit.kernels.cpu.structs import read
from lmkit.kv_dtype import FLOAT32, INT4, KVDtype

SPACING = 64  # bytes after each copied row: power-of-two strides would fall into few cache sets
NO_SCORE = np.float32(-1e38)  # the maximum of no scores; finite, so that the difference of two is 0
NO_SCORE_BITS = float_bits(float(NO_SCORE))
PREFETCH = attention_rows.prefetch_tile().name


def scratch_bytes(padded: int) -> int:
    """Bytes of a stage's scratch: the places of a block's copied rows, or of a panel's rows, and a partition's rows."""
    return 8 * max(KEYS, padded) + PARTITION * (4 * padded + SPACING)


@inline
def _fill_places(places: int, count: int, first: int, step: int) -> None:
    at = carray(pointer(places), count, np.int64)
    for i in range(count):
        at[i] = first + i * step


@inline
def scale_rows(name: str, a: ScoreArgs) -> None:
    """Scale the scores of all rows by `name`, a scale_tile."""
    rows, _, _, first, end = a.partition
    whole = (end - first + KEYS - 1) // KEYS * KEYS
    for r in range(rows):
        score = a.scores + 4 * (r * PARTITION + first)
        tile(name, 1, (score, whole, a.steps + 8 * r, a.params + 4 * first, 4 * PARTITION))


@inline
def softmax_rows(name: str, a: ValueArgs, row: int, end_row: int, coded: bool) -> None:
    """Turn the scores of some rows into weights by `name`, a softmax_tile, and begin their parts of the record."""
    _, _, padded, first, end = a.partition
    blocks = (end - first + KEYS - 1) // KEYS
    for r in range(row, end_row):
        last = a.position + (a.skipped + r) // a.group
        low = max(first, last - a.window + 1) if a.window else first
        limits = (low, min(end, last + 1), a.sinks, first, blocks, NO_SCORE_BITS, a.maxima + 4 * r, a.sums + 4 * r)
        words, steps = a.words + 2 * r * PARTITION, a.word_steps + 4 * r * (PARTITION // KEYS)
        tile(name, 1, (a.scores + 4 * r * PARTITION, *limits, words, steps, a.params, 4 * PARTITION, a.offset))
        sums = carray(pointer(a.record + 4 * r * padded), padded, np.float32)
        sums[:] = carray(pointer(a.offset), 1, np.float32)[0] if coded else np.float32(0)


@functools.cache
def score_task(isa: Isa, kind: KVDtype) -> Task:
    """Write scores [rows, PARTITION] of the keys first .. end of a partition."""
    form, scaled = tiles.WORDS if kind.has_minimum else FLOAT32, kind.coded
    stored, copied = (tiles.score_tile(isa, name).name for name in (kind, form))
    scale = attention_rows.scale_tile(isa, kind).name
    copy, element = attention_rows.copy_tile(kind, form).name, BYTES[form]
    chunk, stored_chunk = (tiles.key_chunk(isa, of_rows) for of_rows in (form, kind))
    narrow = kind.has_short_codes  # queries are bytes if the storage is read, and words if copies are

    def scores(args: int, scratch: int, index: int) -> None:
        a = read(args, ScoreArgs)
        rows, dim, padded, first, end = a.partition
        direct, places = a.direct, a.places
        ldk = element * padded
        ldq = padded if direct and narrow else ldk
        copies = scratch + 8 * KEYS
        if not direct:
            _fill_places(scratch, KEYS, copies, ldk + SPACING)
        for block in range(first, end, KEYS):
            fours = (min(KEYS, end - block) + 3) // 4
            at = places + 8 * block
            if not direct:
                tile(copy, 1, (at, copies, ldk + SPACING, 4 * fours, dim, padded))
            for four in range(0, fours, 4):
                count, key = min(4, fours - four), block + 4 * four
                if direct:
                    tile(PREFETCH, 1, (a.value_places + 8 * key, min(16, end - key), a.value_lines))
                r = 0
                while r < rows:
                    of_rows, score = a.queries + r * ldq, a.scores + 4 * (r * PARTITION + key)
                    if direct:
                        sizes = (4 * PARTITION, dim // stored_chunk, count)
                        r += tile(stored, rows - r, (of_rows, ldq, at + 32 * four, score, *sizes))
                    else:
                        sizes = (4 * PARTITION, padded // chunk, count)
                        r += tile(copied, rows - r, (of_rows, ldq, scratch + 32 * four, score, *sizes))
        if scaled:
            scale_rows(scale, a)

    return Task(scores)


@functools.cache
def float_score_task(isa: Isa, kind: KVDtype) -> Task:
    """The same scores of many rows and numbers, from panels of floats."""
    panel, product = float_panel_tile(isa, kind).name, panel_score_tile(isa).name
    scaled, scale, width, lanes = kind.coded, attention_rows.scale_tile(isa, kind).name, 2 * isa.lanes, isa.lanes

    def scores(args: int, scratch: int, index: int) -> None:
        a = read(args, ScoreArgs)
        rows, dim, padded, first, end = a.partition
        ldq, ldk = 4 * padded, 4 * padded  # bytes of a query, and of each key of a panel
        waiting = scratch + PARTITION * ldk  # SPACING for each key is enough
        for key in range(first, a.fresh, width):
            tile(panel, 1, (a.places + 8 * key, scratch + (key - first) * ldk, dim, padded))
        for key in range(first, end, width):
            of_keys, r = scratch + (key - first) * ldk, 0
            while r < rows:
                score = a.scores + 4 * (r * PARTITION + key)
                sizes = (4 * PARTITION, padded // lanes, waiting)
                r += tile(product, rows - r, (a.queries + r * ldq, ldq, of_keys, score, *sizes))
        if scaled:
            scale_rows(scale, a)

    return Task(scores)


@functools.cache
def code_score_task(isa: Isa, kind: KVDtype) -> Task:
    """The same scores of many rows and codes, from key panels."""
    panel, scale = key_panel_tile(kind, wide=True).name, attention_rows.scale_tile(isa, kind).name
    product, width = tiles.product_tile(isa, tiles.PAIRS, raw=True).name, 2 * isa.lanes

    def scores(args: int, scratch: int, index: int) -> None:
        a = read(args, ScoreArgs)
        rows, dim, padded, first, end = a.partition
        keys, ldq, ldk = scratch + 8 * padded, 2 * padded, (dim // 2 + GROUP - 1) // GROUP * GROUP * LINE // KEYS
        _fill_places(scratch, padded, keys, LINE // 2)  # two places for each row, a pair
        for block in range(first, a.fresh, KEYS):
            for key in range(0, min(KEYS, a.fresh - block), GROUP):
                tile(panel, 1, (a.places + 8 * (block + key), keys + (block - first) * ldk + 4 * key, dim))
        for block in range(first, end, KEYS):
            for key in range(0, min(KEYS, end - block), width):
                column, r = (block - first) * ldk + 4 * key, 0
                while r < rows:
                    queries, score = a.queries + r * ldq, a.scores + 4 * (r * PARTITION + block + key)
                    sizes = (4 * PARTITION, 2 * width, dim // 4, 0, 0)
                    r += tile(product, rows - r, (queries, ldq, scratch, column, score, *sizes))
        scale_rows(scale, a)

    return Task(scores)


@functools.cache
def mean_task(isa: Isa) -> Task:
    """Add the key mean's part to the scores of keys first .. end of a partition: factors times angles."""
    product, width = attention_rows.mean_tile(isa).name, isa.lanes

    def add_means(args: int, scratch: int, index: int) -> None:
        a = read(args, MeanArgs)
        chunks, ld, r = (a.end - a.first) // width, 4 * a.num_shares, 0
        whole = a.first + chunks * width
        while r < a.rows:
            of_keys = (4 * (a.begin + a.first), a.scores + 4 * (r * PARTITION + a.first), 4 * PARTITION)
            r += tile(product, a.rows - r, (a.shares + r * ld, ld, a.places, *of_keys, chunks, a.num_angles))
        at = carray(pointer(a.places), a.num_angles, np.int64)
        for r in range(a.rows):
            s = carray(pointer(a.scores + 4 * r * PARTITION), PARTITION, np.float32)
            share = carray(pointer(a.shares + r * ld), a.num_angles, np.float32)
            for i in range(a.num_angles):
                angles = carray(pointer(at[i] + 4 * a.begin), PARTITION, np.float32)
                for key in range(whole, a.end):
                    s[key] = fma(share[i], angles[key], s[key])

    return Task(add_means)


@functools.cache
def value_task(isa: Isa, kind: KVDtype) -> Task:
    """record = the partial result (see attention.py) from the scores and values first .. end of a partition."""
    coded = kind.has_minimum
    form = tiles.PAIRS if coded else FLOAT32
    stored, copied = tiles.product_tile(isa, kind).name, tiles.product_tile(isa, form).name
    copy, softmax = attention_rows.copy_tile(kind, form).name, tiles.softmax_tile(isa, kind).name
    width, per_place, per_turn = isa.value_tile, 2 if coded else 1, 4 if coded else 1
    # A panel is two vectors of columns. They are neighbours, or for int4 the two nibbles of one vector of bytes.
    apart = 4 * isa.lanes
    stored_width = isa.lanes if kind == INT4 else width
    element, weight_bytes = BYTES[kind], 2 if coded else 4

    def values(args: int, scratch: int, index: int) -> None:
        a = read(args, ValueArgs)
        rows, dim, padded, first, end = a.partition
        direct, record, words, word_steps = a.direct, a.record, a.words, a.word_steps
        ldc, ldw = 4 * padded, weight_bytes * PARTITION
        softmax_rows(softmax, a, 0, rows, coded)
        weights, copies, ldv = words if coded else a.scores, scratch + 8 * KEYS, (ldc + SPACING) // per_place
        if not direct:
            _fill_places(scratch, KEYS, copies, ldv)
            tile(PREFETCH, 1, (a.next_places, a.num_next, a.next_lines))
            for block in range(first, a.fresh, KEYS):
                count = (min(KEYS, a.fresh - block) + per_turn - 1) // per_turn * (per_turn // per_place)
                at = a.places + 8 * block
                tile(copy, 1, (at, copies + (block - first) * ldv, ldc + SPACING, count, dim, padded))
        for block in range(first, end, KEYS):
            count = (min(KEYS, end - block) + per_turn - 1) // per_turn
            at = a.places + 8 * block
            of_block = weights + weight_bytes * block
            steps = word_steps + 4 * (block // KEYS)
            lds = 4 * (PARTITION // KEYS)
            if direct:
                panels = dim // width
                share = (KEYS + panels - 1) // panels
                for panel in range(panels):
                    ahead = block - first + panel * share
                    tile(PREFETCH, 1, (a.next_places + 8 * ahead, min(share, a.num_next - ahead), a.next_lines))
                    column, r = panel * stored_width, 0
                    while r < rows:
                        out = record + r * ldc + 4 * column
                        x = (of_block + r * ldw, ldw, at, element * column)
                        gap = 2 * dim if stored_width < width else apart
                        r += tile(stored, rows - r, (*x, out, ldc, gap, count, steps + r * lds, lds))
            else:
                for panel in range(padded // width):
                    column, r = panel * width, 0
                    while r < rows:
                        out = record + r * ldc + 4 * column
                        x = (of_block + r * ldw, ldw, scratch, (block - first) * ldv + 4 * column)
                        r += tile(copied, rows - r, (*x, out, ldc, apart, count, steps + r * lds, lds))

    return Task(values)
