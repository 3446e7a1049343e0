"""Rotations: exact on every kind of model that they take, and refused by name on others."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from lmkit.errors import ConfigError, UnsupportedError
from lmkit.models.source import ModelSource
from lmkit.quant.report import selfcheck
from lmkit.quant.rotation import problem, turned
from lmkit.quant.run import prepare
from lmkit.quant.steps.rotate import Rotate
from tests.models import tiny
from tests.quant.helpers import RTN, recipe, tiny_checkpoint

IDS = torch.arange(5, 35)
# Biases, tied embeddings, norms with an offset, heads' norms, experts with a shared one, experts with biases.
FAMILIES: dict[str, dict[str, Any]] = {
    "llama-tied-bias": {"hidden_size": 96},  # no power of two
    "qwen2": {},
    "qwen3": {},
    "gemma": {},
    "qwen2-moe": {},
    "gpt-oss": {},
}
REFUSED = {
    "olmo2": "norms behind attention and MLP",
    "opt": "added to positions",
    "deepseek-v2-lite": "attn.kv_a, of which",
    "qwen3-next": "a layer that drafts tokens",
    "qwen2.5-vl": "images or vectors",
}


def logits(source: ModelSource) -> Tensor:
    hidden = selfcheck._behind_layers(source, IDS, torch.float32, "cpu")
    return selfcheck._logits(selfcheck._normalized(source, hidden), selfcheck._head(source), slice(None))


@pytest.mark.parametrize("family", FAMILIES)
def test_logits_stay(tmp_path: Path, family: str) -> None:
    source = ModelSource(tiny_checkpoint(tmp_path, family, num_hidden_layers=2, **FAMILIES[family]))
    with torch.no_grad():
        before = logits(source)
        for residual, values in ((True, True), (False, True)):
            found = turned(source, residual=residual, values=values)
            torch.testing.assert_close(logits(found), before, rtol=0, atol=2e-5 * float(before.abs().max()))
            weights, others = source.layer_weights(1), found.layer_weights(1)
            for role in ("attn.o", *(["mlp.gate"] if residual and "mlp.gate" in weights else [])):
                assert (weights[role] - others[role]).abs().max() > 0.01  # type: ignore[operator, union-attr]


@pytest.mark.parametrize("family", REFUSED)
def test_other_models_are_refused_by_name(tmp_path: Path, family: str) -> None:
    tiny.make(tmp_path, family)
    assert REFUSED[family] in (problem(ModelSource(tmp_path).spec) or "")


def test_a_model_that_cannot_be_turned_is_refused(tmp_path: Path) -> None:
    path = tiny_checkpoint(tmp_path, "olmo2", num_hidden_layers=1)
    with pytest.raises(UnsupportedError, match="rotate does not go with norms behind attention and MLP"):
        prepare(path, recipe({"step": "rotate"}))


def without_head(path: Path) -> None:
    """Write it as sentence-transformers does."""
    file = path / "model.safetensors"
    save_file({name.removeprefix("model."): tensor for name, tensor in load_file(file).items()}, file)


@pytest.mark.parametrize(
    ("change", "reason"),
    [(without_head, "without a head"), (tiny.put_beside_a_tower, "vision_tower.proj.weight")],
)
def test_a_stream_that_others_read_is_not_turned(tmp_path: Path, change: Callable[[Path], None], reason: str) -> None:
    source = ModelSource(tiny_checkpoint(tmp_path, "ministral3", num_hidden_layers=2, tie_word_embeddings=True))
    Rotate().opened(source)
    change(tmp_path)
    with pytest.raises(UnsupportedError, match=f"{reason}.*; `residual: false` turns values alone"):
        Rotate().opened(ModelSource(tmp_path))
    Rotate(residual=False).opened(ModelSource(tmp_path))


def test_a_turned_model_is_quantized(tmp_path: Path) -> None:
    """The run reads the file back and compares logits (report.selfcheck)."""
    path = tiny_checkpoint(tmp_path / "source", "llama-tied-bias", num_hidden_layers=1)
    prepare(path, recipe({"step": "rotate"}, RTN, rounder=None)).run(tmp_path / "out")
    out = ModelSource(tmp_path / "out")
    assert not out.spec.tie_embeddings
    norm = out.final_norm()
    assert norm is not None
    assert bool((norm == 1).all())


def test_the_plan_counts_the_head_that_a_rotation_adds(tmp_path: Path) -> None:
    path = tiny_checkpoint(tmp_path, "llama-tied-bias", num_hidden_layers=1)
    whole, values = (
        prepare(path, recipe({"step": "rotate", "residual": residual}, RTN, rounder=None)).budget
        for residual in (True, False)
    )
    embeddings = ModelSource(path).reader.info("model.embed_tokens.weight").nbytes
    assert whole.disk_bytes - values.disk_bytes == embeddings
    assert whole.memory_bytes - values.memory_bytes == 2 * embeddings


def test_a_step_that_turns_nothing_is_refused() -> None:
    with pytest.raises(ConfigError, match="rotate turns nothing without `residual` and `values`"):
        recipe({"step": "rotate", "residual": False, "values": False})
