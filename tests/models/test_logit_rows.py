"""The last layer computes outputs for tokens whose logits are wanted, and keys and values for all tokens."""

from __future__ import annotations

import copy
from pathlib import Path

import pytest
import torch
from torch import Tensor

from lmkit.kv_dtype import FLOAT32, INT4, INT8, KVDtype
from lmkit.layers.batch import KVLayer, allocate_state
from lmkit.models.decoder import Decoder
from lmkit.models.layer_spec import LayerSpec
from lmkit.models.loader import load_model
from lmkit.turbo.plan import Chunk, NewSequence
from lmkit.turbo.request import SamplingParams
from lmkit.turbo.runners.batch import PersistentBatch
from tests.models import tiny

BLOCK = 5
LENGTH = 40
# Steps: (tokens, positions that are sampled) of each sequence.
STEPS = [
    [(9, 0), (4, 1), (1, 1)],  # a prompt goes on, another ends, and one sequence decodes
    [(13, 0), (2, 0), (7, 0)],  # no logits
    [(3, 1), (11, 3), (2, 0)],  # several positions of one sequence
    [(1, 1), (3, 3), (1, 1)],  # all
]


def steps(decoder: Decoder, dtypes: tuple[KVDtype, KVDtype]) -> list[tuple[Tensor, Tensor, int]]:
    """(logits, those computed from every token's hidden state, rows of the last output projection) of each step."""
    batch = PersistentBatch(num_slots=3, max_model_len=LENGTH, block_size=BLOCK, max_step_tokens=64)
    generator = torch.Generator().manual_seed(3)
    for slot in range(3):
        tokens = torch.randint(0, 199, (LENGTH,), generator=generator).tolist()
        blocks = [list(range(8 * slot, 8 * slot + 8))]
        batch.enter(NewSequence(slot, tokens, LENGTH, SamplingParams(), (), prompt_logprobs=False, block_tables=blocks))
    kv = [storage(layer, dtypes) for layer in decoder.spec.layers]
    rows = projected(decoder)
    found, done = [], [0, 0, 0]
    for step in STEPS:
        chunks = [Chunk(slot, done[slot], count, [], sampled) for slot, (count, sampled) in enumerate(step)]
        inputs, _ = batch.inputs(chunks)
        apart = copy.deepcopy(kv)
        expected = decoder.logits(*decoder.hidden(inputs, apart), inputs.logit_rows).clone()
        rows.clear()
        logits = decoder(inputs, kv)
        assert all(torch.equal(a, b) for a, b in zip(stored(kv), stored(apart), strict=True))
        found.append((logits, expected, sum(rows)))
        done = [start + count for start, (count, _) in zip(done, step, strict=True)]
    return found


def storage(layer: LayerSpec, dtypes: tuple[KVDtype, KVDtype]) -> KVLayer:
    return allocate_state(layer.state, 24, BLOCK, dtypes, 3)


def stored(kv: list[KVLayer]) -> list[Tensor]:
    blocks = [part for layer in kv for tensor in (layer.k, layer.v) for part in (tensor.data, tensor.params)]
    return blocks + [state for layer in kv if layer.states for state in (layer.states.conv, layer.states.matrix)]


def projected(decoder: Decoder) -> list[int]:
    """The numbers of rows that the last layer's output projection gets from now on."""
    rows: list[int] = []
    layer = decoder.layers[-1]
    last = layer.mixer.members[-1] if layer.mixer.out is None else layer.mixer
    if layer.spec.state is None:
        return rows
    out = last.out
    assert out is not None
    project, add_to = out.__call__, out.add_to

    class Counted:
        def __call__(self, x: Tensor) -> Tensor:
            rows.append(len(x))
            return project(x)

        def add_to(self, stream: Tensor, x: Tensor) -> tuple[Tensor, Tensor | None]:
            rows.append(len(x))
            return add_to(stream, x)

    last.out = Counted()  # type: ignore[assignment]
    return rows


@pytest.mark.parametrize("name", tiny.FAMILIES)
def test_every_family_gives_the_same_bits(tmp_path: Path, name: str) -> None:
    tiny.make(tmp_path, name)
    decoder = load_model(tmp_path)
    for step, (logits, expected, rows) in zip(STEPS, steps(decoder, (FLOAT32, FLOAT32)), strict=True):
        assert torch.equal(logits, expected)
        assert len(logits) == sum(sampled for _, sampled in step)
        if decoder.spec.layers[-1].state is not None:  # a last layer that keeps nothing computes all tokens
            assert rows == len(logits)


@pytest.mark.parametrize("dtype", [INT8, INT4])
def test_kv_in_integers_gives_the_same_bits(tmp_path: Path, dtype: KVDtype) -> None:
    tiny.make(tmp_path, "llama", head_dim=16)
    assert all(torch.equal(a, b) for a, b, _ in steps(load_model(tmp_path), (dtype, dtype)))
