"""Groups are whole: what the asked size does not divide falls back, and what stays dense is said before the run."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from lmkit.errors import ConfigError
from lmkit.models.loader import load_model
from lmkit.models.source import ModelSource
from lmkit.qtensor import QTensor, quantize
from lmkit.quant.groups import check_dense, computed_together, fit_groups
from lmkit.quant.mixed_precision import make_bit_budget, name_of
from lmkit.quant.recipe import load_recipe
from lmkit.quant.run import prepare
from tests.cli.commands import mistake
from tests.quant.helpers import CLIP, RTN, SCALE, recipe, tiny_checkpoint

CT = {"format": "compressed-tensors"}
G128 = {"group_size": 128}
EXACTLY = G128 | {"smaller_groups": False}
ODD = {"hidden_size": 192, "intermediate_size": 256, "num_hidden_layers": 1}  # 192 = 3 * 64
# 4 outputs of k and v: AWQ packs 8 in a word.
FEW_OUTPUTS = {"intermediate_size": 64, "num_attention_heads": 8, "num_key_value_heads": 1, "head_dim": 4}
# By hidden size and intermediate size: what all linears of an AWQ file have, and those of compressed-tensors.
WIDTHS = {
    (128, 256): ("groups of 128", "groups of 128"),
    (192, 256): ("groups of 64 (128 does not divide 192)", "groups of 128 and 64 (128 does not divide 192)"),
    (192, 96): (
        "groups of 32 (128 does not divide 96 and 192)",
        "groups of 64 and 32 (128 does not divide 96 and 192)",
    ),
}


@pytest.fixture(scope="module")
def odd(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_checkpoint(tmp_path_factory.mktemp("odd"), **ODD)


def sizes_of(path: Path) -> dict[str, int]:
    """The group sizes of a written layer, by role."""
    weights = ModelSource(path).layer_weights(0)
    return {role: weight.scheme.group_size for role, weight in weights.items() if isinstance(weight, QTensor)}


@pytest.mark.parametrize("widths", WIDTHS)
def test_the_size_and_the_reason(tmp_path: Path, widths: tuple[int, int]) -> None:
    path = tiny_checkpoint(tmp_path, hidden_size=widths[0], intermediate_size=widths[1], num_hidden_layers=1)
    spec = ModelSource(path).spec
    asked = recipe(scheme=G128), recipe(scheme=G128, **CT)
    assert tuple(fit_groups(spec, each).groups for each in asked) == WIDTHS[widths]


@pytest.mark.parametrize(
    ("sections", "size"),
    [
        ({"format": "awq"}, 64),
        ({"format": "gptq", "scheme": G128 | {"symmetric": True}}, 64),
        ({"format": "gptq_v2"}, 64),
        (CT, 128),
        (CT | {"scheme": G128 | {"bits": 8, "symmetric": True}}, 128),
    ],
)
def test_a_file_has_the_groups_of_the_plan(odd: Path, tmp_path: Path, sections: dict[str, Any], size: int) -> None:
    """`size` is that of `down`, the one linear whose inputs 128 divides."""
    asked = recipe(**({"scheme": G128, "calibration": {"dataset": "none"}} | sections))
    report = prepare(odd, asked).run(tmp_path / "out")
    sizes = sizes_of(tmp_path / "out")
    assert sizes.pop("mlp.down") == size
    assert set(sizes.values()) == {64}
    assert len(sizes) == 6
    dense, stored = (ModelSource(path).layer_weights(0)["mlp.down"] for path in (odd, tmp_path / "out"))
    assert isinstance(dense, torch.Tensor)
    assert isinstance(stored, QTensor)
    assert torch.equal(stored.codes, quantize(dense, stored.scheme).codes)
    assert {linear.format for layer in report.layers for linear in layer.linears} == {asked.format}


def test_calibrated_steps_take_linears_of_several_sizes(odd: Path, tmp_path: Path) -> None:
    """And the steps keep to them: the error of the layer is lower than that of plain rounding."""
    steps = SCALE, CLIP, {"step": "gptq", "refine": 1}
    report = prepare(odd, recipe(*steps, rounder=None, scheme=G128, **CT)).run(tmp_path / "out")
    assert sizes_of(tmp_path / "out") | {"mlp.down": 128, "attn.q": 64} == sizes_of(tmp_path / "out")
    assert {linear.method for linear in report.layers[0].linears} <= {"gptq", "rtn"}
    for linear in report.layers[0].linears:
        assert linear.error is not None
        assert linear.rtn_error is not None
        assert linear.error < 1.2 * linear.rtn_error
    load_model(tmp_path / "out")


def test_all_experts_of_a_layer_have_one_size(tmp_path: Path) -> None:
    path = tiny_checkpoint(tmp_path, "qwen3-moe", hidden_size=128, moe_intermediate_size=96)
    spec = ModelSource(path).spec
    grids = fit_groups(spec, recipe(scheme=G128, **CT))
    experts = {scheme and scheme.group_size for module, scheme in grids.linears.items() if ".experts." in module}
    query = grids.linears["model.layers.0.self_attn.q_proj"]
    assert (experts, query and query.group_size) == ({32}, 128)  # `down` has 96 inputs, and the others 128
    assert grids.dense == {}
    assert any(len(roles) > 3 for layer in spec.layers for roles in computed_together(layer))


def test_a_size_that_was_asked_for_is_not_changed(odd: Path, tmp_path: Path) -> None:
    options = "-o", tmp_path / "out", "--calibration", "demo", "--seq-len", "32", "--group-size", "128"
    line = mistake("quantize", odd, *options)
    assert "6 of 7 linears, 81% of the weights, would stay dense (model.layers.0.mlp.gate_proj: 192 inputs" in line
    assert "are not a multiple of the group size 128); leave out --group-size, or name them under `ignore`" in line
    assert not (tmp_path / "out").exists()
    assert not (tmp_path / ".out.partial").exists()
    asked = load_recipe(
        "rtn_w4a16_g128", {"scheme": G128 | {"smaller_groups": False}, "ignore": ["attn.*", "mlp.[gu]*"]}
    )
    assert prepare(odd, asked).plan.groups == "groups of 128"  # what is ignored is left dense on purpose


@pytest.mark.parametrize(
    ("sections", "sizes", "mend", "overrides"),
    [
        ({"scheme": EXACTLY}, ODD, "leave out --group-size", {"scheme": {"smaller_groups": True}}),
        ({}, FEW_OUTPUTS, "take --format compressed-tensors", CT),
        (
            {"scheme": EXACTLY}, FEW_OUTPUTS | {"hidden_size": 192},
            "leave out --group-size and take --format compressed-tensors", CT | {"scheme": {"smaller_groups": True}},
        ),
        ({}, {"intermediate_size": 88}, "take --group-size channel", {"scheme": {"group_size": "channel"}}),
        ({"steps": [SCALE, RTN]}, {"intermediate_size": 88}, "take --recipe rtn_w8a16 --group-size channel", None),
    ],
)  # fmt: skip
def test_the_error_names_a_change_that_mends(
    tmp_path: Path, sections: dict[str, Any], sizes: dict[str, int], mend: str, overrides: dict[str, Any] | None
) -> None:
    """A model with a linear that cannot be stored, and the recipe with the change that the error names."""
    path = tiny_checkpoint(tmp_path, **({"num_hidden_layers": 1} | sizes))
    spec = ModelSource(path).spec
    data = {"scheme": G128} | sections
    asked = recipe(**data)
    with pytest.raises(ConfigError) as caught:
        check_dense(path, spec, asked, fit_groups(spec, asked))
    assert f"); {mend}, or name them" in str(caught.value)
    if overrides is None:
        changed = load_recipe("rtn_w8a16", {"scheme": {"group_size": "channel"}})
    else:
        changed = recipe(**(data | overrides | {"scheme": data["scheme"] | overrides.get("scheme", {})}))
    check_dense(path, spec, changed, fit_groups(spec, changed))


def test_a_small_rest_may_stay_dense(tmp_path: Path) -> None:
    path = tiny_checkpoint(tmp_path, hidden_size=256, intermediate_size=8, num_hidden_layers=1)
    grids = fit_groups(ModelSource(path).spec, recipe(scheme=G128))
    assert grids.dense == {"model.layers.0.mlp.down_proj": "8 inputs are not a multiple of the group size 128"}
    check_dense(path, ModelSource(path).spec, recipe(scheme=G128), grids)


def test_a_budget_of_bits_mixes_the_size_that_fits(odd: Path) -> None:
    asked = recipe(scheme=G128, average_bits=6.0, **CT)
    spec = ModelSource(odd).spec
    budget = make_bit_budget(spec, asked, fit_groups(spec, asked).linears)
    names = {next(iter(group.modules)): [name_of(choice) for choice in group.choices] for group in budget.groups}
    assert names["attn.q"] == ["int4 g64", "int4 g32", "int8 g64", "dense"]
    assert names["mlp.down"] == ["int4 g128", "int4 g32", "int8 g128", "dense"]


def test_rounding_while_loading_says_its_groups(odd: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level("INFO", "lmkit"):
        ModelSource(odd, rounding="int4")
    assert "weights are rounded to int4 in groups of 128 and 64 (128 does not divide 192)" in caplog.text
    path = tiny_checkpoint(tmp_path, intermediate_size=88)
    with pytest.raises(ConfigError, match=r"quantize=int8: .* 2 of 14 linears, 19% .* would stay dense .88"):
        ModelSource(path, rounding="int8")
    ModelSource(path, rounding="fp8")
