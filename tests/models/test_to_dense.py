"""`lmkit convert --format dense`: the values that are read, in the dtype that config.json names."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from lmkit.errors import ConfigError, UnsupportedError
from lmkit.formats.names import Activations
from lmkit.models.to_dense import to_dense
from lmkit.qtensor import QuantScheme
from tests.formats import test_mxfp4 as mxfp4
from tests.models import tiny
from tests.models.test_formats import CASES, rewritten

NF4 = torch.linspace(-1, 1, 16)


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("plain")
    sizes = {"hidden_size": 64, "intermediate_size": 160, "num_attention_heads": 4, "num_hidden_layers": 1}
    tiny.make(path, "llama-tied-bias", **sizes, tie_word_embeddings=False)
    return path


def tensors(path: Path) -> dict[str, torch.Tensor]:
    return load_file(path / "model.safetensors")


@pytest.mark.parametrize(("name", "schemes", "activations"), CASES)
def test_the_values_that_are_read(
    plain: Path, tmp_path: Path, name: str, schemes: dict[str, QuantScheme], activations: Activations
) -> None:
    quantized, expected = rewritten(plain, tmp_path, name, schemes, activations)
    assert to_dense(quantized, tmp_path / "out") > 0
    found, wanted = tensors(tmp_path / "out"), tensors(expected)
    assert found.keys() == wanted.keys()
    assert all(torch.equal(found[key], tensor) for key, tensor in wanted.items())
    assert "quantization_config" not in json.loads((tmp_path / "out" / "config.json").read_text())


def test_experts_in_mxfp4_have_the_same_logits(tmp_path: Path) -> None:
    coded, dense = mxfp4.packed(tmp_path)
    to_dense(coded, tmp_path / "out")
    assert torch.equal(mxfp4.logits(tmp_path / "out"), mxfp4.logits(dense))


def test_a_table_of_four_bits(plain: Path, tmp_path: Path) -> None:
    found, config = tensors(plain), json.loads((plain / "config.json").read_text())
    name, codes = "model.layers.0.mlp.up_proj.weight", torch.arange(160 * 64) % 16
    state = {"quant_type": "nf4", "blocksize": 64, "shape": [160, 64], "dtype": "float32"}
    found |= {
        name: (codes[::2] << 4 | codes[1::2]).to(torch.uint8)[:, None],
        f"{name}.quant_map": NF4,
        f"{name}.absmax": torch.full((160,), 2.0),
        f"{name}.quant_state.bitsandbytes__nf4": torch.tensor(list(json.dumps(state).encode()), dtype=torch.uint8),
    }
    (tmp_path / "nf4").mkdir()
    save_file(found, tmp_path / "nf4" / "model.safetensors", {"format": "pt"})
    entry = {"quant_method": "bitsandbytes", "load_in_4bit": True, "bnb_4bit_quant_type": "nf4"}
    (tmp_path / "nf4" / "config.json").write_text(json.dumps(config | {"quantization_config": entry}))
    assert to_dense(tmp_path / "nf4", tmp_path / "out") == 1
    written = tensors(tmp_path / "out")
    assert written.keys() == tensors(plain).keys()
    assert torch.equal(written[name], 2 * NF4[codes].view(160, 64))


def test_what_is_refused(plain: Path, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="is dense already"):
        to_dense(plain, tmp_path / "out")
    quantized, _ = rewritten(plain, tmp_path, *CASES[5])
    config = json.loads((quantized / "config.json").read_text())
    scheme = {"num_bits": 8, "type": "int", "strategy": "tensor", "symmetric": True, "dynamic": False}
    config["quantization_config"]["kv_cache_scheme"] = scheme
    (quantized / "config.json").write_text(json.dumps(config))
    with pytest.raises(UnsupportedError, match="kv_cache_scheme: dense checkpoints have no place"):
        to_dense(quantized, tmp_path / "out")
    assert not (tmp_path / "out").exists()
