"""The keys that attention computes, partition by partition, and their places in the blocks of the cache."""

from __future__ import annotations

from typing import Any

import numpy as np
from numba import carray

from lmkit.kernels.cpu import attention_rows
from lmkit.kernels.cpu.attention_arguments import PARTITION
from lmkit.kernels.cpu.attention_tiles import KEYS
from lmkit.kernels.cpu.intrinsics import pointer, prefetch, tile
from lmkit.kernels.cpu.jit import inline

PARAMS, SCALES = (attention_rows.params_tile(levels=levels).name for levels in (False, True))


@inline
def skipped_parts(position: int, window: int, sinks: int) -> int:
    """Partitions between the sinks and the windows of queries from `position` on."""
    first_key = max(0, position - window + 1) if window else 0
    return max(0, first_key // PARTITION - (sinks + PARTITION - 1) // PARTITION)


@inline
def num_parts(length: int, num_tokens: int, window: int, sinks: int) -> int:
    """The number of partitions with any key that the last `num_tokens` queries of a sequence see."""
    skipped: int = skipped_parts(length - num_tokens, window, sinks)
    return (length + PARTITION - 1) // PARTITION - skipped


@inline
def span(part: int, first_key: int, end_key: int, sinks: int) -> Any:
    """(begin, first, end, hidden, seen) of a partition. `begin` is its position; the others count from there. Keys
    first .. end are computed, none if first >= end. Of these, no row sees hidden .. seen, between sinks and first_key.
    """
    begin = part * PARTITION
    first = 0 if begin < sinks else max(first_key // KEYS * KEYS - begin, 0)
    end = end_key if begin + PARTITION > first_key else sinks
    return begin, first, max(0, min(end - begin, PARTITION)), sinks - begin, first_key - begin


@inline
def locate(table: Any, heads: int, head: int, block_size: int, start: int, first: int, end: int, hidden: int,
           seen: int, data: int, row_bytes: int, params: int, lowest: int, places: int,
           params_at: int) -> None:  # fmt: skip
    """Write the places of the rows of keys (or values) start + first .. start + end. The last place is repeated up to
    the end of a block. For codes, write their scales and minima too, 0 up to the end of a block. Keys `hidden` ..
    `seen` get the place of `seen` and scale 0.
    """
    at = carray(pointer(places), PARTITION, np.int64)
    scales = carray(pointer(params_at), PARTITION, np.float32)
    minima = carray(pointer(params_at + 4 * PARTITION), PARTITION, np.float32)
    key = first
    while key < end:
        if hidden <= key < seen:
            key = seen
        offset = (start + key) % block_size
        run = min((hidden if key < hidden < end else end) - key, block_size - offset)
        row = (np.int64(table[(start + key) // block_size]) * heads + head) * block_size + offset
        place = data + row * row_bytes
        for i in range(run):
            at[key + i] = place
            place += row_bytes
        if lowest:
            tile(SCALES, 1, (params + 2 * row, run, params_at + 4 * key, 4 * PARTITION, lowest))
        elif params:
            tile(PARAMS, 1, (params + 4 * row, run, params_at + 4 * key, 4 * PARTITION, 0))
        key += run
    for i in range(max(first, hidden), min(seen, end)):
        at[i] = at[seen]
        scales[i], minima[i] = 0, 0
    for i in range(end, (end + KEYS - 1) // KEYS * KEYS):  # none if end is 0
        at[i] = at[end - 1]
        scales[i], minima[i] = 0, 0


@inline
def ask_for(table: Any, heads: int, head: int, block_size: int, key: int, end: int, data: int, row_bytes: int) -> None:
    """Prefetch the rows of keys `key` .. `end`."""
    while key < end:
        offset = key % block_size
        run = min(end - key, block_size - offset)
        row = (np.int64(table[key // block_size]) * heads + head) * block_size + offset
        for line in range((run * row_bytes + 63) // 64):
            prefetch(data + row * row_bytes + 64 * line)
        key += run
