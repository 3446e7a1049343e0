"""Experts that transformers keeps in one tensor are linears of their own here, in each layout that it has."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks.families.sweep import prompts, rounded_like
from benchmarks.families.tiny import save_tiny
from lmkit.models.flexible.experts import Experts
from lmkit.models.loader import load_model
from lmkit.quant.recipe import load_recipe
from lmkit.quant.run import prepare

GRID = {"format": "compressed-tensors", "scheme": {"group_size": 32, "smaller_groups": False}}
TEXT = {"calibration": {"dataset": "demo", "num_samples": 8, "seq_len": 48, "all_experts": True}}


@pytest.mark.parametrize(
    "model_type",
    [
        "flex_olmo",  # one by one in the file
        "granitemoeshared",  # one tensor of all in the file
        "gpt_oss",  # [experts, in, out], gate and up side by side, biases
        "jamba",
        "nemotron_h",  # without a gate
    ],
)
def test_logits_are_those_of_transformers(tmp_path: Path, model_type: str) -> None:
    model = save_tiny(model_type, tmp_path)
    decoder: Any = load_model(tmp_path, model_impl="flexible", dtype="float32", activations="exact")
    mixtures = [part for part in decoder.module.modules() if isinstance(part, Experts)]
    leaves = {"up_proj", "down_proj"} if model_type == "nemotron_h" else {"gate_proj", "up_proj", "down_proj"}
    assert mixtures
    assert all(each.get_submodule("0")._modules.keys() == leaves for each in mixtures)
    ids = torch.tensor([prompts(0)[1]])
    with torch.inference_mode():
        assert torch.allclose(decoder.plain_logits(ids), model(ids).logits[0], atol=1e-4)


@pytest.mark.parametrize("model_type", ["granitemoeshared", "gpt_oss", "nemotron_h"])
def test_experts_together_give_what_each_gives_alone(tmp_path: Path, model_type: str) -> None:
    """Whichever are chosen: in the first rows none, as a number above all says."""
    save_tiny(model_type, tmp_path)
    decoder: Any = load_model(tmp_path, model_impl="flexible", dtype="float32", activations="exact")
    part = next(part for part in decoder.module.modules() if isinstance(part, Experts))
    assert part._together is not None
    x, generator = torch.randn(40, part._parts(0)["up_proj"].in_features), torch.Generator().manual_seed(1)
    chosen = torch.stack([torch.randperm(part.num_experts, generator=generator)[:2] for _ in x])
    chosen[:3] = part.num_experts
    weights = torch.rand(40, 2, generator=generator)
    with torch.inference_mode():
        found = [part(x[:count], chosen[:count], weights[:count]) for count in (40, 5)]
        vars(part)["_together"] = None
        want = part(x, chosen, weights)
    assert not found[0][:3].any()
    for each in found:
        torch.testing.assert_close(each, want[: len(each)], rtol=1e-5, atol=1e-5)


def test_gptq_rounds_experts_by_their_tokens(tmp_path: Path) -> None:
    model = save_tiny("flex_olmo", tmp_path / "source")
    report = prepare(tmp_path / "source", load_recipe("gptq_w4a16_g128", GRID | TEXT)).run(tmp_path / "out")
    experts = [linear for layer in report.layers for linear in layer.linears if ".experts." in linear.module]
    assert len(experts) == 2 * 4 * 3
    assert sum(linear.method == "gptq" for linear in experts) >= 4
    assert sum(x.error for x in experts) < sum(x.rtn_error for x in experts)
    assert rounded_like(model, tmp_path / "out")
    assert report.bytes_after < 0.8 * report.bytes_before
