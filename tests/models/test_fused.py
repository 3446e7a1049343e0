"""Checkpoints with fused linears, heads in pairs of neighbours, and RoPE by length: formats, emulated GPU."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from lmkit.config import EngineConfig
from lmkit.errors import CheckpointError
from lmkit.formats.checkpoint import CheckpointReader
from lmkit.kv_dtype import BFLOAT16
from lmkit.layers.batch import allocate_kv, whole_batch
from lmkit.models.loader import load_model
from lmkit.models.source import ModelSource
from lmkit.qtensor import QuantScheme, int_scheme
from lmkit.quant.kv.fit import fold
from lmkit.quant.layer.layer import Geometry
from lmkit.turbo.engine.engine import Engine
from tests.formats.awq_gemv import repacked
from tests.models import tiny
from tests.models.test_engine_tokens import PROMPT, greedy
from tests.models.test_formats import BLOCK, CHANNEL, EIGHT, FOUR, SHAPE, logits, rewritten
from tests.models.test_gemma2 import divergence

NAMES = ["phi3", "phi3-long", "glm4", "internlm2", "mixtral-fused", "qwen2-moe-fused", "gpt-oss"]
FORMATS = [
    ("awq", FOUR), ("awq-gemv", FOUR), ("awq-gemv_fast", FOUR), ("gptq", int_scheme(4, 32, True)), ("gptq_v2", EIGHT),
    ("compressed-tensors", FOUR), ("compressed-tensors", EIGHT), ("fp8", BLOCK), ("compressed-tensors", CHANNEL),
]  # fmt: skip


@pytest.mark.parametrize(
    ("family", "name", "scheme"), [*(("phi3", *case) for case in FORMATS), ("glm4", *FORMATS[0]), ("glm4", *FORMATS[7])]
)
def test_fused_linears_of_every_format(tmp_path: Path, family: str, name: str, scheme: QuantScheme) -> None:
    wide = SHAPE | {"head_dim": 64, "hidden_size": 256, "intermediate_size": 128, "num_key_value_heads": 2}
    tiny.make(tmp_path / "plain", family, **wide)
    quantized, dense = rewritten(tmp_path / "plain", tmp_path, name.partition("-g")[0], {"_proj": scheme})
    if name.startswith("awq-"):
        quantized = repacked(quantized, tmp_path / name, name.removeprefix("awq-"))
    with CheckpointReader(quantized) as reader:
        assert not any(".up_proj" in name for name in reader.names())
    expected = logits(load_model(dense))
    found = logits(load_model(quantized, activations="exact"))
    torch.testing.assert_close(found, expected, rtol=1e-3, atol=1e-3)


def test_a_block_over_the_border_of_two_linears_is_refused(tmp_path: Path) -> None:
    """Of gate and up, 96 outputs each, in blocks of 128."""
    tiny.make(tmp_path / "plain", "phi3", **SHAPE | {"intermediate_size": 96})
    quantized, _ = rewritten(tmp_path / "plain", tmp_path, "fp8", {"gate_up_proj": BLOCK})
    with pytest.raises(CheckpointError, match=r"gate_up_proj.weight_scale_inv.*borders"):
        ModelSource(quantized)


def test_long_prompts_share_a_prefix_and_short_ones_do_not(tmp_path: Path) -> None:
    """LongRoPE has one set of factors for all prompts above 24 tokens."""
    model = tiny.make(tmp_path, "phi3-long")
    config = EngineConfig(block_size=8, max_batch_size=1, max_model_len=64, kv_dtype="float32")
    engine = Engine.of(load_model(tmp_path), config)
    found = []
    for prompt, hits in ((PROMPT, 0), ([*PROMPT[:26], 7, 8, 9, 10, 11], 26), (PROMPT[:20], 26)):
        (tokens,) = greedy(engine, [prompt], count=4)
        found.append(tokens)
        assert engine.stats().prefix_hits == hits
    engine.close()
    for prompt, got in zip((PROMPT, [*PROMPT[:26], 7, 8, 9, 10, 11], PROMPT[:20]), found, strict=True):
        with torch.no_grad():
            rows = model(torch.tensor([prompt + got])).logits[0, len(prompt) - 1 : -1]
        assert got == rows.argmax(-1).tolist()


@pytest.mark.parametrize("name", NAMES)
def test_distributions_on_an_emulated_gpu(tmp_path: Path, name: str, emulated: None) -> None:
    model = tiny.make(tmp_path, name)
    decoder = load_model(tmp_path, device="cuda", dtype="float16")
    batch, num_blocks = whole_batch([PROMPT], 16)
    kv = [allocate_kv(num_blocks, x.num_kv_heads, 16, x.head_dim, (BFLOAT16, BFLOAT16)) for x in decoder.spec.layers]
    found = decoder(batch, kv)
    with torch.no_grad():
        expected = model(torch.tensor([PROMPT])).logits[0]
    for got, want in zip(found, expected, strict=True):
        assert divergence(got, want) < 1e-2
    assert divergence(found[3].roll(1), expected[3]) > 0.1


def test_lambda_is_folded_into_heads_of_pairs(tmp_path: Path) -> None:
    """Keys / s and queries * s leave the output of attention, with s in the order of the kernels."""
    tiny.make(tmp_path, "glm4")
    layer = ModelSource(tmp_path).layer(0, torch.float32)
    x = torch.randn(9, 48, generator=torch.Generator().manual_seed(2))
    half = torch.rand(2, 4, generator=torch.Generator().manual_seed(3)) + 0.5
    s = torch.cat([half, half, torch.full((2, 8), 0.75)], dim=1)  # both elements of a pair share one

    def attention() -> torch.Tensor:
        return layer.attention(x, None, Geometry.of(layer.spec, 1, len(x)).at)

    before = attention()
    fold(layer, s)
    torch.testing.assert_close(attention(), before, rtol=1e-4, atol=1e-4)
