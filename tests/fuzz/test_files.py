"""Damaged files of a checkpoint: each is read as far as it is right, or refused with one of lmkit's errors."""

from __future__ import annotations

import json
import random
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from lmkit.errors import LMKitError
from lmkit.formats.checkpoint import CheckpointReader
from lmkit.formats.generation_config import read_defaults
from lmkit.formats.gguf_file import GgufFile
from lmkit.formats.gguf_tokenizer import generation_config, tokenizer_config, tokenizer_json
from lmkit.formats.kv_config import KVConfig, KVLayerConfig, load_kv_config, save_kv_config
from lmkit.models import load_spec
from lmkit.models.source import ModelSource
from lmkit.text import Tokenizer
from tests.formats import gguf_writer
from tests.formats.files import folder
from tests.fuzz.mutations import SIZES, mutated_bytes, mutated_json, survives

TENSORS = {"a.weight": torch.arange(64.0).reshape(8, 8), "b": torch.arange(9, dtype=torch.bfloat16)}

SAMPLING = {
    "do_sample": True, "temperature": 0.7, "top_p": 0.9, "top_k": 20, "min_p": 0.1, "repetition_penalty": 1.1,
    "max_new_tokens": 50, "eos_token_id": [0, 2], "num_beams": 1,
}  # fmt: skip

EXPERTS = {
    "architectures": ["Qwen3MoeForCausalLM"], "model_type": "qwen3_moe", "hidden_size": 64, "intermediate_size": 96,
    "moe_intermediate_size": 40, "num_experts": 7, "num_experts_per_tok": 3, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16, "vocab_size": 128,
    "max_position_embeddings": 96, "rms_norm_eps": 1e-6, "rope_theta": 10000.0, "tie_word_embeddings": False,
    "rope_scaling": {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 24},
}  # fmt: skip


def read_all(path: Path) -> None:
    with CheckpointReader(path) as reader:
        for name in reader.names():
            reader.tensor(name)


def read_gguf(path: Path) -> None:
    source = ModelSource(path)
    for name in source.reader.names():
        source.reader.tensor(name)
    source.layer_weights(0)


def read_gguf_tokenizer(path: Path) -> None:
    file = GgufFile(path)
    for read in (tokenizer_config, generation_config, tokenizer_json):
        read(file)


def use_tokenizer(path: Path) -> None:
    tokenizer = Tokenizer.from_pretrained(path)
    tokenizer.decode(tokenizer.encode("def f(x): return 'naïve 🙂'"))
    if tokenizer.chat_template is not None:
        tokenizer.render_chat([{"role": "user", "content": "Hi"}])


def write_gguf(path: Path) -> bytes:
    metadata = {
        "general.architecture": "llama", "llama.block_count": 1, "llama.embedding_length": 32,
        "llama.attention.head_count": 2, "llama.attention.layer_norm_rms_epsilon": 1e-5,
        "llama.feed_forward_length": 32, "llama.context_length": 64, "tokenizer.ggml.tokens": ["a", "b"],
    }  # fmt: skip
    tensors = {
        "token_embd.weight": gguf_writer.floats(torch.zeros(2, 32)),
        "output_norm.weight": gguf_writer.floats(torch.ones(32)),
    }
    for name in ("attn_q", "attn_k", "attn_v", "attn_output", "ffn_gate", "ffn_up", "ffn_down"):
        tensors[f"blk.0.{name}.weight"] = gguf_writer.q4_0(torch.randn(32, 32))
    for name in ("attn_norm", "ffn_norm"):
        tensors[f"blk.0.{name}.weight"] = gguf_writer.floats(torch.ones(32))
    gguf_writer.write(path, metadata, tensors)
    return path.read_bytes()


@pytest.mark.parametrize("number", SIZES)
@pytest.mark.parametrize("name", ["gpt2", "llama", "t5", "bert"])
def test_gguf_tokenizers(tmp_path: Path, name: str, number: int) -> None:
    """Any byte of the metadata changed: a tokenizer, or one of lmkit's errors."""
    key, file = "tokenizer.ggml.", tmp_path / "m.gguf"
    metadata = {
        key + "model": name, key + "pre": "qwen2",
        key + "tokens": ["<unk>", "<s>", "</s>", "a", "b", "ab", "<|im_end|>"],
        key + "token_type": [2, 3, 3, 1, 1, 1, 4], key + "scores": [0.0, 0.0, 0.0, -1.0, -2.0, -3.0, 0.0],
        key + "merges": ["a b"], key + "bos_token_id": 1, key + "eos_token_id": 2, key + "unknown_token_id": 0,
        key + "seperator_token_id": 2, "tokenizer.chat_template": "{{ messages }}", "general.sampling.temp": 0.5,
    }  # fmt: skip
    gguf_writer.write(file, metadata, {})
    seed = file.read_bytes()
    read_gguf_tokenizer(file)

    def attempt(rng: random.Random) -> None:
        file.unlink()
        file.write_bytes(mutated_bytes(seed, rng))
        read_gguf_tokenizer(file)

    survives(number, name, attempt, LMKitError)


@pytest.mark.parametrize("number", SIZES)
@pytest.mark.parametrize("kind", ["safetensors", "gguf"])
def test_weights(tmp_path: Path, kind: str, number: int) -> None:
    path = tmp_path / "m"
    folder(path, TENSORS)
    file, read = path / "model.safetensors", read_all
    if kind == "gguf":
        file, read = path / "m.gguf", read_gguf
        write_gguf(file)
    seed = file.read_bytes()

    def attempt(rng: random.Random) -> None:
        file.unlink()  # a file that is mapped must not shrink
        file.write_bytes(mutated_bytes(seed, rng))
        read(file if kind == "gguf" else path)

    survives(number, kind, attempt, LMKitError)


@pytest.mark.parametrize("number", SIZES)
@pytest.mark.parametrize("damage", ["bytes", "json"])
@pytest.mark.parametrize(
    ("name", "read"),
    [
        ("config.json", lambda path: ModelSource(path)),
        ("generation_config.json", read_defaults),
        ("kv_config.json", load_kv_config),
        ("tokenizer.json", use_tokenizer),
        ("tokenizer_config.json", use_tokenizer),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_json_files(
    demo_model: Path, tmp_path: Path, name: str, read: Callable[[Path], Any], damage: str, number: int
) -> None:
    path = tmp_path / "m"
    path.mkdir()
    for file in filter(Path.is_file, demo_model.iterdir()):
        shutil.copy(file, path)
    (path / "generation_config.json").write_text(json.dumps(SAMPLING))
    save_kv_config(KVConfig(num_kv_heads=2, head_dim=64, layers=(KVLayerConfig(k="int8", v="int4"),) * 8), path)
    seed = (path / name).read_bytes()
    value = json.loads(seed)
    read(path)
    if name == "tokenizer.json":
        number = -(-number // 20)  # 0.3 MB, parsed whole

    def attempt(rng: random.Random) -> None:
        damaged = mutated_bytes(seed, rng) if damage == "bytes" else json.dumps(mutated_json(value, rng)).encode()
        (path / name).write_bytes(damaged)
        read(path)

    survives(number, f"{name} {damage}", attempt, LMKitError)


@pytest.mark.parametrize("number", SIZES)
def test_a_config_with_experts(number: int) -> None:
    load_spec(EXPERTS)
    survives(number, "experts", lambda rng: load_spec(mutated_json(EXPERTS, rng)), LMKitError)
