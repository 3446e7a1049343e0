"""Every architecture that llama.cpp writes and lmkit serves: a GGUF file gives the logits of the model in it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from lmkit.kernels.cuda import gemm_pack
from lmkit.layers.batch import whole_batch
from lmkit.models.loader import load_model
from lmkit.models.placed import placed
from lmkit.models.resolved import resolved
from lmkit.qtensor import QTensor, dequantize
from tests.models import tiny
from tests.models.gguf_files import coded, write_gguf
from tests.models.test_families import BLOCK, TOLERANCE, expected, kv_for, prompts

# family of tests.models.tiny -> (llama.cpp's architecture, differences of the model)
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("llama", {}),
    "llama-tied-bias": ("llama", {}),
    "llama-linear": ("llama", {}),
    "llama-yarn": ("llama", {}),
    "llama-llama3": ("llama", {}),
    "llama-mha-wide-heads": ("llama", {}),
    "mistral": ("llama", {}),
    "mixtral": ("llama", {}),
    "internlm3": ("llama", {}),
    "qwen2": ("qwen2", {}),
    "qwen2-moe": ("qwen2moe", {"mlp_only_layers": []}),
    "qwen3": ("qwen3", {}),
    "qwen3-moe": ("qwen3moe", {"decoder_sparse_step": 1}),
    "qwen3-next": ("qwen3next", {}),
    "gemma2": ("gemma2", {"query_pre_attn_scalar": 16}),
    "gemma3": ("gemma3", {"query_pre_attn_scalar": 16}),
    "gemma4": ("gemma4", {}),
    "gemma4-values": ("gemma4", {}),
    "gemma4-moe": ("gemma4", {"num_global_key_value_heads": 2}),
    "phi3": ("phi3", {}),
    "phi3-long": ("phi3", {}),
    "granite": ("granite", {}),
    "olmo2": ("olmo2", {}),
    "olmo3": ("olmo2", {}),
    "exaone4": ("exaone4", {}),
    "exaone4-full": ("exaone4", {}),
    "smollm3": ("smollm3", {"no_rope_layer_interval": 4}),
    "glm": ("chatglm", {}),
    "glm4": ("glm4", {}),
    "glm4-moe": ("glm4moe", {}),
    "seed-oss": ("seed_oss", {}),
    "internlm2": ("internlm2", {"attention_bias": True}),
    "gpt-oss": ("gpt-oss", {}),
    "deepseek-v2-lite": ("deepseek2", {"rope_parameters": tiny.YARN | {"mscale": 0.707, "mscale_all_dim": 0.707}}),
    "deepseek-v2": ("deepseek2", {}),
    "deepseek-v3": ("deepseek2", {}),
    "dots1": ("dots1", {}),
    "glm4-moe-lite": ("deepseek2", {}),
    "olmoe": ("olmoe", {"norm_topk_prob": False}),
    "minimax-m2": ("minimax-m2", {}),
    "ernie4.5": ("ernie4_5", {"tie_word_embeddings": True}),
    "ernie4.5-moe": ("ernie4_5-moe", {}),
    "ministral3": ("mistral3", {}),
}


@pytest.mark.parametrize("name", CASES)
def test_the_logits_of_transformers(tmp_path: Path, name: str) -> None:
    arch, differences = CASES[name]
    model = tiny.make(tmp_path / "saved", name.replace("internlm2", "llama"), **differences)
    write_gguf(tmp_path / "m.gguf", model, tmp_path / "saved", arch)
    decoder = load_model(tmp_path / "m.gguf")
    batch, num_blocks = whole_batch(prompts(), BLOCK)
    logits = decoder(batch, kv_for(decoder, num_blocks))
    for row, got in zip(prompts(), logits.split([len(r) for r in prompts()]), strict=True):
        torch.testing.assert_close(got, expected(model, row), rtol=TOLERANCE, atol=TOLERANCE)


@pytest.mark.parametrize(("storage", "bits", "bits_on_a_gpu"), [("Q4_1", 5, 5), ("Q5_1", 6, 7)])
def test_planes_take_the_files_bits_and_four_six_or_eight_on_a_gpu(
    tmp_path: Path, storage: str, bits: int, bits_on_a_gpu: int
) -> None:
    """As the memory plan says. They become dense where torch computes."""
    model = tiny.make(tmp_path / "saved", "llama", hidden_size=64, intermediate_size=96, num_attention_heads=4)
    write_gguf(tmp_path / "m.gguf", model, tmp_path / "saved", "llama", coded(storage))
    with resolved(tmp_path / "m.gguf") as found:
        weight, source = found.layer(0).weights["attn.q"], found.source
        assert isinstance(weight, QTensor)
        on = {device: source.weight_bytes("float16", device=device) for device in ("cpu", "cuda", "torch:cpu")}
        assert on["torch:cpu"] - on["cpu"] == found.spec.num_weights * (16 - bits) // 8
        assert on["torch:cpu"] - on["cuda"] == found.spec.num_weights * (16 - bits_on_a_gpu) // 8
        there = placed(weight, "cuda", "cpu", torch.float16)
        assert isinstance(there, QTensor)
        packed = gemm_pack.pack(there)
        tiles, inputs = packed.num_tiles, packed.num_stages * gemm_pack.STAGE  # with what fills them up
        assert packed.codes.nbytes + packed.params.nbytes == tiles * gemm_pack.TILE * inputs * bits_on_a_gpu // 8
        moved = placed(weight, "torch:cpu", "cpu", torch.float16)
        assert isinstance(moved, torch.Tensor)
        assert torch.equal(moved, dequantize(weight).half())


@pytest.mark.parametrize("storage", ["Q8_0", "Q5_0", "Q4_0"])
def test_a_tied_head_and_its_embeddings_share_their_codes(tmp_path: Path, storage: str) -> None:
    model = tiny.make(tmp_path / "saved", "llama-tied-bias", hidden_size=64, num_attention_heads=4, vocab_size=384)
    path = tmp_path / "m.gguf"
    write_gguf(path, model, tmp_path / "saved", "llama", embeddings=coded(storage))
    with resolved(path, dtype="float32", activations="exact") as found:
        head = found.lm_head().weights["lm_head"]
        assert isinstance(head, QTensor)
        torch.testing.assert_close(dequantize(head), found.source.embed_tokens(), rtol=0, atol=0)
        layers = sum(p.numel() for p in model.model.layers.parameters()) + found.spec.hidden_size
        embeddings = head.scheme.num_bytes((head.codes.shape[0], head.codes.shape[1]))
        assert found.weight_bytes() == layers * found.dtype.itemsize + embeddings
        model.model.embed_tokens.weight.data.copy_(dequantize(head))
    decoder = load_model(path, dtype="float32")  # inputs of a head in codes keep 16 bits
    assert decoder.embed_tokens is decoder.lm_head
    batch, num_blocks = whole_batch(prompts(), BLOCK)
    logits = decoder(batch, kv_for(decoder, num_blocks))
    for row, got in zip(prompts(), logits.split([len(r) for r in prompts()]), strict=True):
        torch.testing.assert_close(got, expected(model, row), rtol=3 * TOLERANCE, atol=3 * TOLERANCE)


def test_the_memory_plan_counts_codes_as_they_lie_in_memory(tmp_path: Path) -> None:
    """As many as in the file."""
    model = tiny.make(tmp_path / "saved", "llama", hidden_size=64, intermediate_size=96, num_attention_heads=4)
    write_gguf(tmp_path / "m.gguf", model, tmp_path / "saved", "llama", coded("Q5_0"))
    with resolved(tmp_path / "m.gguf", dtype="float32") as found:
        weights = found.spec.num_weights
        others = sum(p.numel() for p in model.parameters()) - weights
        assert found.weight_bytes() == 22 * weights // 32 + 4 * others
