"""Tied embeddings, and biases that a model does not have: what config.json says, and what the file holds.

transformers ties the head only if the file lacks one of the two tensors, or has the same numbers in both.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

from lmkit.errors import CheckpointError
from lmkit.formats.hub import DEMO_FOLDER
from lmkit.layers.batch import whole_batch
from lmkit.models.loader import load_model
from lmkit.models.source import ModelSource
from lmkit.quant.recipe import load_recipe
from lmkit.quant.run import prepare
from tests.models import tiny
from tests.models.test_families import kv_for, prompts

EMBED, HEAD = "model.embed_tokens.weight", "lm_head.weight"
Tensors = dict[str, torch.Tensor]
FAMILIES: dict[str, dict[str, Any]] = {
    "llama": {},
    "qwen2": {},
    "granite": {},
    "qwen3-moe": {"head_dim": 16},
    "gemma2": {"tie_word_embeddings": False},
}


def changed(path: Path, change: Callable[[Tensors], Tensors], **config: object) -> Path:
    """The checkpoint with other tensors, and other fields of config.json (None = no such field)."""
    save_file(change(load_file(path / "model.safetensors")), path / "model.safetensors", {"format": "pt"})
    fields = json.loads((path / "config.json").read_text()) | config
    (path / "config.json").write_text(json.dumps({name: value for name, value in fields.items() if value is not None}))
    return path


def agrees(path: Path) -> None:
    """Assert that our logits are those of transformers, which loads the same folder."""
    model = transformers.AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).eval()
    decoder, rows = load_model(path), prompts()
    batch, num_blocks = whole_batch(rows, 5)
    found = decoder(batch, kv_for(decoder, num_blocks)).split([len(row) for row in rows])
    for row, got in zip(rows, found, strict=True):
        with torch.no_grad():
            torch.testing.assert_close(got, model(torch.tensor([row])).logits[0], rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("flag", [True, None])
@pytest.mark.parametrize("name", FAMILIES)
def test_a_head_that_differs_is_the_head(tmp_path: Path, name: str, flag: bool | None) -> None:
    tiny.make(tmp_path, name, **FAMILIES[name])
    path = changed(tmp_path, dict, tie_word_embeddings=flag)
    assert HEAD in load_file(path / "model.safetensors")
    agrees(path)


@pytest.mark.parametrize(
    "change",
    [
        lambda tensors: tensors | {HEAD: tensors[EMBED].clone()},
        lambda tensors: {HEAD if name == EMBED else name: tensor for name, tensor in tensors.items()},
    ],
    ids=["equal", "head alone"],
)
@pytest.mark.parametrize("name", ["llama-tied-bias", "gemma3", "qwen3"])
def test_one_tensor_is_both(tmp_path: Path, name: str, change: Callable[[Tensors], Tensors]) -> None:
    tiny.make(tmp_path, name)
    assert HEAD not in load_file(tmp_path / "model.safetensors")
    source = ModelSource(changed(tmp_path, change))
    assert source.spec.tie_embeddings
    agrees(tmp_path)


def test_a_quantized_checkpoint_keeps_the_head_that_differs(tmp_path: Path) -> None:
    """It also says that it has one, for programs that believe config.json."""
    source, out = tmp_path / "model", tmp_path / "out"
    tiny.make(source, "qwen2", hidden_size=64, intermediate_size=128, num_attention_heads=4)
    changed(source, dict, tie_word_embeddings=True)
    shutil.copy(DEMO_FOLDER / "tokenizer.json", source)
    prepare(source, load_recipe("rtn_w4a16_g128", {"scheme": {"bits": 4, "group_size": 32}})).run(out)
    assert json.loads((out / "config.json").read_text())["tie_word_embeddings"] is False
    tensors = load_file(out / "model.safetensors")
    assert torch.equal(tensors[HEAD], load_file(source / "model.safetensors")[HEAD])
    assert not ModelSource(out).spec.tie_embeddings


BIASES = ("model.layers.1.self_attn.o_proj.bias", "model.layers.0.mlp.up_proj.bias", "lm_head.bias")


@pytest.mark.parametrize("name", BIASES)
def test_biases_of_zeros_are_left_out(tmp_path: Path, name: str) -> None:
    tiny.make(tmp_path, "llama")
    outputs = load_file(tmp_path / "model.safetensors")[name.replace("bias", "weight")].shape[0]
    changed(tmp_path, lambda tensors: tensors | {name: torch.zeros(outputs)})
    agrees(tmp_path)
    changed(tmp_path, lambda tensors: tensors | {name: torch.ones(outputs)})
    with pytest.raises(CheckpointError, match=f"{name} is there, but config.json says there is none"):
        load_model(tmp_path)
