"""Latent attention over chosen keys: memory, what stands beside it in a step, tiers, ranks, and what is refused. Logits
and tokens are compared in test_families.py and test_engine_tokens.py, with contexts of four times `index_topk`."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest
import torch

from lmkit.config import EngineConfig
from lmkit.errors import CheckpointError, ConfigError, UnsupportedError
from lmkit.kv_dtype import BFLOAT16, FLOAT32, INT4, INT8, KVDtype
from lmkit.layers.batch import KVLayer, whole_batch
from lmkit.models import load_spec
from lmkit.models.kv_storage import KVStorage, allocate
from lmkit.models.loader import load_model
from lmkit.models.resolved import resolved
from lmkit.models.source import ModelSource
from lmkit.models.stage import Stage
from lmkit.quant.run import prepare
from lmkit.turbo.engine.engine import Engine
from lmkit.turbo.kv.blocks import KVBlocks
from lmkit.turbo.request import Request, SamplingParams
from tests.quant.helpers import CLIP, SCALE, recipe, tiny_checkpoint

V32, GLM = "DeepseekV32ForCausalLM", "GlmMoeDsaForCausalLM"


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_checkpoint(
        tmp_path_factory.mktemp("model"), "glm-5", num_key_value_heads=4, num_hidden_layers=3, index_topk=8
    )


def test_an_indexer_adds_a_key_to_the_bytes_of_a_token() -> None:
    """As docs/kv_cache.md says. Keys of an indexer have 8 bits at least."""
    with_key, without = (load_spec({"architectures": [V32]}).layers[0], load_spec({"architectures": [GLM]}).whole())
    assert [with_key.kv_token_bytes(kind, kind) for kind in (BFLOAT16, INT8, INT4)] == [1408, 712, 424]
    assert [without.layers[0].kv_token_bytes(kind, kind) for kind in (BFLOAT16, INT8, INT4)] == [1152, 580, 292]


def test_layers_that_see_an_earlier_choice_are_named_in_four_ways() -> None:
    def shared(**keys: object) -> list[bool]:
        return [layer.follows for layer in load_spec({"architectures": [GLM], "num_hidden_layers": 6, **keys}).layers]

    assert not any(shared())
    assert shared(index_topk_freq=3) == [False, False, True, True, False, True]
    assert shared(index_topk_freq=2, index_skip_topk_offset=1) == [False, True] * 3
    assert shared(index_topk_pattern="FSSFSF") == shared(
        indexer_types=["full", *["shared"] * 2, "full", "shared", "full"]
    )
    for wrong in ({"index_topk_pattern": "SFFFFF"}, {"indexer_types": ["full"] * 5}, {"indexer_types": ["half"] * 6}):
        with pytest.raises(CheckpointError, match="indexer_types must name full or shared"):
            shared(**wrong)


def test_a_short_sequence_has_the_same_bits_beside_a_long_one(checkpoint: Path) -> None:
    """Alone it sees all keys, and nothing is chosen."""
    decoder, short = load_model(checkpoint), list(range(50, 57))

    def logits(rows: Sequence[list[int]]) -> torch.Tensor:
        batch, num_blocks = whole_batch(list(rows), 4)
        return decoder(batch, kv(num_blocks)).clone()

    def kv(num_blocks: int) -> list[KVLayer]:
        return allocate(decoder.spec.layers, [KVStorage(FLOAT32, FLOAT32)] * decoder.spec.num_layers, num_blocks, 4, 64)

    assert torch.equal(logits([short]), logits([short, list(range(30))])[: len(short)])


@pytest.mark.parametrize("kind", [INT8, INT4])
def test_blocks_of_coded_rows_hold_the_keys_of_indexers(checkpoint: Path, kind: KVDtype) -> None:
    decoder = load_model(checkpoint)
    storages = [KVStorage(kind, kind)] * decoder.spec.num_layers
    layers = allocate(decoder.spec.layers, storages, 4, 16, 64)
    index = [layer.index for layer in layers]
    assert [None if keys is None else keys.dtype for keys in index] == [INT8, INT8, None]
    tokens = sum(layer.kv_token_bytes(kind, kind) for layer in decoder.spec.layers)
    assert KVBlocks(layers).nbytes == 16 * tokens


def test_keys_come_back_from_host_memory(checkpoint: Path) -> None:
    """The second prompt evicts the first one's blocks. They come back with the keys of indexers."""
    prompts = [list(range(20, 60)), list(range(70, 110))]
    sizes = {"block_size": 8, "max_batch_size": 1, "max_model_len": 48, "packed_cache": False, "max_step_tokens": 16}

    def tokens(engine: Engine, prompt: list[int]) -> list[int]:
        params = SamplingParams(max_tokens=6, ignore_eos=True)
        engine.add(Request(request_id="a", prompt_ids=prompt, params=params))
        return [token for _ in iter(engine.has_work, False) for output in engine.step() for token in output.token_ids]

    plain = Engine(str(checkpoint), EngineConfig(**sizes, prefix_cache=False))
    block = plain.info.memory["kv"] // plain.info.num_blocks
    wanted = [tokens(plain, prompt) for prompt in prompts]
    plain.close()
    engine = Engine(str(checkpoint), EngineConfig(**sizes, kv_memory=6 * block, kv_host_memory=64 * block))
    for number in (0, 1, 0):
        assert tokens(engine, prompts[number]) == wanted[number]
    assert engine.stats().tier_hits["host"]
    engine.close()


def test_stages_begin_with_layers_that_choose(checkpoint: Path) -> None:
    spec = ModelSource(checkpoint).spec
    assert [layer.follows for layer in spec.layers] == [False, False, True]
    assert Stage(0, 2).cut(spec) == [range(1), range(1, 3)]
    with pytest.raises(UnsupportedError, match="pp=3: too few layers of this model choose keys; use a smaller pp"):
        Stage(0, 3).cut(spec)


def test_a_gpu_serves_contexts_in_which_every_key_is_chosen(checkpoint: Path) -> None:
    for name in (V32, GLM):
        for given, most in (({}, 2048), ({"index_topk": 512}, 512), ({"max_position_embeddings": 300}, 300)):
            assert load_spec({"architectures": [name], **given}).whole().max_position == most
    with resolved(checkpoint, device="cuda") as model:
        assert (model.spec.max_position, model.spec.chosen_keys) == (8, 0)
        assert not any("index" in role for layer in model.spec.layers for role in layer.linears)
        names = [name for name in model.reader.names() if "indexer" in name]
        assert len(names) == 10
        assert all(name.startswith(model.spec.unread) for name in names)


def test_it_is_quantized_without_its_indexers_and_served(checkpoint: Path, tmp_path: Path) -> None:
    data = {"num_samples": 2, "seq_len": 8}
    with pytest.raises(
        ConfigError, match="seq_len 24 is more than the 8 keys that a query of this model sees; lower it"
    ):
        prepare(checkpoint, recipe(SCALE, calibration=data | {"seq_len": 24}))
    prepare(checkpoint, recipe(SCALE, CLIP, rounder={"step": "gptq"}, calibration=data)).run(tmp_path / "out")
    before, found = ModelSource(checkpoint).layer_weights(1), ModelSource(tmp_path / "out").layer_weights(1)
    assert torch.equal(found["attn.index_q"], before["attn.index_q"])
    engine = Engine(str(tmp_path / "out"), EngineConfig(packed_cache=False, max_model_len=64, kv_dtype="int8"))
    params = SamplingParams(max_tokens=3, ignore_eos=True)
    engine.add(Request(request_id="a", prompt_ids=list(range(30)), params=params))
    assert sum(len(output.token_ids) for _ in iter(engine.has_work, False) for output in engine.step()) == 3
    engine.close()
