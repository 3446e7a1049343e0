"""Stages hand the residual stream on without changing a bit, whatever the family."""

from __future__ import annotations

import socket
from pathlib import Path

import pytest
import torch

from lmkit.errors import EngineLostError
from lmkit.kv_dtype import FLOAT32
from lmkit.layers.batch import whole_batch
from lmkit.models import kv_storage
from lmkit.models.decoder import Decoder
from lmkit.models.loader import load
from lmkit.models.resolved import resolved
from lmkit.models.stage import Stage
from lmkit.turbo.runners.stages import Neighbours
from tests.models import tiny

PROMPTS = [[3, 9, 27, 4, 5], [8, 1]]


@torch.inference_mode()
def logits_of(path: Path, count: int) -> torch.Tensor:
    """The logits of `count` stages, which compute one after the other here."""
    behind, before = zip(*(socket.socketpair() for _ in range(count)), strict=True)
    before = (before[-1], *before[:-1])
    batch, num_blocks = whole_batch(PROMPTS, 8)
    decoders: list[Decoder] = []
    for index in range(count):
        options = {"activations": "exact", "dtype": "float32", "kv_dtype": FLOAT32, "stage": Stage(index, count)}
        with resolved(path, **options) as model:
            decoder, storages = load(model), model.storages
        kv = kv_storage.allocate(decoder.spec.layers, storages, num_blocks, 8, 16)
        if count > 1:
            decoder.link = Neighbours(index, before[index], behind[index], 16, decoder.spec.hidden_size)
        decoders.append(decoder)
        logits = decoder(batch, [kv[layer.index] for layer in decoder.layers])
    if (line := decoders[0].link) is None:
        return logits
    assert not len(logits)
    return decoders[0].logits(line.receive(len(batch.logit_rows)), None, torch.arange(len(batch.logit_rows)))


@pytest.mark.parametrize("name", ["opt-350m", "gemma2", "gpt-oss", "olmo2", "qwen2-moe", "qwen3-next", "glm4"])
def test_stages_compute_the_bits_of_the_whole_model(tmp_path: Path, name: str) -> None:
    tiny.make(tmp_path, name)
    assert torch.equal(logits_of(tmp_path, 2), logits_of(tmp_path, 1))


def test_the_end_of_a_neighbour_is_an_error_not_a_wait() -> None:
    here, there = socket.socketpair()
    line = Neighbours(1, here, here, 4, 8)
    there.sendall((32).to_bytes(8, "little") + bytes(20))
    there.close()
    for _ in range(2):
        with pytest.raises(EngineLostError, match="has ended or failed"):
            line.receive(1)
    with pytest.raises(EngineLostError, match="has ended or failed"):
        line.send(1)
