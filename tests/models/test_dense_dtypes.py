"""Dense weights of 16 bits stay in 16 bits on a CPU, with the values of the checkpoint."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from lmkit.kernels.cpu import isa
from lmkit.kv_dtype import FLOAT32
from lmkit.layers.batch import allocate_kv, whole_batch
from lmkit.models.decoder import Decoder
from lmkit.models.loader import load, load_model
from lmkit.models.resolved import resolved
from tests.models import tiny

PROMPTS = [[5, 7, 11, 2], [3]]


def logits(decoder: Decoder) -> Tensor:
    spec = decoder.spec
    batch, num_blocks = whole_batch(PROMPTS, 8)
    kv = [allocate_kv(num_blocks, layer.num_kv_heads, 8, layer.head_dim, (FLOAT32, FLOAT32)) for layer in spec.layers]
    return decoder(batch, kv)


def stored(path: Path, dtype: torch.dtype, **overrides: object) -> Path:
    """A checkpoint of the dtype. One linear and the norms are float32, and have numbers that no short type holds."""
    model = tiny.make(path, "qwen2", **overrides)
    model.to(dtype).save_pretrained(path)
    tensors = load_file(path / "model.safetensors")
    for name, tensor in tensors.items():
        if "norm" in name or name.endswith("layers.1.self_attn.k_proj.weight"):
            tensors[name] = tensor.float() + 1e-5 * torch.rand(tensor.shape)
    save_file(tensors, path / "model.safetensors", {"format": "pt"})
    return path


def packed(decoder: Decoder) -> list[Tensor]:
    """The packed weights of all linears, without biases."""
    found: list[Tensor] = []

    def note(name: str, tensor: Tensor) -> Tensor:
        if not name.endswith((".bias", ".order")):
            found.append(tensor)
        return tensor

    for linear in decoder.linears:
        linear.replace_packed("x", note)
    return found


@pytest.mark.parametrize("packed_cache", [False, True])
def test_float16_weights_stay_as_they_are_stored(tmp_path: Path, packed_cache: bool) -> None:
    checkpoint = stored(tmp_path, torch.float16)
    if packed_cache:
        load_model(checkpoint, packed_cache=True)
    decoder = load_model(checkpoint, packed_cache=packed_cache)
    widened = load_model(checkpoint, dtype="float32")
    kinds = [tensor.dtype for tensor in packed(decoder)]
    assert kinds.count(torch.float32) == 1
    assert set(kinds) == {torch.float16, torch.float32}
    expected = logits(widened)
    tolerance = 1e-4 if isa.host().tiles else 3e-6  # tiles take an input as two bfloat16, and float32 weights none
    assert float((logits(decoder) - expected).abs().max()) <= tolerance * float(expected.abs().max())


@pytest.mark.parametrize("name", ["float16", "bfloat16"])
def test_packed_weights_take_16_bits(tmp_path: Path, name: str) -> None:
    """Panels add less than their width to the outputs of a linear."""
    sizes = {"hidden_size": 64, "num_attention_heads": 4, "vocab_size": 256, "intermediate_size": 128}
    model_of = tiny.make(tmp_path, "qwen2", tie_word_embeddings=True, **sizes)
    model_of.to(getattr(torch, name)).save_pretrained(tmp_path)
    with resolved(tmp_path) as model:
        decoder, planned, spec = load(model), model.weight_bytes(), model.spec
        assert {storage.dtypes[0].name for storage in model.storages} == {name}
    weights = spec.num_weights + spec.num_logits * spec.hidden_size
    total = sum(tensor.nbytes for tensor in packed(decoder))
    assert 2 * weights <= total <= 2.1 * weights
    assert decoder.embed_tokens is decoder.lm_head  # one copy
    assert planned <= 1.1 * total


def test_a_dtype_that_is_asked_for_is_that_of_all_weights(tmp_path: Path) -> None:
    decoder = load_model(stored(tmp_path, torch.float32, tie_word_embeddings=False), dtype="float16")
    assert isinstance(decoder.embed_tokens, Tensor)
    assert {tensor.dtype for tensor in packed(decoder)} == {torch.float16}
    assert decoder.embed_tokens.dtype is torch.float16


@pytest.mark.parametrize("name", ["float32", "float16", "bfloat16"])
def test_a_tied_head_gives_the_embeddings(tmp_path: Path, name: str) -> None:
    """The same bits as a table of its own."""
    model = tiny.make(tmp_path, "gemma3")  # with a factor on embeddings
    model.to(getattr(torch, name)).save_pretrained(tmp_path)
    decoder, own = load_model(tmp_path), load_model(tmp_path, lm_head="int8")
    assert decoder.embed_tokens is decoder.lm_head
    assert isinstance(own.embed_tokens, Tensor)
    ids = torch.tensor([0, 7, 198, 7])
    assert torch.equal(decoder.embed(ids), own.embed(ids))
