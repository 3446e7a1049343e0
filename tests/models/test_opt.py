"""OPT: what is refused. test_families.py holds its logits."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from lmkit.errors import CheckpointError, UnsupportedError
from lmkit.models import load_spec
from lmkit.models.source import ModelSource
from lmkit.quant.run import prepare
from tests.formats.files import folder
from tests.models import tiny
from tests.quant.helpers import recipe, tiny_checkpoint

CONFIG = {
    "architectures": ["OPTForCausalLM"], "hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4,
    "ffn_dim": 128, "vocab_size": 100, "max_position_embeddings": 128,
}  # fmt: skip


@pytest.mark.parametrize(
    "changes",
    [
        {"activation_function": "gelu"},
        {"enable_bias": False}, {"layer_norm_elementwise_affine": False},
    ],
)  # fmt: skip
def test_other_kinds_are_refused(changes: dict[str, Any]) -> None:
    assert load_spec(CONFIG).first_position == 2
    with pytest.raises(UnsupportedError, match=f"{next(iter(changes))} = .* is not supported"):
        load_spec(CONFIG | changes)


def test_quantization_is_refused(tmp_path: Path) -> None:
    path = tiny_checkpoint(tmp_path / "opt", "opt")
    with pytest.raises(UnsupportedError, match="models with LayerNorm are served but not quantized"):
        prepare(path, recipe()).run(tmp_path / "out")


@pytest.mark.parametrize(
    ("lost", "told"),
    [
        ("final_layer_norm.bias", r"model\.norm\.bias"),
        ("layers.1.self_attn_layer_norm.bias", r"model\.decoder\.layers\.1\.self_attn_layer_norm\.bias"),
        ("embed_positions.weight", r"model\.embed_positions\.weight"),
    ],
)
def test_a_missing_tensor(tmp_path: Path, lost: str, told: str) -> None:
    model = tiny.make(tmp_path / "opt", "opt")
    tensors = {name: tensor for name, tensor in model.state_dict().items() if name != f"model.decoder.{lost}"}
    del tensors["lm_head.weight"]
    config = model.config.to_dict() | {"architectures": ["OPTForCausalLM"], "dtype": "float32"}
    with pytest.raises(CheckpointError, match=f"tensor {told} is missing"):
        ModelSource(folder(tmp_path / "broken", tensors, config))
