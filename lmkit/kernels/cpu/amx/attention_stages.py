"""The stages of attention_stages.py on tile registers, for many rows, and for any number of rows of float types.

Each stage copies the keys or values of a partition into panels and takes 16 rows at a time. Sums of codes are exact, so
a few rows may as well read int8 and int4 from the storage: the bits are the same. Products of bfloat16 are summed in an
order of their own, so all rows of bfloat16 and fp8 come here.
"""

from __future__ import annotations

import functools

from lmkit.kernels.cpu import attention_rows
from lmkit.kernels.cpu.amx import attention_tiles as tiles
from lmkit.kernels.cpu.amx.tile_file import ROW_BYTES, ROWS, configure_tile, release_tile
from lmkit.kernels.cpu.attention_arguments import PARTITION, ScoreArgs, ValueArgs
from lmkit.kernels.cpu.attention_panels import LINE, key_panel_tile
from lmkit.kernels.cpu.attention_stages import PREFETCH, scale_rows, softmax_rows
from lmkit.kernels.cpu.attention_tiles import KEYS, softmax_tile
from lmkit.kernels.cpu.intrinsics import tile
from lmkit.kernels.cpu.isa import Isa
from lmkit.kernels.cpu.jit import Task
from lmkit.kernels.cpu.structs import read
from lmkit.kv_dtype import KVDtype


def scratch_bytes(padded: int) -> int:
    """Bytes of a stage's scratch: the panels of a partition's keys or values, at most of bfloat16."""
    return tiles.WORKSPACE + 2 * PARTITION * padded


@functools.cache
def score_task(isa: Isa, kind: KVDtype) -> Task:
    """Write scores [rows, PARTITION] of the keys first .. end of a partition."""
    coded, scaled, planes = kind.has_minimum, kind.coded, 1 if kind.has_short_codes else 2
    configure, release = configure_tile(isa, ROW_BYTES).name, release_tile(isa).name
    product = (tiles.code_product_tile(isa, planes=planes, scaled=False) if coded else tiles.product_tile(isa)).name
    panel, scale = key_panel_tile(kind, wide=False).name, attention_rows.scale_tile(isa, kind).name
    element, step = (1, 64) if coded else (2, 32)  # bytes of a plane's element, inputs of a K step

    def scores(args: int, scratch: int, index: int) -> None:
        a = read(args, ScoreArgs)
        rows, dim, padded, first, end = a.partition
        keys, low, steps = scratch + tiles.WORKSPACE, element * padded, (dim + step - 1) // step
        ldq, configured = planes * low, 0
        for key in range(first, a.fresh, ROWS):
            tile(PREFETCH, 1, (a.value_places + 8 * key, min(ROWS, a.fresh - key), a.value_lines))
            column = (key - first) % KEYS
            tile(panel, 1, (a.places + 8 * key, keys + (key - first - column) * (2 * padded) + 4 * column, dim))
        for block in range(first, end, KEYS):
            count, at_block = min(KEYS, end - block), keys + (block - first) * (2 * padded)
            columns = (count + ROWS - 1) // ROWS
            for r in range(0, rows, ROWS):
                height = min(ROWS, rows - r)
                if height != configured:
                    tile(configure, 1, (scratch, height))
                    configured = height
                j, queries, score = 0, a.queries + r * ldq, a.scores + 4 * (r * PARTITION + block)
                while j < columns:
                    at = (at_block + ROW_BYTES * j, LINE, score + ROW_BYTES * j, 4 * PARTITION, steps)
                    if coded:
                        j += tile(product, columns - j, (scratch, queries, ldq, low, *at, height, 0, 0))
                    else:
                        j += tile(product, columns - j, (scratch, queries, ldq, ROW_BYTES, low, *at))
        tile(release, 1, (scratch,))
        if scaled:
            scale_rows(scale, a)

    return Task(scores)


@functools.cache
def value_task(isa: Isa, kind: KVDtype) -> Task:
    """record = the partial result (see attention.py) from the scores and values first .. end of a partition."""
    coded = kind.has_minimum
    configure, release = configure_tile(isa, ROW_BYTES).name, release_tile(isa).name
    product = (tiles.code_product_tile(isa, planes=2, scaled=True) if coded else tiles.product_tile(isa)).name
    panel, softmax = tiles.value_panel_tile(kind).name, softmax_tile(isa, kind, planes=True).name
    together = 4 if coded else 2  # values in a row of the panel

    def values(args: int, scratch: int, index: int) -> None:
        a = read(args, ValueArgs)
        rows, dim, padded, first, end = a.partition
        panels, ld = scratch + tiles.WORKSPACE, 4 * padded
        blocks, columns, lds = (end - first + KEYS - 1) // KEYS, dim // ROWS, 4 * (PARTITION // KEYS)
        configured = 0
        tile(PREFETCH, 1, (a.next_places, a.num_next, a.next_lines))
        for key in range(first, a.fresh, KEYS):
            at = panels + (key - first) // together * ld
            tile(panel, 1, (a.places + 8 * key, at, ld, KEYS // together, dim))
        for r in range(0, rows, ROWS):
            height = min(ROWS, rows - r)
            if height != configured:
                tile(configure, 1, (scratch, height))
                configured = height
            softmax_rows(softmax, a, r, r + height, coded)
            out, j = a.record + r * ld, 0
            if coded:
                for block in range(blocks):
                    weights = a.words + 2 * (r * PARTITION + first + block * KEYS)
                    of_block = panels + block * (KEYS // together) * ld
                    steps = a.word_steps + 4 * (r * (PARTITION // KEYS) + first // KEYS + block)
                    j = 0
                    while j < columns:
                        right, to = of_block + ROW_BYTES * j, out + ROW_BYTES * j
                        codes = (scratch, weights, 2 * PARTITION, KEYS, right, ld, to, ld, 1, height, steps, lds)
                        j += tile(product, columns - j, codes)
            else:
                weights = a.scores + 4 * (r * PARTITION + first)
                while j < columns:
                    right, to = panels + ROW_BYTES * j, out + ROW_BYTES * j
                    floats = (scratch, weights, 4 * PARTITION, 2 * ROW_BYTES, ROW_BYTES, right, ld, to, ld, 2 * blocks)
                    j += tile(product, columns - j, floats)
        tile(release, 1, (scratch,))

    return Task(values)
