"""Every family gives transformers' logits: whole prompts, chunked prefill and decode, on paged KV."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import safetensors.torch
import torch

from lmkit.errors import CheckpointError, UnsupportedError
from lmkit.kv_dtype import FLOAT32
from lmkit.layers.batch import KVLayer, whole_batch
from lmkit.models import load_spec
from lmkit.models.decoder import Decoder
from lmkit.models.kv_storage import KVStorage, allocate
from lmkit.models.loader import load_model
from lmkit.turbo.plan import Chunk, NewSequence
from lmkit.turbo.request import SamplingParams
from lmkit.turbo.runners.batch import PersistentBatch
from tests.models import tiny

TOLERANCE = 1e-4
BLOCK = 5


def kv_for(decoder: Decoder, num_blocks: int, block_size: int = BLOCK) -> list[KVLayer]:
    storages = [KVStorage(FLOAT32, FLOAT32)] * decoder.spec.num_layers
    return allocate(decoder.spec.layers, storages, num_blocks, block_size, decoder.spec.max_position)


def prompts() -> list[list[int]]:
    generator = torch.Generator().manual_seed(3)
    return [torch.randint(0, 199, (n,), generator=generator).tolist() for n in (31, 1, 12)]


def expected(model: torch.nn.Module, row: list[int]) -> torch.Tensor:
    with torch.no_grad():
        return model(torch.tensor([row])).logits[0]


@pytest.mark.parametrize("name", tiny.FAMILIES)
def test_whole_prompts_match_transformers(tmp_path: Path, name: str) -> None:
    model = tiny.make(tmp_path, name)
    decoder = load_model(tmp_path)
    batch, num_blocks = whole_batch(prompts(), BLOCK)
    logits = decoder(batch, kv_for(decoder, num_blocks))
    for row, got in zip(prompts(), logits.split([len(r) for r in prompts()]), strict=True):
        torch.testing.assert_close(got, expected(model, row), rtol=TOLERANCE, atol=TOLERANCE)


def test_convolutions_apart_have_the_widths_of_their_heads(tmp_path: Path) -> None:
    """Of OLMo Hybrid with values wider than keys. transformers writes the three as parts of one width, and reads them
    one after the other."""
    model = tiny.make(tmp_path, "olmo-hybrid", linear_key_head_dim=16, linear_value_head_dim=32)
    file, keys = tmp_path / "model.safetensors", 2 * 16
    tensors = safetensors.torch.load_file(file)
    for prefix in {name.partition("q_conv1d")[0] for name in tensors if "q_conv1d" in name}:
        names = [f"{prefix}{part}_conv1d.weight" for part in "qkv"]
        whole = torch.cat([tensors[name] for name in names])
        tensors |= dict(zip(names, map(torch.clone, whole.split([keys, keys, len(whole) - 2 * keys])), strict=True))
    safetensors.torch.save_file(tensors, file)
    decoder, row = load_model(tmp_path), prompts()[0]
    batch, num_blocks = whole_batch([row], BLOCK)
    logits = decoder(batch, kv_for(decoder, num_blocks))
    torch.testing.assert_close(logits, expected(model, row), rtol=TOLERANCE, atol=TOLERANCE)


@pytest.mark.parametrize("name", tiny.FAMILIES)
def test_chunked_prefill_and_decode_match_transformers(tmp_path: Path, name: str) -> None:
    """Two sequences advance side by side in uneven chunks down to single tokens, over scattered blocks."""
    model = tiny.make(tmp_path, name)
    decoder = load_model(tmp_path)
    rows = [prompts()[0], prompts()[2]]
    chunks = [[9, 1, 13, 1, 1, 1, 5], [4, 4, 1, 1, 1, 1]]
    batch = PersistentBatch(num_slots=3, max_model_len=40, block_size=BLOCK, max_step_tokens=64)
    for slot, row in enumerate(rows):
        params = SamplingParams()
        batch.enter(NewSequence(slot, row, len(row), params, (), prompt_logprobs=False))
    kv, free = kv_for(decoder, 16), [11, 2, 7, 0, 5, 13, 1, 9, 15, 4, 3]
    done, held = [0, 0], [0, 0]
    for step in range(max(map(len, chunks))):
        plan_chunks = []
        for slot, sizes in enumerate(chunks):
            if step < len(sizes):
                need = -(-(done[slot] + sizes[step]) // BLOCK) - held[slot]
                plan_chunks.append(Chunk(slot, done[slot], sizes[step], [[free.pop() for _ in range(need)]], 1))
                done[slot], held[slot] = done[slot] + sizes[step], held[slot] + need
        inputs, _ = batch.inputs(plan_chunks)
        logits = decoder(inputs, kv)
        for chunk, got in zip(plan_chunks, logits, strict=True):
            want = expected(model, rows[chunk.slot])[chunk.start + chunk.num_tokens - 1]
            torch.testing.assert_close(got, want, rtol=TOLERANCE, atol=TOLERANCE)
    assert done == [len(row) for row in rows]


def test_longrope_has_other_factors_for_long_prompts(tmp_path: Path) -> None:
    """Of both, in one step: each prompt has its own."""
    model, row = tiny.make(tmp_path, "phi3-long"), prompts()[0]
    assert len(row) > tiny.FAMILIES["phi3-long"][1]["original_max_position_embeddings"] > 20
    batch, num_blocks = whole_batch([row, row[:20]], BLOCK)
    decoder = load_model(tmp_path)
    found = decoder(batch, kv_for(decoder, num_blocks)).split([len(row), 20])
    for got, prompt in zip(found, (row, row[:20]), strict=True):
        torch.testing.assert_close(got, expected(model, prompt), rtol=TOLERANCE, atol=TOLERANCE)


def test_dynamic_ntk_stretches_beyond_the_trained_context(tmp_path: Path) -> None:
    model = tiny.make(tmp_path, "llama-dynamic")
    row = torch.randint(0, 199, (57,), generator=torch.Generator().manual_seed(5)).tolist()
    assert len(row) > tiny.FAMILIES["llama-dynamic"][1]["max_position_embeddings"]
    decoder = load_model(tmp_path)
    batch, num_blocks = whole_batch([row, row[:20]], BLOCK)
    logits = decoder(batch, kv_for(decoder, num_blocks))
    torch.testing.assert_close(logits[: len(row)], expected(model, row), rtol=TOLERANCE, atol=TOLERANCE)
    torch.testing.assert_close(logits[len(row) :], expected(model, row[:20]), rtol=TOLERANCE, atol=TOLERANCE)


def test_llama_4_is_served_up_to_one_chunk() -> None:
    """In a longer context its layers with RoPE would not see all keys."""
    config = CONFIG | {"architectures": ["Llama4ForCausalLM"], "max_position_embeddings": 1 << 20}
    assert load_spec(config).max_position == 8192
    for unlimited in ({"attention_chunk_size": None}, {"layer_types": ["full_attention"] * 2}):
        assert load_spec(config | unlimited).max_position == 1 << 20


CONFIG = {
    "architectures": ["LlamaForCausalLM"], "hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "intermediate_size": 128, "vocab_size": 100, "rms_norm_eps": 1e-5,
    "max_position_embeddings": 128,
}  # fmt: skip


def test_old_style_rope_fields_are_read() -> None:
    scaled = CONFIG | {"rope_theta": 500.0, "rope_scaling": {"type": "linear", "factor": 8.0}}
    rope = load_spec(scaled).layers[0].rope
    assert (rope.kind, rope.theta, rope.factor, rope.rotary_dim) == ("linear", 500.0, 8.0, 16)


def test_an_unknown_architecture_is_refused_with_the_list() -> None:
    with pytest.raises(UnsupportedError, match=r"GPT2LMHeadModel.*LlamaForCausalLM, Mamba2ForCausalLM, Mi.*Qwen2"):
        load_spec(CONFIG | {"architectures": ["GPT2LMHeadModel"]})


@pytest.mark.parametrize(
    ("name", "nearest"),
    [
        ("Dots2ForCausalLM", "Dots1ForCausalLM"),
        ("Qwen3NextVLForCausalLM", "Qwen3NextForCausalLM"),
        ("GPT2LMHead", None),
    ],
)
def test_the_nearest_families_of_an_unknown_one_are_told(name: str, nearest: str | None) -> None:
    with pytest.raises(UnsupportedError, match=r"docs/families\.md says how to add one") as refusal:
        load_spec(CONFIG | {"architectures": [name]})
    found = re.search(r"the nearest names are (\w+)", str(refusal.value))
    assert (found and found[1]) == nearest


@pytest.mark.parametrize(
    "change",
    [
        {"hidden_size": -1}, {"hidden_size": 10**12}, {"hidden_size": "64"}, {"hidden_size": 64.0},
        {"hidden_size": True},
        {"num_hidden_layers": 2**30}, {"num_hidden_layers": 0}, {"vocab_size": 2**29}, {"num_attention_heads": 0},
        {"num_key_value_heads": 3}, {"rms_norm_eps": float("nan")}, {"rms_norm_eps": 7}, {"head_dim": 15},
        {"rope_theta": -1}, {"rope_theta": float("inf")}, {"rope_parameters": {"rope_type": "linear", "factor": 0}},
        {"rope_parameters": [1]}, {"rope_parameters": {"rope_type": "longrope"}},
        {"rope_parameters": {"rope_type": "longrope", "short_factor": [1.0] * 8, "long_factor": [1.0] * 7}},
        {"rope_parameters": {"rope_type": "longrope", "short_factor": [1.0] * 8, "long_factor": [0.0] * 8}},
        {"max_position_embeddings": 2**31}, {"intermediate_size": None},
    ],
)  # fmt: skip
def test_absurd_numbers_are_refused(change: dict[str, object]) -> None:
    with pytest.raises(CheckpointError, match=r"config\.json"):
        load_spec(CONFIG | change)


@pytest.mark.parametrize(
    "change",
    [{"hidden_act": "gelu"}, {"rope_parameters": {"rope_type": "spiral"}}, {"dtype": "float8_e4m3fn"}],
)
def test_what_is_not_built_is_refused(change: dict[str, object]) -> None:
    with pytest.raises(UnsupportedError, match="lmkit runs"):
        load_spec(CONFIG | change)
