"""A step's inputs on the device are those of the persistent batch, padded, whatever was there before."""

from __future__ import annotations

import random

import numpy as np
import pytest
import torch

from lmkit.layers.batch import BatchInputs
from lmkit.turbo.plan import Chunk, NewSequence
from lmkit.turbo.request import SamplingParams
from lmkit.turbo.runners.batch import PersistentBatch
from lmkit.turbo.runners.captured_sizes import Size
from lmkit.turbo.runners.device import Event
from lmkit.turbo.runners.staging import NUM_STAGED, StagedInputs
from tests.emulator.device import EmulatedDevice

BLOCK = 4


class Deferred(EmulatedDevice):
    """Copies from staging memory happen as late as a stream may make them: when an event after them is waited for."""

    def __init__(self) -> None:
        super().__init__()
        self.waits = 0

    def event(self) -> Event:
        device = self

        class Counted:
            def record(self) -> None: ...
            def elapsed_time(self, end_event: object) -> float:
                return 0.0

            def synchronize(self) -> None:
                device.waits += 1

        return Counted()


def entered(batch: PersistentBatch, slot: int, length: int) -> None:
    batch.enter(NewSequence(slot, list(range(100 * slot, 100 * slot + length)), length, SamplingParams(), (), False))


def same(got: BatchInputs, want: BatchInputs) -> None:
    for name, tensor in want.tensors.items():
        found = got.tensors[name]
        assert found.dtype == tensor.dtype
        assert found.is_contiguous()
        assert found.data_ptr() % 8 == 0
        if name.startswith("block_tables."):
            used = -(-int(want.geometries[0].context_lens.max()) // BLOCK)
            found, tensor = found[: len(tensor), :used], tensor[:, :used]
        assert torch.equal(found[: len(tensor)], tensor), name


def test_steps_of_any_shape_follow_one_another() -> None:
    rng = random.Random(3)
    batch = PersistentBatch(num_slots=6, max_model_len=64, block_size=BLOCK, max_step_tokens=40)
    staged = StagedInputs(Deferred(), 40, 8, 16, has_states=True)
    length, next_block = dict.fromkeys(range(6), 0), 0
    kept = 0
    for _ in range(150):
        slots = rng.sample(range(6), rng.randrange(1, 5)) if rng.random() < 0.3 else list(range(4))
        chunks = []
        for slot in slots:
            if length[slot] == 0 or length[slot] > 50:
                entered(batch, slot, 9)
                length[slot] = 0
                count = 9
            else:
                batch.expect([slot])
                count = 1
            new = -(-(length[slot] + count) // BLOCK) - -(-length[slot] // BLOCK)
            chunks.append(Chunk(slot, length[slot], count, [list(range(next_block, next_block + new))], 1))
            next_block, length[slot] = next_block + new, length[slot] + count
        inputs, rows = batch.inputs(chunks)
        pad = rng.choice([0, 8]) if rows is None and rng.random() < 0.5 else 0
        kept += batch.keeps_tables
        got = staged.put(inputs, Size(pad, pad) if pad else None, keeps_tables=batch.keeps_tables)
        same(got, inputs)
        assert len(got.geometries[0].context_lens) == max(pad, len(chunks))
        if pad:
            count = len(chunks)
            assert got.states is not None
            assert bool((got.states[count:] == -1).all())
            assert got.geometries[0].slots[count:].tolist() == [-1] * (pad - count)
            assert (
                got.geometries[0].context_lens[count:].tolist() == got.token_ids[count:].tolist() == [0] * (pad - count)
            )
            assert got.geometries[0].query_start.tolist() == list(range(pad + 1))
            assert got.logit_rows.tolist() == list(range(pad))
    assert kept > 20


def two_sequences() -> tuple[PersistentBatch, StagedInputs]:
    """Prompts of 5 and 9 tokens in the slots 1 and 3."""
    batch = PersistentBatch(num_slots=6, max_model_len=64, block_size=BLOCK, max_step_tokens=40)
    staged = StagedInputs(Deferred(), 40, 8, 16, has_states=True)
    staged.put(batch.example(30, 1), Size(40, 6), width=16, chosen=[5])  # what lay there before
    for slot, length in ((3, 9), (1, 5)):
        entered(batch, slot, length)
    return batch, staged


def test_a_step_with_prompt_tokens_is_padded_with_tokens_of_no_sequence() -> None:
    batch, staged = two_sequences()
    chunks = [Chunk(1, 4, 1, [[1, 2]], 1), Chunk(3, 0, 6, [[3, 4]], 0)]
    inputs, _ = batch.inputs(chunks)
    got = staged.put(inputs, Size(16, 4), width=16, chosen=[1])
    same(got, inputs)
    (geometry,) = got.geometries
    assert geometry.query_start.tolist() == [0, 1, 7, 7, 7]
    assert geometry.context_lens.tolist() == [5, 6, 0, 0]
    assert geometry.slots[7:].tolist() == [-1] * 9
    assert geometry.block_tables.shape == (4, 16)
    assert not geometry.block_tables[:, 2:].any()
    assert (got.logit_rows.tolist(), got.logit_start.tolist()) == ([0] * 4, [0, 1, 2, 3, 4])
    assert staged.chosen.tolist() == [1, -1, -1, -1]


def test_a_step_with_drafts_has_logits_of_all_tokens() -> None:
    batch, staged = two_sequences()
    chunks = [Chunk(1, 4, 3, [[1, 2]], 3, draft=[7, 8]), Chunk(3, 8, 1, [[3, 4]], 1)]
    inputs, _ = batch.inputs(chunks)
    got = staged.put(inputs, Size(8, 4, drafted=True), width=16, chosen=[1, 1, 1, 3])
    same(got, inputs)
    assert got.wants_all
    assert got.geometries[0].query_start.tolist() == got.logit_start.tolist() == [0, 3, 4, 4, 4]
    assert got.geometries[0].slots[4:].tolist() == [-1] * 4
    assert got.logit_rows.tolist() == [0, 1, 2, 3, 0, 0, 0, 0]
    assert staged.chosen.tolist() == [1, 1, 1, 3, -1, -1, -1, -1]


def test_memory_that_may_still_be_read_is_waited_for() -> None:
    device = Deferred()
    staged = StagedInputs(device, 4, 2, 3)
    for turn in range(2 * NUM_STAGED):
        staged.padding(Size(2, 2), 3)
        assert device.waits == max(0, turn + 1 - NUM_STAGED)


def test_padding_writes_and_reads_nothing() -> None:
    inputs = StagedInputs(EmulatedDevice(), 8, 8, 3, has_states=True).padding(Size(5, 5), 3)
    assert inputs.states is not None
    assert inputs.states.tolist() == [[-1] * 6] * 5
    assert inputs.geometries[0].slots.tolist() == [-1] * 5
    assert inputs.geometries[0].context_lens.tolist() == [0] * 5
    assert inputs.geometries[0].block_tables.shape == (5, 3)


def test_steps_of_one_shape_lie_at_the_same_addresses() -> None:
    staged = StagedInputs(EmulatedDevice(), 8, 8, 3)
    first, second = staged.padding(Size(5, 5), 3), staged.padding(Size(5, 5), 3)
    assert all(first.tensors[name].data_ptr() == tensor.data_ptr() for name, tensor in second.tensors.items())


def test_a_token_is_learned_by_the_sequence_that_sampled_it() -> None:
    batch = PersistentBatch(num_slots=2, max_model_len=8, block_size=BLOCK, max_step_tokens=8)
    entered(batch, 1, 3)
    expected = batch.expect([1])
    assert batch.token_ids[1, 3] == -2
    batch.learn(expected, np.array([77]))
    assert batch.token_ids[1, 3] == 77
    late = batch.expect([1])
    entered(batch, 1, 6)
    batch.learn(late, np.array([99]))
    assert 99 not in batch.token_ids[1]
    assert batch.num_tokens[1] == 6


@pytest.mark.parametrize("last", [[7, 8, 9], [7, -2, 9]])
def test_unknown_tokens_are_those_sampled_last(last: list[int]) -> None:
    from lmkit.kernels import ops

    ids = torch.tensor([5, -1, -2, 0, -3])
    ops.known_tokens.select("cuda")(ids, torch.tensor(last))
    assert ids.tolist() == [5, *np.maximum(last[:2], 0).tolist(), 0, 9]
