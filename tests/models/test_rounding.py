"""Rounding while a checkpoint loads: the weights are those of the recipe that only rounds, and are kept for later."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from lmkit.errors import ConfigError
from lmkit.models.loader import load_model
from lmkit.models.resolved import resolved
from lmkit.models.rounding import SCHEMES, scheme_for
from lmkit.models.source import ModelSource
from lmkit.qtensor import QTensor
from lmkit.quant.recipe import load_recipe
from lmkit.quant.run import prepare
from tests.models import tiny
from tests.models.test_packed_cache import files, logits
from tests.quant.helpers import tiny_checkpoint

RECIPES = {"int4": "rtn_w4a16_g128", "int8": "rtn_w8a16", "fp8": "fp8_channel"}
SHAPE = {"hidden_size": 128, "intermediate_size": 256, "num_attention_heads": 4, "head_dim": 32}


@pytest.mark.parametrize("name", SCHEMES)
def test_the_weights_are_those_of_the_recipe_and_the_next_start_maps_them(tmp_path: Path, name: str) -> None:
    source, out = tmp_path / "source", tmp_path / "out"
    tiny_checkpoint(source, **SHAPE)
    prepare(source, load_recipe(RECIPES[name])).run(out)
    rounded, stored = ModelSource(source, rounding=name), ModelSource(out)
    for index in range(rounded.spec.num_layers):
        weights, expected = rounded.layer_weights(index), stored.layer_weights(index)
        for role in rounded.spec.layers[index].linears:
            found, wanted = weights[role], expected[role]
            assert isinstance(found, QTensor)
            assert isinstance(wanted, QTensor)
            assert found.scheme == wanted.scheme
            for part in ("codes", "scales", "zeros"):
                assert torch.equal(getattr(found, part).float().flatten(), getattr(wanted, part).float().flatten())
    plain = logits(load_model(source, packed_cache=True))
    first, second = (logits(load_model(source, packed_cache=True, quantize=name)) for _ in range(2))
    assert torch.equal(first, logits(load_model(out)))
    assert torch.equal(first, second)
    assert not torch.equal(first, plain)
    assert len(files(source)) == 2  # rounded and not


def test_experts_are_rounded_and_their_router_is_not(tmp_path: Path) -> None:
    tiny.make(tmp_path, "mixtral", **SHAPE)
    source = ModelSource(tmp_path, rounding="int4")
    layer = source.spec.layers[0]
    weights = source.layer_weights(0)
    assert all(isinstance(weights[role], QTensor) for role in layer.linears)
    assert not any(isinstance(weights[role], QTensor) for role in layer.routers)


def test_the_plan_counts_rounded_weights(tmp_path: Path) -> None:
    tiny.make(tmp_path, "llama", **SHAPE)
    sizes = {}
    for name in ("none", "int4", "int8"):
        with resolved(tmp_path, dtype="bfloat16", quantize=name) as model:
            sizes[name] = model.weight_bytes()
            weights = sum(layer.num_weights for layer in model.spec.layers)
    assert sizes["none"] - sizes["int8"] == weights - 3 * weights // 128
    assert sizes["none"] - sizes["int4"] == weights * 3 // 2 - 3 * weights // 128


def test_groups_are_whole() -> None:
    sizes = {width: scheme_for("int4", width) for width in (256, 192, 96, 40)}
    assert {width: scheme and scheme.group_size for width, scheme in sizes.items()} == {
        256: 128, 192: 64, 96: 32, 40: None,
    }  # fmt: skip


def test_a_quantized_checkpoint_is_refused(tmp_path: Path) -> None:
    tiny_checkpoint(tmp_path / "source", **SHAPE)
    prepare(tmp_path / "source", load_recipe(RECIPES["int8"])).run(tmp_path / "out")
    with pytest.raises(ConfigError, match=r"quantize=int4: .*out is quantized already \(compressed-tensors\); leave"):
        load_model(tmp_path / "out", quantize="int4")
