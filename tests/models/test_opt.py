"""OPT: what is refused, and its quantization. test_families.py holds its logits."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from lmkit.errors import CheckpointError, UnsupportedError
from lmkit.models import load_spec
from lmkit.models.source import ModelSource
from lmkit.quant.report.evaluate import encode_text
from lmkit.quant.run import prepare
from tests.formats.files import folder
from tests.models import tiny
from tests.quant.helpers import CLIP, SCALE, recipe, tiny_checkpoint

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


@pytest.mark.parametrize("family", ["opt", "opt-350m"])
def test_quantization(tmp_path: Path, family: str) -> None:
    path = tiny_checkpoint(tmp_path / "source", family)
    ids, kl = encode_text(path)[:500], {}
    for name, asked in {"rtn": recipe(), "gptq": recipe(SCALE, CLIP, rounder={"step": "gptq"})}.items():
        report = prepare(path, asked).run(tmp_path / name, eval_ids=ids)
        assert report.evaluation is not None
        assert report.evaluation.divergence is not None
        kl[name] = report.evaluation.divergence.kl_mean
    assert kl["gptq"] < 0.5 * kl["rtn"]


def test_rows_of_text_begin_with_their_first_positions(tmp_path: Path) -> None:
    source = ModelSource(tiny_checkpoint(tmp_path, "opt"))
    head, positions = source.head(), source.positions()
    assert positions is not None
    rows = torch.tensor([[5, 6, 7], [8, 9, 5]])
    assert torch.equal(head.embed_rows(rows), head.embed(rows.flatten()) + positions[:3].repeat(2, 1))


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
