"""A layer is a list of blocks: a model whose layers are cut into layers of one block each is the same model."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from lmkit.config import EngineConfig
from lmkit.kv_dtype import FLOAT32
from lmkit.layers.batch import whole_batch
from lmkit.models.decoder import Decoder
from lmkit.models.decoder_layer import DecoderLayer
from lmkit.models.kv_storage import KVStorage, allocate
from lmkit.models.loader import load_model
from lmkit.models.source import ModelSource
from lmkit.turbo.engine.engine import Engine
from lmkit.turbo.request import Request, SamplingParams
from tests.models import tiny

SIZES: dict[str, Any] = {"block_size": 4, "max_step_tokens": 16, "max_model_len": 64, "kv_dtype": "float32"}


def cut(path: Path, whole: Decoder) -> Decoder:
    """The model with a layer for each block: some keep a state and have no MLP, the others keep nothing."""
    source, layers = ModelSource(path), list[DecoderLayer]()
    for index, spec in enumerate(source.spec.layers):
        weights = source.layer_weights(index, torch.float32)
        for block in spec.blocks:
            one = replace(spec, blocks=(block,))
            roles = {*one.linears, *one.routers, *one.vectors, *one.matrices}
            own = {role: weight for role, weight in weights.items() if role in roles or role[: -len(".bias")] in roles}
            layers.append(DecoderLayer(one, len(layers), own))
            layers[-1].pack("exact")
    spec = replace(whole.spec, layers=tuple(layer.spec for layer in layers))
    return Decoder(spec, whole.embed_tokens, layers, whole.final_norm, whole.lm_head)


def logits(decoder: Decoder) -> torch.Tensor:
    batch, num_blocks = whole_batch([list(range(40, 60)), list(range(90, 97))], 8)
    storages = [KVStorage(FLOAT32, FLOAT32)] * decoder.spec.num_layers
    return decoder(batch, allocate(decoder.spec.layers, storages, num_blocks, 8, 32)).clone()


def greedy(decoder: Decoder) -> list[list[int]]:
    """Two prompts in chunks, one of them again behind its prefix."""
    engine, found = Engine.of(decoder, EngineConfig(**SIZES, max_batch_size=2)), dict[str, list[int]]()
    for names in ("ab", "c"):
        for name in names:
            params = SamplingParams(max_tokens=9, temperature=0.0, ignore_eos=True)
            engine.add(Request(request_id=name, prompt_ids=list(range(30 + (name == "b"), 55)), params=params))
        while engine.has_work():
            for output in engine.step():
                found.setdefault(output.request_id, []).extend(output.token_ids)
        engine.check_integrity()
    assert engine.stats().prefix_hits
    engine.close()
    assert found["a"] == found["c"]
    return list(found.values())


@pytest.mark.parametrize("family", ["qwen3.5", "qwen3-moe"])
def test_layers_of_one_block_are_the_same_model(tmp_path: Path, family: str) -> None:
    tiny.make(tmp_path, family)
    whole = load_model(tmp_path, activations="exact")
    apart = cut(tmp_path, whole)
    assert {len(layer.blocks) for layer in apart.spec.layers} == {1}
    assert any(layer.state is None for layer in apart.spec.layers)
    assert (apart.spec.num_weights, apart.spec.state_bytes) == (whole.spec.num_weights, whole.spec.state_bytes)
    torch.testing.assert_close(logits(apart), logits(whole), rtol=1e-5, atol=1e-5)
    assert greedy(apart) == greedy(whole)
