"""Every architecture that llama.cpp writes and lmkit serves: a GGUF file gives the logits of the model in it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch

from lmkit.kernels.cuda import gemm_pack
from lmkit.layers.batch import whole_batch
from lmkit.models.loader import load_model
from lmkit.models.placed import placed
from lmkit.models.resolved import resolved
from lmkit.models.source import ModelSource
from lmkit.qtensor import QTensor, dequantize
from tests.formats.gguf_writer import Encoded, floats
from tests.models import tiny
from tests.models.gguf_files import coded, write_gguf
from tests.models.test_families import BLOCK, TOLERANCE, expected, kv_for, prompts

MODERN_BERT = {
    "attention.sliding_window": 12,
    "attention.sliding_window_pattern": 3,
    "attention.layer_norm_epsilon": 1e-3,
    "rope.freq_base": 160000.0,
    "hidden_activation": "gelu",
}
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
    "gemma": ("gemma", {}),
    "exaone": ("exaone", {}),
    "arcee": ("arcee", {}),
    "cohere2": ("cohere2", {"attention_bias": False}),
    "granite-moe": ("granitemoe", {}),
    "granite-swa": ("granite_swa", {"layer_rope_theta": [0, 500.0, 500.0]}),
    "qwen2-vl": ("qwen2vl", {}),
    "qwen3-vl": ("qwen3vl", {}),
    "qwen3-vl-moe": ("qwen3vlmoe", {"decoder_sparse_step": 1}),
    "solar-open": ("glm4moe", {"first_k_dense_replace": 0}),
    "llama4": ("llama4", {"no_rope_layer_interval": 4, "floor_scale": 8192, "attn_scale": 0.1}),
    "hunyuan": ("hunyuan-dense", {}),
    "hunyuan-moe": ("hunyuan-moe", {}),
    "hy-v3": ("hy_v3", {}),
    "mimo-v2-flash": ("mimo2", {"n_shared_experts": None}),
    "deepseek-v3.2": ("deepseek32", {}),
    "glm-5": ("glm-dsa", {}),
    "qwen3.5": ("qwen35", {"linear_value_head_dim": 8}),
    "qwen3.5-moe": ("qwen35moe", {"linear_value_head_dim": 8}),
    "lfm2": ("lfm2", {"conv_bias": False}),
    "lfm2-moe": ("lfm2moe", {"routed_scaling_factor": 1.0}),
    "mamba2": ("mamba2", {"time_step_limit": [0.0, float("inf")]}),
    "granite-hybrid": ("granitehybrid", {"shared_intermediate_size": 88}),
    "granite-hybrid-moe": ("granitehybrid", {"position_embedding_type": "nope"}),
    "bamba": ("granitehybrid", {}),
    "falcon-h1": ("falcon-h1", {}),
    "nemotron-h": ("nemotron_h", {"time_step_min": 0.001}),
    "nemotron-3": ("nemotron_h_moe", {"time_step_min": 0.001}),
    "nemotron-3-super": ("nemotron_h_moe", {"time_step_min": 0.001}),
    "kimi-linear": ("kimi-linear", {"linear_num_heads": 6, "n_group": 1, "topk_group": 1}),
    "bailing-hybrid": ("bailingmoe3", {"linear_num_heads": 6}),
}


MADE_AS = {"internlm2": "llama", "exaone": "llama"}  # without a class in transformers, or with the same layers


@pytest.mark.parametrize("name", CASES)
def test_the_logits_of_transformers(tmp_path: Path, name: str) -> None:
    arch, differences = CASES[name]
    model = tiny.make(tmp_path / "saved", MADE_AS.get(name, name), **differences)
    write_gguf(tmp_path / "m.gguf", model, tmp_path / "saved", arch)
    decoder = load_model(tmp_path / "m.gguf")
    batch, num_blocks = whole_batch(prompts(), BLOCK)
    logits = decoder(batch, kv_for(decoder, num_blocks))
    for row, got in zip(prompts(), logits.split([len(r) for r in prompts()]), strict=True):
        torch.testing.assert_close(got, expected(model, row), rtol=TOLERANCE, atol=TOLERANCE)


@pytest.mark.parametrize(
    ("name", "arch", "keys"),
    [("ModernBert", "modern-bert", MODERN_BERT), ("Gemma3Text", "gemma-embedding", {"attention.sliding_window": 12})],
)
def test_an_encoder_is_that_of_its_folder(tmp_path: Path, name: str, arch: str, keys: dict[str, Any]) -> None:
    model = tiny.make_encoder(tmp_path / "saved", name)
    config = tmp_path / "saved" / "config.json"
    config.write_text(config.read_text().replace('query_pre_attn_scalar": 24', 'query_pre_attn_scalar": 16'))
    write_gguf(tmp_path / "m.gguf", model, tmp_path / "saved", arch, **keys)
    ours, theirs = ModelSource(tmp_path / "m.gguf"), ModelSource(tmp_path / "saved")
    assert ours.spec.layers == theirs.spec.layers
    assert torch.equal(ours.embed_tokens(), theirs.embed_tokens())
    for index in range(theirs.spec.num_layers):
        own, expected_weights = ours.layer_weights(index), theirs.layer_weights(index)
        assert own.keys() == expected_weights.keys()
        for role, weight in expected_weights.items():
            assert isinstance(weight, torch.Tensor)
            torch.testing.assert_close(own[role], weight, rtol=0, atol=1e-6)


@pytest.mark.parametrize("storage", ["Q8_0", "Q6_K"])
def test_value_heads_in_turns_stay_quantized(tmp_path: Path, storage: str) -> None:
    """Of Qwen3.5. A block of Q8_0 lies within a head. One of Q6_K has inputs of several."""
    options = {"linear_value_head_dim": 64, "linear_num_value_heads": 4, "num_hidden_layers": 1}
    model = tiny.make(tmp_path / "saved", "qwen3.5", layer_types=["linear_attention"], use_cache=False, **options)
    raw: list[bytes] = []

    def encode(tensor: torch.Tensor) -> Encoded:
        if tensor.shape[-1] != 256:
            return floats(tensor)
        kind, shape, data = coded("Q8_0")(tensor) if storage == "Q8_0" else q6_k(tensor)
        raw.append(data)
        return kind, shape, data

    write_gguf(tmp_path / "m.gguf", model, tmp_path / "saved", "qwen35", encode)
    blocks = np.frombuffer(raw[0], dtype=np.uint8).reshape(48, -1)
    decoded = torch.from_numpy(gguf.quants.dequantize(blocks, gguf.GGMLQuantizationType[storage]).copy())
    wanted = decoded.view(48, 2, 2, 64).transpose(1, 2).reshape(48, 256)  # 2 value heads for each of 2 key heads
    with resolved(tmp_path / "m.gguf") as found:
        weight = found.layer(0).weights["attn.o"]
    assert isinstance(weight, QTensor)
    assert weight.scheme.act_order == (storage == "Q6_K")
    assert torch.equal(dequantize(weight), wanted)
    dense = ModelSource(tmp_path / "m.gguf", floats=True).layer_weights(0)["attn.o"]
    assert isinstance(dense, torch.Tensor)
    assert torch.equal(dense, wanted.half())
    model.model.layers[0].linear_attn.out_proj.weight.data.copy_(wanted)
    decoder = load_model(tmp_path / "m.gguf", dtype="float32", activations="exact")
    batch, num_blocks = whole_batch([prompts()[2]], BLOCK)
    logits = decoder(batch, kv_for(decoder, num_blocks))
    torch.testing.assert_close(logits, expected(model, prompts()[2]), rtol=1e-3, atol=1e-3)


def q6_k(tensor: torch.Tensor) -> Encoded:
    """Random codes in the tensor's shape."""
    raw = torch.randint(0, 256, (tensor.numel() // 256, 210), dtype=torch.uint8)
    raw[:, 208:] = torch.full((len(raw), 1), 1e-4).half().view(torch.uint8)
    return "Q6_K", tuple(tensor.shape), raw.numpy().tobytes()


def test_blocks_that_predict_more_tokens_are_left_out(tmp_path: Path) -> None:
    model = tiny.make(tmp_path / "saved", "qwen3.5")
    count = model.config.num_hidden_layers
    write_gguf(tmp_path / "m.gguf", model, tmp_path / "saved", "qwen35", block_count=count + 1, nextn_predict_layers=1)
    with resolved(tmp_path / "m.gguf") as found:
        assert found.spec.num_layers == count


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
