"""Recipes are read strictly: what they do not know, they refuse, and say what may stand there."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch

import lmkit
from lmkit.errors import ConfigError
from lmkit.formats.hub import DEMO_FOLDER
from lmkit.formats.mxfp4 import MXFP4
from lmkit.formats.nvfp4 import NVFP4
from lmkit.models.source import ModelSource
from lmkit.other_names import names
from lmkit.qtensor import QuantScheme, float8_scheme, int_scheme
from lmkit.quant.recipe import DEFAULT_RECIPE, RECIPES, load_recipe
from lmkit.quant.steps.base import Stage
from lmkit.quant.steps.registry import STEPS

MINIMAL = "steps: [{step: rtn}]\n"
SMOOTH = "steps: [{step: smooth_quant}, {step: rtn}]\n"
FLOAT8 = "scheme: {bits: 8, type: float, group_size: block}"


def write(folder: Path, text: str) -> str:
    path = folder / "recipe.yaml"
    path.write_text(text)
    return str(path)


@pytest.mark.parametrize("name", sorted(path.stem for path in RECIPES.glob("*.yaml")))
def test_every_shipped_recipe_loads(name: str) -> None:
    recipe = load_recipe(name)
    assert any(step.stage is Stage.ROUNDER for step in recipe.steps)


def test_names_of_methods_lead_to_recipes_that_are_shipped() -> None:
    shipped = {path.stem for path in RECIPES.glob("*.yaml")}
    for name, advice in names("recipe").items():
        assert name not in shipped
        assert shipped & set(advice.replace(",", "").split()), advice
        with pytest.raises(ConfigError, match=f"^no recipe {name}: use "):
            load_recipe(name)


@pytest.mark.parametrize(
    ("name", "scheme"),
    [
        ("awq_w4a16_g128", int_scheme(4, 128)),
        ("w4a16_g128_sym_ct", int_scheme(4, 128, symmetric=True)),
        ("rtn_w8a16", int_scheme(8, 128, symmetric=True)),
        ("smoothquant_w8a8", int_scheme(8, -1, symmetric=True)),
        ("fp8_channel", float8_scheme()),
        ("fp8_tensor", float8_scheme(-1, -1)),
        ("fp8_block", float8_scheme(128, 128)),
        ("nvfp4_w4a16", NVFP4),
        ("nvfp4_w4a4", NVFP4),
        ("mxfp4_w4a16", MXFP4),
    ],
)
def test_schemes_of_shipped_recipes(name: str, scheme: QuantScheme) -> None:
    assert load_recipe(name).grid == scheme


def test_the_default_recipe_is_shipped_and_is_awq() -> None:
    recipe = load_recipe(DEFAULT_RECIPE)
    assert [step.name() for step in recipe.steps] == ["awq_scale", "awq_clip", "gptq"]
    assert recipe.scheme.group_size == 128
    assert recipe.kv.bits == 16


@pytest.mark.parametrize(
    ("text", "place", "allowed"),
    [
        (MINIMAL + "group_size: 64", "group_size", "format, activations, lm_head, average_bits, scheme, steps, kv"),
        (MINIMAL + "scheme: {bit: 4}", "$.scheme", "bits, type, group_size, symmetric"),
        (MINIMAL + "kv: {bit: 4}", "$.kv", "bits, average_bits"),
        (MINIMAL + "kv: {layers: {0: {bits: 4}}}", "$.kv.layers", "k_bits, v_bits"),
        (MINIMAL + "calibration: {samples: 4}", "$.calibration", "dataset, num_samples, seq_len, seed"),
        ("steps: [{step: awq_scale, gird: 20}, {step: rtn}]", "$.steps[0]", "step, duo, grid, tokens, min_gain"),
        ("steps: [{step: awq_clip}, {step: rtn, grid: 3}]", "$.steps[1]", "allowed keys: step"),
    ],
)
def test_an_unknown_key_names_file_place_and_allowed_keys(tmp_path: Path, text: str, place: str, allowed: str) -> None:
    path = write(tmp_path, text)
    with pytest.raises(ConfigError) as caught:
        load_recipe(path)
    message = str(caught.value)
    assert path in message
    assert place in message
    assert allowed in message
    assert "\n" not in message


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("steps: []", "one of them rounds"),
        ("steps: [{step: awq_scale}]", "one of them rounds"),
        ("steps: [{step: rtn}, {step: awq_scale}]", "at most one of each"),
        ("steps: [{step: awq_clip}, {step: awq_scale}, {step: rtn}]", "at most one of each"),
        ("steps: [{step: gptw}]", "gptw"),
        ("steps: [{step: rtn}, {step: gptq}]", "at most one of each"),
        ("steps: [{step: signround}]", "one of them rounds"),
        ("steps: [{step: gptq, damping: 0}]", "damping"),
        ("scheme: {bits: 4}", "steps"),
        (MINIMAL + "scheme: {bits: 5}", "$.scheme.bits"),
        (MINIMAL + "scheme: {group_size: 48}", "$.scheme.group_size"),
        (MINIMAL + "scheme: {group_size: tensor}", "int has 32, 64, 128 or channel"),
        (MINIMAL + "scheme: {type: float, bits: 8}", "float has channel, tensor or block"),
        (MINIMAL + "scheme: {type: float, group_size: channel}", "type float has `bits: 8`"),
        (MINIMAL + "scheme: {type: float, bits: 8, group_size: channel, symmetric: false}", "float is symmetric"),
        (MINIMAL + "scheme: {bits: 8}", "format awq cannot store the scheme: 8 bits"),
        (MINIMAL + "format: gptq", "format gptq cannot store the scheme"),
        (MINIMAL + "format: gguf", "$.format"),
        (MINIMAL + "activations: int8", "activations int8 need scheme {bits: 8"),
        (MINIMAL + "activations: float8", "activations float8 need scheme"),
        (MINIMAL + "activations: int4", "$.activations"),
        (MINIMAL + "format: compressed-tensors\nactivations: int8\nscheme: {bits: 8, symmetric: true}", "channel"),
        (MINIMAL + f"format: fp8\n{FLOAT8}", "format fp8 has activations float8, not none"),
        (MINIMAL + f"format: gptq\n{FLOAT8}\nactivations: float8", "format gptq has activations none, not float8"),
        (SMOOTH, "smooth_quant is for rounded activations"),
        (f"steps: [{{step: awq_clip}}, {{step: rtn}}]\nformat: compressed-tensors\n{FLOAT8}", "awq_clip needs"),
        ("steps: [{step: awq_scale}, {step: rtn}]\nscheme: {group_size: -1}", "awq_scale needs"),
        ("steps: [{step: smooth_quant}, {step: awq_scale}, {step: rtn}]", "then rtn"),
        ("steps: [{step: smooth_quant, alpha: 1.5}, {step: rtn}]", "alpha"),
        ("steps: [{step: smooth_quant, alpha: best}, {step: rtn}]", "alpha"),
        (MINIMAL + "average_bits: 0", "$.average_bits"),
        (MINIMAL + "bits: 4.5", "the average is called average_bits"),
        (MINIMAL + "format: gptq\nscheme: {symmetric: true}\naverage_bits: 4.5", "compressed-tensors can mix them"),
        (MINIMAL + f"format: compressed-tensors\n{FLOAT8}\naverage_bits: 4.5", "average_bits: is for type int"),
        (MINIMAL + "kv: {bits: 5}", "$.kv.bits"),
        (MINIMAL + "kv: {layers: {-1: {k_bits: 4}}}", "$.kv.layers"),
        (MINIMAL + "calibration: {num_samples: 0}", "num_samples"),
        (MINIMAL + "calibration: {num_samples: '8'}", "num_samples"),
        (MINIMAL + "calibration: {dataset: []}", "dataset"),
        ("steps: [{step: awq_clip, max_shrink: 1.0}, {step: rtn}]", "max_shrink"),
        (MINIMAL + "kv: {bits: 4, bits: 8}", "'bits' is given twice"),
        (MINIMAL + "scheme: [", "not valid YAML"),
        ("- just\n- a list", "expected keys"),
        ("", "expected keys"),
        ("steps: !!python/object/apply:os.getcwd []", "not valid YAML"),
    ],
)
def test_wrong_content_is_refused(tmp_path: Path, text: str, reason: str) -> None:
    with pytest.raises(ConfigError, match="recipe") as caught:
        load_recipe(write(tmp_path, text))
    assert reason in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(("word", "value"), [("on", True), ("off", False), ("both", "both")])
def test_duo_takes_yaml_switches(tmp_path: Path, word: str, value: object) -> None:
    recipe = load_recipe(write(tmp_path, f"steps: [{{step: awq_scale, duo: {word}}}, {{step: rtn}}]"))
    assert recipe.steps[0].duo == value


def test_overrides_replace_values_and_pass_the_same_checks(tmp_path: Path) -> None:
    path = write(tmp_path, MINIMAL + "calibration: {num_samples: 8, seq_len: 64}")
    overrides = {"scheme": {"group_size": 64}, "calibration": {"seq_len": 32, "seed": None}, "kv": {"bits": None}}
    recipe = load_recipe(path, overrides)
    assert (recipe.scheme.group_size, recipe.calibration.num_samples, recipe.calibration.seq_len) == (64, 8, 32)
    with pytest.raises(ConfigError, match=r"scheme\.group_size"):
        load_recipe(path, {"scheme": {"group_size": 65}})
    recipe = load_recipe(path, {"format": "compressed-tensors", "average_bits": 5.0})
    assert (recipe.format, recipe.average_bits) == ("compressed-tensors", 5.0)
    assert load_recipe(path, {"format": None, "bits": None}) == load_recipe(path)
    with pytest.raises(ConfigError, match="one scheme; compressed"):
        load_recipe(path, {"format": "gptq_v2", "average_bits": 5.0})


def test_unknown_names_list_what_there_is() -> None:
    with pytest.raises(ConfigError, match=DEFAULT_RECIPE):
        load_recipe("awq_w2")
    with pytest.raises(ConfigError, match="no such file"):
        load_recipe("nowhere/recipe.yaml")


def test_only_its_own_module_knows_a_step() -> None:
    """The pipeline asks the steps of a recipe; a new one is found by its module."""
    package = Path(lmkit.__file__).parent
    named = re.compile(r"quant\.steps(\.| import )(?!base|registry)\w")
    others = [path for path in package.rglob("*.py") if path.parent != package / "quant" / "steps"]
    assert not [path for path in others if named.search(path.read_text())]
    modules = {path.stem for path in (package / "quant" / "steps").glob("*.py")}
    assert set(STEPS) == modules - {"__init__", "base", "registry"}


def test_statistics_take_a_part_of_the_rows_unless_every_token_counts() -> None:
    layer = ModelSource(DEMO_FOLDER).spec.layers[0]
    large = {"calibration": {"num_samples": 128, "seq_len": 2048}}
    assert load_recipe(DEFAULT_RECIPE, large).observed_share(layer) == 64
    assert load_recipe(DEFAULT_RECIPE, {"calibration": {"num_samples": 4}}).observed_share(layer) == 1
    for name in ("awq_w4a16_g128_kv8", "smoothquant_w8a8"):
        assert load_recipe(name, large).observed_share(layer) == 1


def test_products_are_short_for_4_bit_integers_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("lmkit.quant.recipe.multiplies_bfloat16", lambda device: True)
    assert load_recipe(DEFAULT_RECIPE).product_dtype() is torch.bfloat16
    assert load_recipe("smoothquant_w8a8").product_dtype() is torch.float32
    monkeypatch.setattr("lmkit.quant.recipe.multiplies_bfloat16", lambda device: False)
    assert load_recipe(DEFAULT_RECIPE).product_dtype() is torch.float32


@pytest.mark.parametrize(
    "name", ["rtn_w4a16_g128", "rtn_w8a16", "fp8_block", "fp8_channel", "fp8_tensor", "rtn_nvfp4_w4a16"]
)
def test_recipes_that_round_to_nearest_read_no_text_unless_they_are_asked_for_something_that_needs_it(
    name: str,
) -> None:
    assert not load_recipe(name).calibration.has_text
    assert load_recipe(name, {"calibration": {"num_samples": 3}}).calibration.has_text
    assert load_recipe(name, {"calibration": {"dataset": ["demo"]}}).calibration.has_text
    assert load_recipe(name, {"kv": {"bits": 8}}).calibration.has_text
    assert not load_recipe(name, {"kv": {"bits": 16}}).calibration.has_text


NVFP4_INPUTS = "format: compressed-tensors\nactivations: float4\nscheme: {bits: 4, type: float, group_size: 16}\n"


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("steps: [{step: awq_scale}, {step: rtn}]", "dataset none: awq_scale needs text"),
        ("steps: [{step: rtn}]\nkv: {bits: 8}", "dataset none: a KV cache of less than 16 bits needs text"),
        (f"{NVFP4_INPUTS}steps: [{{step: rtn}}]", "the factor of NVFP4 inputs .* needs text"),
        ("steps: [{step: rtn}]\nkv: {layers: {0: {k_bits: 4}}}", "a KV cache of less than 16 bits needs text"),
    ],
)
def test_what_needs_text_is_refused_without(tmp_path: Path, text: str, problem: str) -> None:
    with pytest.raises(ConfigError, match=problem):
        load_recipe(write(tmp_path, f"{text}\ncalibration: {{dataset: none}}\n"))
