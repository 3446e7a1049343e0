"""PersistentBatch against the same thing written token by token."""

from __future__ import annotations

import random

from lmkit.turbo.plan import Chunk, NewSequence
from lmkit.turbo.request import SamplingParams
from lmkit.turbo.runners.batch import TABLE_KEYS, PersistentBatch

BLOCK = 4


def enter(batch: PersistentBatch, slot: int, tokens: list[int], prompt_logprobs: bool = False) -> None:
    batch.enter(NewSequence(slot, tokens, len(tokens), SamplingParams(), (), prompt_logprobs))


def test_inputs_follow_each_token_to_its_slot() -> None:
    rng = random.Random(1)
    batch = PersistentBatch(num_slots=4, max_model_len=64, block_size=BLOCK, max_step_tokens=128)
    tokens = {slot: [rng.randrange(1000) for _ in range(rng.randrange(1, 60))] for slot in (3, 0, 2)}
    for slot, row in tokens.items():
        enter(batch, slot, row)
    free = rng.sample(range(100), 100)
    tables: dict[int, list[int]] = {slot: [] for slot in tokens}
    done = dict.fromkeys(tokens, 0)
    while any(done[s] < len(tokens[s]) for s in tokens):
        chunks = []
        for slot, row in tokens.items():
            size = min(rng.randrange(0, 9), len(row) - done[slot])
            if size:
                blocks = [free.pop() for _ in range(-(-(done[slot] + size) // BLOCK) - len(tables[slot]))]
                tables[slot] += blocks
                chunks.append(Chunk(slot, done[slot], size, [blocks], int(done[slot] + size == len(row))))
                done[slot] += size
        if not chunks:
            continue
        inputs, rows = batch.inputs(chunks)
        ordered = sorted(chunks, key=lambda chunk: not chunk.num_sampled)  # sequences that sample come first
        flat = [(c, p) for c in ordered for p in range(c.start, c.start + c.num_tokens)]
        assert inputs.token_ids.tolist() == [tokens[c.slot][p] for c, p in flat]
        assert inputs.positions.tolist() == [p for _, p in flat]
        assert inputs.geometries[0].slots.tolist() == [tables[c.slot][p // BLOCK] * BLOCK + p % BLOCK for c, p in flat]
        assert inputs.geometries[0].context_lens.tolist() == [c.start + c.num_tokens for c in ordered]
        assert inputs.geometries[0].query_start.diff().tolist() == [c.num_tokens for c in ordered]
        for table, chunk in zip(inputs.geometries[0].block_tables.tolist(), ordered, strict=True):
            used = -(-(chunk.start + chunk.num_tokens) // BLOCK)
            assert table[:used] == tables[chunk.slot][:used]
        sampled = [c for c in chunks if c.num_sampled]
        if rows is None:  # a decode step
            assert all(c.num_tokens == c.num_sampled == 1 for c in chunks)
        else:
            assert [len(span) for span in rows.sample_rows] == [c.num_sampled for c in chunks]
        ends = [int(inputs.geometries[0].query_start[ordered.index(c) + 1]) - 1 for c in sampled]
        assert inputs.logit_rows.tolist() == ends
        assert inputs.logit_start.tolist() == list(range(len(sampled) + 1))
        wanted = inputs.logit_geometry(0)
        assert wanted.context_lens.tolist() == [c.start + c.num_tokens for c in sampled]
        assert len(wanted.block_tables) == len(sampled)


def test_a_reused_slot_forgets_its_blocks() -> None:
    batch = PersistentBatch(num_slots=1, max_model_len=16, block_size=BLOCK, max_step_tokens=128)
    enter(batch, 0, [1, 2, 3, 4, 5])
    batch.inputs([Chunk(0, 0, 5, [[7, 8]], 1)])
    batch.append(0, 9)
    enter(batch, 0, [6, 6])
    inputs, _ = batch.inputs([Chunk(0, 0, 2, [[3]], 1)])
    assert inputs.geometries[0].slots.tolist() == [12, 13]
    assert inputs.token_ids.tolist() == [6, 6]


def test_a_sequence_that_goes_on_where_another_ended_has_its_own_blocks() -> None:
    """The slot decodes the next position, but nothing else is as it was."""
    batch = PersistentBatch(num_slots=1, max_model_len=16, block_size=BLOCK, max_step_tokens=128)
    enter(batch, 0, [1, 2])
    batch.inputs([Chunk(0, 0, 2, [[7]], 1)])
    batch.append(0, 3)
    batch.inputs([Chunk(0, 2, 1, [], 1)])
    prompt = [1, 2, 3, 4]
    batch.enter(NewSequence(0, prompt, len(prompt), SamplingParams(), (), False, block_tables=[[9]], adapter=5))
    inputs, _ = batch.inputs([Chunk(0, 3, 1, [], 1)])
    assert not batch.keeps_tables
    assert inputs.geometries[0].slots.tolist() == [9 * BLOCK + 3]
    assert inputs.geometries[0].block_tables[0, 0] == 9
    assert inputs.rope_lens.tolist() == [len(prompt)]
    assert inputs.adapters is not None
    assert inputs.adapters.tolist() == [5]


def test_prompt_rows_score_every_prompt_token_once() -> None:
    batch = PersistentBatch(num_slots=2, max_model_len=16, block_size=BLOCK, max_step_tokens=128)
    enter(batch, 0, [10, 11, 12, 13, 14, 15], prompt_logprobs=True)
    enter(batch, 1, [20, 21])
    scored: list[int] = []
    for start, size in ((0, 3), (3, 1), (4, 2)):
        chunk = Chunk(0, start, size, [[start]] if start % BLOCK == 0 else [], int(start + size == 6))
        other = Chunk(1, 0, 2, [[9]] if start == 0 else [], 1)
        inputs, rows = batch.inputs([other, chunk])
        positions = inputs.positions.tolist()
        assert rows is not None
        span = rows.prompt_rows[1]
        assert rows.prompt_rows[0] == range(0)
        assert batch.prompt_targets(chunk, len(span)) == [10 + positions[r] + 1 for r in span]
        scored += [positions[r] for r in span]
    assert scored == [0, 1, 2, 3, 4]


def test_tokens_that_score_are_logit_rows_in_front_of_the_sampled_one() -> None:
    batch = PersistentBatch(num_slots=3, max_model_len=16, block_size=BLOCK, max_step_tokens=128)
    batch.max_scored_rows = 6
    for slot, tables in enumerate(([7, 8], [9], [10, 11])):
        enter(batch, slot, [10 * slot + i for i in range(5)], prompt_logprobs=slot != 1)
        batch._extend_tables(slot, [tables])
    batch.logprobs_start[2] = 3
    chunks = [Chunk(1, 0, 2, [], 0), Chunk(0, 1, 4, [], 1), Chunk(2, 2, 3, [], 1)]
    inputs, rows = batch.inputs(chunks)
    assert rows is not None
    assert inputs.token_ids[inputs.logit_rows].tolist() == [1, 2, 3, 4, 23, 24]
    assert inputs.logit_start.tolist() == [0, 4, 6]
    assert (rows.scored_rows, rows.sample_rows) == (
        [range(0), range(3), range(4, 5)],
        [range(0), range(3, 4), range(5, 6)],
    )
    assert not rows.wants_hidden
    ends_early = [Chunk(0, 0, 2, [], 0), Chunk(2, 2, 3, [], 1)]
    for some, limit in ((ends_early, 6), (chunks, 5)):
        batch.max_scored_rows = limit
        inputs, rows = batch.inputs(some)
        assert rows is not None
        assert rows.wants_hidden
        assert not any(rows.scored_rows)
        assert len(inputs.logit_rows) == sum(chunk.num_sampled for chunk in some)


def test_decode_steps_stay_in_place_and_follow_blocks_and_slots() -> None:
    batch = PersistentBatch(num_slots=3, max_model_len=32, block_size=BLOCK, max_step_tokens=16)
    free = iter(range(40, 100))
    lengths, tables = {2: 1, 0: 1}, {2: [next(free)], 0: [next(free)]}
    for slot in lengths:
        enter(batch, slot, [100 * slot])
    new_blocks = {slot: list(table) for slot, table in tables.items()}
    addresses: dict[int, set[int]] = {}
    for step in range(25):
        if step == 9:  # a third joins in front
            lengths, tables = {1: 1, **lengths}, {1: [next(free)], **tables}
            enter(batch, 1, [5])
            new_blocks[1] = list(tables[1])
        if step == 15:
            del lengths[0]
        chunks = [Chunk(slot, n - 1, 1, [new_blocks.pop(slot, [])], 1) for slot, n in lengths.items()]
        inputs, rows = batch.inputs(chunks)
        assert rows is None
        assert inputs.token_ids.tolist() == [batch.token_ids[slot, n - 1] for slot, n in lengths.items()]
        assert inputs.positions.tolist() == [n - 1 for n in lengths.values()]
        assert inputs.geometries[0].context_lens.tolist() == list(lengths.values())
        assert inputs.geometries[0].query_start.tolist() == list(range(len(lengths) + 1))
        assert inputs.logit_rows.tolist() == list(range(len(lengths)))
        places = [tables[slot][(n - 1) // BLOCK] * BLOCK + (n - 1) % BLOCK for slot, n in lengths.items()]
        assert inputs.geometries[0].slots.tolist() == places
        for table, slot in zip(inputs.geometries[0].block_tables.tolist(), lengths, strict=True):
            assert table[: len(tables[slot])] == tables[slot]
        addresses.setdefault(len(lengths), set()).add(inputs.token_ids.data_ptr())
        for slot in lengths:
            batch.append(slot, 1000 + step)
            lengths[slot] += 1
            if (lengths[slot] - 1) % BLOCK == 0:
                new_blocks[slot] = [next(free)]
                tables[slot] += new_blocks[slot]
    assert all(len(places) == 1 for places in addresses.values())


def test_tables_of_prompt_steps_widen_by_doubling() -> None:
    batch = PersistentBatch(num_slots=1, max_model_len=5 * TABLE_KEYS, block_size=BLOCK, max_step_tokens=8)
    enter(batch, 0, list(range(5 * TABLE_KEYS)))
    widths = {}
    for keys in (8, TABLE_KEYS, TABLE_KEYS + 1, 2 * TABLE_KEYS, 4 * TABLE_KEYS, 5 * TABLE_KEYS):
        inputs, _ = batch.inputs([Chunk(0, keys - 8, 8, [], 0)])
        widths[keys / TABLE_KEYS] = inputs.geometries[0].block_tables.shape[1] * BLOCK / TABLE_KEYS
    assert list(widths.values()) == [1, 1, 2, 2, 4, 5]
