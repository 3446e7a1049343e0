"""Latent attention: the bytes of its KV cache, coded rows, quantized weights, and what is refused."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from lmkit.config import EngineConfig
from lmkit.errors import ConfigError
from lmkit.formats.kv_config import load_kv_config
from lmkit.kv_dtype import BFLOAT16, FLOAT32, FP8, INT4, INT8, KVDtype
from lmkit.layers.batch import whole_batch
from lmkit.models import load_spec
from lmkit.models.kv_storage import KVStorage, allocate
from lmkit.models.loader import load_model
from lmkit.models.shard import Shard
from lmkit.models.source import ModelSource
from lmkit.qtensor import QTensor
from lmkit.quant.run import prepare
from lmkit.turbo.engine.engine import Engine
from lmkit.turbo.request import Request, SamplingParams
from tests.models import tiny
from tests.quant.helpers import CLIP, SCALE, recipe, tiny_checkpoint

LITE = {  # DeepSeek-V2-Lite
    "architectures": ["DeepseekV2ForCausalLM"], "hidden_size": 2048, "num_hidden_layers": 1, "vocab_size": 102400,
    "num_attention_heads": 16, "kv_lora_rank": 512, "qk_rope_head_dim": 64, "qk_nope_head_dim": 128, "v_head_dim": 128,
    "intermediate_size": 10944, "moe_intermediate_size": 1408, "n_routed_experts": 64, "num_experts_per_tok": 6,
    "first_k_dense_replace": 1,
}  # fmt: skip


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_checkpoint(tmp_path_factory.mktemp("model"), "deepseek-v2-lite", num_key_value_heads=4)


def test_ranks_share_out_heads_and_keep_all_rows(checkpoint: Path) -> None:
    whole, rank = (Shard(0, tp).model(ModelSource(checkpoint).spec).layers[1] for tp in (1, 2))
    assert rank.num_heads == whole.num_heads // 2
    assert rank.kv_token_bytes(INT8, INT8) == whole.kv_token_bytes(INT8, INT8)
    weights = ModelSource(checkpoint).layer_weights(1)
    parts = [Shard(number, 2).weights(whole, dict(weights)) for number in range(2)]
    assert all(torch.equal(part["attn.kv_a"], weights["attn.kv_a"]) for part in parts)
    for role, axis in (("attn.q", 0), ("attn.kv_b", 0), ("attn.o", 1)):
        assert torch.equal(torch.cat([part[role] for part in parts], dim=axis), weights[role])


def test_tokens_in_the_same_bytes() -> None:
    """As docs/families.md says, beside keys and values of all heads in 16 bits."""
    layer = load_spec(LITE).layers[0]
    plain = 16 * (128 + 64 + 128) * 2
    assert [layer.kv_token_bytes(kind, kind) for kind in (BFLOAT16, INT8, INT4)] == [1152, 580, 292]
    assert [round(plain / layer.kv_token_bytes(kind, kind), 1) for kind in (BFLOAT16, INT8, INT4)] == [8.9, 17.7, 35.1]


@pytest.mark.parametrize(("kind", "most"), [(INT8, 0.05), (FP8, 0.2), (INT4, 0.6)])
def test_coded_rows_come_close(tmp_path: Path, kind: KVDtype, most: float) -> None:
    tiny.make(tmp_path, "deepseek-v3", first_k_dense_replace=3)  # another choice of experts would outweigh rounding
    decoder = load_model(tmp_path)
    batch, num_blocks = whole_batch([list(range(40, 70))], 16)

    def logits(dtype: KVDtype) -> torch.Tensor:
        storages = [KVStorage(dtype, dtype)] * decoder.spec.num_layers
        return decoder(batch, allocate(decoder.spec.layers, storages, num_blocks, 16, 64)).clone()

    exact, coded = logits(FLOAT32), logits(kind)
    assert 0 < (coded - exact).norm() < most * exact.norm()


def test_it_is_quantized_with_text_and_served(checkpoint: Path, tmp_path: Path) -> None:
    prepare(
        checkpoint, recipe(SCALE, CLIP, rounder={"step": "gptq"}, calibration={"num_samples": 2, "seq_len": 24})
    ).run(tmp_path / "out")
    before, found = ModelSource(checkpoint).layer_weights(1), ModelSource(tmp_path / "out").layer_weights(1)
    assert all(isinstance(found[role], QTensor) for role in ("attn.q", "attn.kv_a", "mlp.shared.gate"))
    assert torch.equal(found["attn.kv_b"], before["attn.kv_b"])
    assert load_kv_config(tmp_path / "out") is None
    engine = Engine(str(tmp_path / "out"), EngineConfig(packed_cache=False, max_model_len=64, kv_dtype="int8"))
    engine.add(Request(request_id="a", prompt_ids=[5, 6, 7], params=SamplingParams(max_tokens=3, ignore_eos=True)))
    tokens = [token for _ in iter(engine.has_work, False) for output in engine.step() for token in output.token_ids]
    engine.close()
    assert len(tokens) == 3


def test_a_recipe_for_its_kv_cache_is_refused(checkpoint: Path) -> None:
    with pytest.raises(ConfigError, match="no file describes this model's KV cache"):
        prepare(checkpoint, recipe(kv={"bits": 8}))
