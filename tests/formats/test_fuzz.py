"""Mutated bytes of checkpoints: each file is used, or refused with an LMKitError. `make test-all` tries many."""

from __future__ import annotations

import contextlib
import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch
from hypothesis import given, settings

from lmkit.errors import LMKitError
from lmkit.formats.gguf import GgufReader
from lmkit.formats.hub import DEMO_FOLDER
from lmkit.formats.safetensors_file import SafetensorsFile
from lmkit.jsonfile import parse_json
from lmkit.models import load_spec
from tests.formats import gguf_writer
from tests.formats.gguf_writer import floats
from tests.mutation import mutated

CONFIGS: list[dict[str, Any]] = [
    json.loads((DEMO_FOLDER / "config.json").read_text()),
    {
        "architectures": ["Qwen3MoeForCausalLM"],
        "model_type": "qwen3_moe",
        "hidden_size": 64,
        "intermediate_size": 96,
        "moe_intermediate_size": 40,
        "num_experts": 7,
        "num_experts_per_tok": 3,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "vocab_size": 128,
        "max_position_embeddings": 96,
        "rms_norm_eps": 1e-6,
        "rope_theta": 10000.0,
        "rope_scaling": {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 24},
        "tie_word_embeddings": False,
    },
]
GGUF_METADATA = {
    "general.architecture": "llama",
    "tokenizer.ggml.tokens": ["<s>", "a", "b"],
    "llama.context_length": 64,
    "llama.embedding_length": 32,
    "llama.block_count": 1,
    "llama.feed_forward_length": 64,
    "llama.attention.head_count": 2,
    "llama.attention.head_count_kv": 1,
    "llama.attention.layer_norm_rms_epsilon": 1e-5,
    "llama.rope.freq_base": 10000.0,
}


def safetensors_bytes(_: Path) -> bytes:
    return safetensors.torch.save({"a": torch.zeros(2, 5), "b": torch.zeros(3, dtype=torch.int8)})


def gguf_bytes(folder: Path) -> bytes:
    tensors = {"token_embd.weight": floats(torch.zeros(3, 32)), "blk.0.ffn_up.weight": floats(torch.zeros(4, 32))}
    gguf_writer.write(folder / "whole.gguf", GGUF_METADATA, tensors)
    return (folder / "whole.gguf").read_bytes()


def use_safetensors(path: Path) -> None:
    file = SafetensorsFile(path)
    for name in file.infos:
        file.tensor(name).clone()


def use_gguf(path: Path) -> None:
    reader = GgufReader(path)
    load_spec(reader.config)
    for module in reader.linears():
        reader.read_linear(module)


def use_config(path: Path) -> None:
    load_spec(parse_json(path.read_bytes(), str(path)))


Case = tuple[Callable[[Path], bytes], Callable[[Path], None], str]
CASES: dict[str, Case] = {
    "safetensors": (safetensors_bytes, use_safetensors, "model.safetensors"),
    "gguf": (gguf_bytes, use_gguf, "model.gguf"),
    "config, dense": (lambda _: json.dumps(CONFIGS[0]).encode(), use_config, "config.json"),
    "config, experts": (lambda _: json.dumps(CONFIGS[1]).encode(), use_config, "config.json"),
}


def refused_or_used(folder: Path, case: Case, num_examples: int) -> None:
    make, use, name = case
    shutil.copyfile(DEMO_FOLDER / "tokenizer.json", folder / "tokenizer.json")
    whole = make(folder)
    (folder / name).write_bytes(whole)
    use(folder / name)  # a file that is always refused would prove nothing

    @settings(deadline=None, max_examples=num_examples)
    @given(data=mutated(whole))
    def try_one(data: bytes) -> None:
        (folder / name).write_bytes(data)
        with contextlib.suppress(LMKitError):
            use(folder / name)

    try_one()


@pytest.mark.parametrize("name", CASES)
def test_t24_mutated_files(tmp_path: Path, name: str) -> None:
    refused_or_used(tmp_path, CASES[name], 60)


@pytest.mark.exhaustive
@pytest.mark.parametrize("name", CASES)
def test_t24_many_mutated_files(tmp_path: Path, name: str) -> None:
    refused_or_used(tmp_path, CASES[name], 5000)
