"""The arguments of the tasks of paged attention, and the layout of a thread's scratch: see attention.py."""

from __future__ import annotations

from typing import NamedTuple

from lmkit.kernels.cpu.attention_tiles import KEYS
from lmkit.kernels.cpu.jit import inline
from lmkit.kernels.cpu.structs import num_bytes

PARTITION = 256  # keys of one softmax step


class Sequences(NamedTuple):
    plan: int  # address, int64: see _plan
    num_seqs: int
    starts: int  # addresses of query_start and context_lens
    lens: int


class PlanArgs(NamedTuple):
    sequences: Sequences
    heads: int  # KV heads
    tile_tokens: int
    window: int
    sinks: int
    wanted: int  # tiles are split if there are fewer than this
    counters: int  # number of counters


class Storage(NamedTuple):
    """The storage of keys or of values."""

    stage: int  # address of the task that reads them: score_task, value_task
    few_stage: int  # the same for few rows
    data: int
    params: int  # 0: there are none
    param_bytes: int  # of a row
    lowest: int  # bits of the minimum of rows of levels, in scales; 0: minima are stored
    row_bytes: int
    direct: int  # 1: few rows may read it directly


class Mean(NamedTuple):
    """The mean of keys. Without one, all fields but the number of pairs are 0."""

    stage: int = 0  # address of the task that adds it: mean_task
    num_pairs: int = 0  # of a head
    vectors: int = 0
    pairs: int = 0
    half: int = 0  # R / 2
    angles: int = 0
    positions: int = 0


class Queries(NamedTuple):
    """The queries, and bytes between tokens, between the query heads of two KV heads, and between these heads."""

    q: int
    stride: int
    head_bytes: int
    row_bytes: int
    scale_bits: int
    are_turned: int  # 1: their shares follow each row (attention_queries.py)


FLOATS, WORDS, BYTES, FLOAT_PLANES, WORD_PLANES = range(5)  # forms of queries, see prepare_queries
FORM_BYTES = 4, 2, 1, 4, 2  # of each number of a query


class AttendArgs(NamedTuple):
    """Strides are in bytes. Fields named like tensors are addresses."""

    sequences: Sequences
    tables: int
    table_width: int
    queries: Queries
    softcap_bits: int
    sink_logits: int  # float32 by query head, or 0
    out: int
    records: int
    counters: int
    heads: int  # KV heads
    group: int  # query heads of each
    dim: int
    padded: int  # dim, filled up to whole vectors
    tasks: int
    block_size: int
    window: int
    sinks: int
    tile_tokens: int
    strip: int  # rows of a strip
    hadamard: int  # 1: keys are Hadamard-transformed
    query_limit: int  # see _query_limit
    query_form: int
    few_query_form: int
    mean: Mean
    first_keys: int  # vectors that position 0 lacks, or 0
    first_values: int
    stage_bytes: int  # of each stage's scratch
    keys: Storage
    values: Storage


class Buffers(NamedTuple):
    """Addresses in a thread's scratch."""

    job: int  # arguments of a stage
    floats: int
    words: int  # queries in any other form
    steps: int
    scores: int
    weights: int
    word_steps: int
    offset: int
    key_places: int
    value_places: int
    key_params: int
    value_params: int
    total: int  # the record of a tile
    other: int  # of a strip
    shares: int  # for each row, those of attention_queries.py
    first_scores: int  # of the key of position 0
    angle_places: int
    copies: int  # after all others


class Partition(NamedTuple):
    """The arguments that both stages have in common."""

    rows: int
    dim: int
    padded: int  # dim, filled up to whole vectors
    first: int  # keys first .. end of the partition are computed
    end: int


class ScoreArgs(NamedTuple):
    partition: Partition
    places: int  # of keys
    params: int  # scales and minima of keys
    direct: int  # 1: the storage is read, 0: copies of it are read
    queries: int
    steps: int  # of queries as words
    scores: int  # float32 [rows, PARTITION], written
    value_lines: int  # cache lines of each value, to prefetch
    value_places: int
    fresh: int  # panels of keys first .. fresh are written; the others are in the stage's scratch


class ValueArgs(NamedTuple):
    partition: Partition
    places: int  # of values
    params: int
    direct: int
    group: int  # rows of a token
    position: int  # position of the first row's token; like `sinks`, counted from the partition's begin
    skipped: int  # rows of that token before the first row
    window: int
    sinks: int
    scores: int
    words: int  # the weights of codes, as int16
    word_steps: int
    offset: int  # a float32
    record: int  # written: outputs, maxima and sums
    maxima: int
    sums: int
    fresh: int
    next_places: int  # keys of the next partition, to prefetch
    num_next: int
    next_lines: int


class MeanArgs(NamedTuple):
    rows: int
    first: int  # keys first .. end of the partition at position `begin` are computed
    end: int
    begin: int
    shares: int  # float32 [rows, num_shares]: the factors of the angles come first
    num_shares: int
    places: int  # of the angles of all positions, one for each factor
    num_angles: int
    scores: int  # float32 [rows, PARTITION], added to


JOB_BYTES = -(-max(num_bytes(ScoreArgs), num_bytes(ValueArgs)) // 64) * 64


@inline
def buffers(at: int, rows: int, strip: int, padded: int, num_pairs: int) -> Buffers:
    record = (4 * rows * (padded + 2) + 63) // 64 * 64
    other = (4 * strip * (padded + 2) + 63) // 64 * 64
    job = at
    floats = job + JOB_BYTES
    words = floats + 4 * rows * padded
    steps = words + 4 * rows * padded
    scores = (steps + 8 * rows + 63) // 64 * 64
    weights = scores + 4 * strip * PARTITION
    word_steps = weights + 2 * strip * PARTITION
    offset = word_steps + 4 * strip * (PARTITION // KEYS)
    places = (offset + 4 + 63) // 64 * 64
    params = places + 16 * PARTITION
    total = params + 16 * PARTITION
    shares = total + record + other
    first_scores = shares + 4 * rows * (2 * num_pairs + 1)
    angle_places = (first_scores + 4 * strip + 7) // 8 * 8
    copies = (angle_places + 16 * num_pairs + 63) // 64 * 64
    return Buffers(job, floats, words, steps, scores, weights, word_steps, offset, places, places + 8 * PARTITION,
                   params, params + 8 * PARTITION, total, total + record, shares, first_scores, angle_places,
                   copies)  # fmt: skip
