"""Recipes: a YAML file says what to quantize and how. The file is read strictly.

    format: compressed-tensors
    scheme: {bits: 4, group_size: 128, symmetric: false}
    average_bits: 4.5
    steps: [{step: awq_scale}, {step: awq_clip}, {step: rtn}]
    kv: {bits: 8}
    calibration: {dataset: demo, num_samples: 64, seq_len: 512, seed: 0}
    ignore: [attn.o, "model.layers.0.*"]

An unknown key, a repeated key, a value out of range and values that do not go together raise ConfigError. The error
names the file, the place and what is allowed there. docs/quantization.md describes every key.
"""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any

import msgspec
import torch

from lmkit import yaml_file
from lmkit.codes import FLOAT8
from lmkit.config import StrictStruct, parse
from lmkit.errors import ConfigError
from lmkit.formats.base import get_format
from lmkit.formats.mxfp4 import MXFP4
from lmkit.formats.names import Activations
from lmkit.formats.nvfp4 import NVFP4
from lmkit.models.layer_spec import LayerSpec
from lmkit.models.rounding import GROUPS
from lmkit.models.source import ModelSource
from lmkit.models.spec import ModelSpec
from lmkit.option import Note
from lmkit.other_names import hint
from lmkit.qtensor import QuantScheme, float8_scheme, int_scheme
from lmkit.quant.device import multiplies_bfloat16
from lmkit.quant.sections import (
    NO_TEXT,
    WIDE_GROUPS,
    CalibrationRecipe,
    DatasetRecipe,
    KVLayerRecipe,
    KVRecipe,
    SchemeRecipe,
    WeightsRecipe,
)
from lmkit.quant.steps.base import SAMPLE_TOKENS, LayerCost, Stage
from lmkit.quant.steps.registry import STEPS, AnyStep, of_stage

RECIPES = Path(__file__).parents[1] / "data" / "recipes"
DEFAULT_RECIPE = "loss_w4a16_g128"
FORMAT_RECIPES = {
    "gptq": "w4a16_g128_sym_gptq",
    "fp8": "fp8_block",
}  # for a format that the default cannot be written in
KV_RECIPE = "kv4"  # for weights that stay as they are
EVERYTHING = "*"  # a pattern of `ignore`
MOVED = {"bits": "the average is called average_bits, the width of one scheme stands in scheme: {bits: 4}"}

# The kinds of activations that the files of a format can declare.
DECLARES: dict[str, tuple[Activations, ...]] = {
    "awq": ("none",), "gptq": ("none",), "gptq_v2": ("none",), "fp8": ("float8",),
    "compressed-tensors": ("none", "int8", "float8", "float4"),
}  # fmt: skip
MIXED_FORMAT = "compressed-tensors"  # each linear has a scheme of its own; the others have one for all
AWQ_BITS = 4  # the only ones that AWQ holds
OBSERVED_TOKENS = 4096  # enough for means and for the moments of a few inputs
FLOAT8_GROUPS = {-1: (-1, 1), "channel": (-1, 1), "tensor": (-1, -1), "block": (128, 128)}  # (group_size, rows)
FLOAT4_GROUPS: dict[int | str, QuantScheme] = {scheme.group_size: scheme for scheme in (NVFP4, MXFP4)}
ANY_SHAPE = (1024, 1024)  # a weight that every group size divides


class Recipe(WeightsRecipe, frozen=True, kw_only=True):
    """One quantization from end to end."""

    scheme: Annotated[SchemeRecipe, Note("The grid of the weights.")] = SchemeRecipe()
    steps: Annotated[tuple[AnyStep, ...], Note("What is done to each layer, in order; one of them rounds.")]
    kv: Annotated[KVRecipe, Note("Storage of the KV cache.")] = KVRecipe()
    calibration: Annotated[CalibrationRecipe, Note("The calibration text and its size.")] = CalibrationRecipe()
    ignore: Annotated[
        tuple[str, ...], Note("Linears that stay dense: roles (attn.o), or patterns of modules (*.down_proj).")
    ] = ()

    def __post_init__(self) -> None:
        stages = [step.stage for step in self.steps]
        if stages != sorted(set(stages)) or Stage.ROUNDER not in stages:
            order = ", then ".join(" or ".join(of_stage(stage)) for stage in Stage)
            rounders = " or ".join(of_stage(Stage.ROUNDER))
            raise ValueError(
                f"`steps` are {order}: at most one of each, in this order, and one of them rounds ({rounders})"
            )
        if problem := _budget_problem(self) or _scheme_problem(self) or _text_problem(self):
            raise ValueError(problem)

    @property
    def layer_steps(self) -> tuple[AnyStep, ...]:
        """The steps that each layer takes."""
        return tuple(step for step in self.steps if step.stage is not Stage.MODEL)

    @property
    def model_step(self) -> AnyStep | None:
        """The step that is done once, after the last layer."""
        return next((step for step in self.steps if step.stage is Stage.MODEL), None)

    @property
    def keeps_weights(self) -> bool:
        """Whether every linear stays dense on purpose."""
        return EVERYTHING in self.ignore

    @property
    def asked_head(self) -> str:
        """`lm_head`, of a model whose weights are quantized."""
        return "stored" if self.keeps_weights and self.lm_head == "auto" else self.lm_head

    @property
    def is_plain(self) -> bool:
        """Whether every step only rounds to nearest."""
        return all(step.is_plain for step in self.steps)

    @property
    def grid(self) -> QuantScheme:
        """The grid of the weights."""
        asked = self.scheme
        if asked.type == "int":
            size = asked.group_size if isinstance(asked.group_size, int) else -1
            return int_scheme(asked.bits, size, bool(asked.symmetric))
        return FLOAT4_GROUPS[asked.group_size] if asked.bits == 4 else float8_scheme(*FLOAT8_GROUPS[asked.group_size])

    @property
    def grids(self) -> tuple[QuantScheme, ...]:
        """`grid`, and the same in the smaller groups that a linear may get."""
        is_wide = self.scheme.group_size in WIDE_GROUPS
        sizes = GROUPS if self.scheme.smaller_groups and self.grid.codes.uniform and not is_wide else ()
        return self.grid, *(replace(self.grid, group_size=size) for size in sizes if size < self.grid.group_size)

    def product_dtype(self, device: str = "cpu") -> torch.dtype:
        """The numbers that a calibration multiplies: bfloat16 where that is faster, and the error of 4-bit weights is
        so much larger that it does not show."""
        short = self.grid.bits <= 4 and multiplies_bfloat16(device)
        return torch.bfloat16 if short else torch.float32

    @property
    def needs_exact(self) -> bool:
        """Whether a step wants the hidden states of the original model."""
        return any(step.needs_exact for step in self.steps)

    @property
    def needs_curvature(self) -> bool:
        """Whether a step wants the curvature of the loss."""
        return any(step.needs_curvature for step in self.steps)

    def observed_share(self, layer: LayerSpec) -> int:
        """Statistics of a layer's inputs are taken from the first of each so many batches. Moments take all."""
        maxima = self.activations == "float4" or any(step.sees_all for step in self.steps)
        everything = layer.is_sparse or self.kv.is_fitted or maxima
        num_tokens = self.calibration.num_samples * self.calibration.seq_len
        return 1 if everything else max(1, num_tokens // OBSERVED_TOKENS)

    def cost(self, layer: LayerSpec, batch_tokens: int = 0, share: float = 1.0) -> LayerCost:
        """The sizes from which the steps estimate their cost for a layer that a `share` of the tokens comes to, in
        passes of `batch_tokens` at a time."""
        num_tokens = int(share * self.calibration.num_samples * self.calibration.seq_len)
        return LayerCost(
            layer=layer,
            num_tokens=num_tokens,
            seq_len=self.calibration.seq_len,
            batch_tokens=batch_tokens,
            sample_tokens=min(self.sample_tokens, num_tokens),
            group_size=self.grid.group_size,
            num_streams=2 if self.needs_exact else 1,
        )

    @property
    def sample_tokens(self) -> int:
        """How many tokens of a linear's input are kept, if there are that many."""
        return next((step.sample_tokens for step in self.steps if step.sample_tokens is not None), SAMPLE_TOKENS)

    def for_model(self, spec: ModelSpec) -> Recipe:
        """The recipe without what its steps leave out for this model."""
        return msgspec.structs.replace(self, steps=tuple(step.for_model(spec) for step in self.steps))

    def opened(self, source: ModelSource) -> ModelSource:
        """The model as its steps read it. Raises UnsupportedError for one that cannot be read so."""
        for step in self.steps:
            source = step.opened(source)
        return source

    def with_rows(self, count: int) -> Recipe:
        """The recipe with `count` rows of text."""
        calibration = msgspec.structs.replace(self.calibration, num_samples=count)
        return msgspec.structs.replace(self, calibration=calibration)

    def for_tokens(self, count: int) -> Recipe:
        """The recipe with `count` rows of one token: those that come to an expert."""
        calibration = msgspec.structs.replace(self.calibration, num_samples=count, seq_len=1)
        return msgspec.structs.replace(self, calibration=calibration)

    def with_sample(self, tokens: int) -> Recipe:
        """The recipe with `tokens` tokens in the sample."""
        return msgspec.structs.replace(self, steps=tuple(step.with_sample(tokens) for step in self.steps))


def _scheme_problem(recipe: Recipe) -> str | None:
    """Why format, scheme, activations and steps do not go together, or None."""
    weights, activations = recipe.grid, recipe.activations
    if activations == "int8" and weights != int_scheme(8, -1, symmetric=True):
        return "activations int8 need scheme {bits: 8, group_size: channel, symmetric: true}"
    if activations == "float8" and weights.codes != FLOAT8:
        return "activations float8 need scheme {bits: 8, type: float}"
    if activations == "float4" and weights not in FLOAT4_GROUPS.values():
        return "activations float4 need scheme {bits: 4, type: float} in groups of 16 or 32"
    if activations not in DECLARES[recipe.format]:
        return f"format {recipe.format} has activations {' or '.join(DECLARES[recipe.format])}, not {activations}"
    reason = get_format(recipe.format).can_write(ANY_SHAPE, weights)
    if reason is not None:
        other = "" if get_format(MIXED_FORMAT).can_write(ANY_SHAPE, weights) else f"; --format {MIXED_FORMAT} can"
        return f"format {recipe.format} cannot store the scheme: {reason}{other}"
    return next(filter(None, (step.refuses(weights, activations) for step in recipe.steps)), None)


def _budget_problem(recipe: Recipe) -> str | None:
    if recipe.average_bits is None:
        return None
    if recipe.format not in ("compressed-tensors", "awq"):
        return f"average_bits: linears of format {recipe.format} all have one scheme; compressed-tensors can mix them"
    if recipe.scheme.type != "int" or recipe.activations != "none":
        return "average_bits: is for type int and activations none"
    return None


def _text_problem(recipe: Recipe) -> str | None:
    if recipe.calibration.has_text:
        return None
    needs = [step.name() for step in recipe.steps if not step.is_plain]
    needs += ["average_bits"] if recipe.average_bits is not None else []
    told = recipe.activations == "float4" and recipe.grid.scales.shared
    needs += ["the factor of NVFP4 inputs (activations float4)"] if told else []
    needs += ["a KV cache of less than 16 bits"] if recipe.kv.is_fitted else []
    return f"calibration: dataset {NO_TEXT}: {needs[0]} needs text" if needs else None


def recipe_for(weight_format: str | None = None, bits: float | None = None, average_bits: float | None = None) -> str:
    """The recipe for what a user asks who names none."""
    if average_bits is not None:
        return "mixed_4.5"
    return FORMAT_RECIPES.get(weight_format or "") or ("rtn_w8a16" if bits == 8 else DEFAULT_RECIPE)


def load_recipe(name: str, overrides: dict[str, Any] | None = None) -> Recipe:
    """Read a recipe by its name in recipes/ or by its path. Raises ConfigError.

    `overrides` ({key: value}, {section: {key: value}}) replace values of the file and pass the same checks. A value
    None overrides nothing. If they need text and the file has none, the text is the default. If they change the bits,
    and no format is named, it is one that holds them.
    """
    path = find_recipe(name)
    where = f"recipe {name}"
    _, data = yaml_file.read(path, where)
    if not data or not isinstance(data, dict):
        raise ConfigError(f"{where}: expected keys {_keys(Recipe)}")
    changed = dict(data)
    for section, values in (overrides or {}).items():
        if not isinstance(values, dict):
            changed |= {} if values is None else {section: values}
        elif given := {key: value for key, value in values.items() if value is not None}:
            stored = changed.get(section) or {}
            changed[section] = (stored if isinstance(stored, dict) else {}) | given
    bits = (overrides or {}).get("scheme", {}).get("bits")
    if bits not in (None, AWQ_BITS):  # of a recipe that names no format, and is therefore AWQ's
        changed.setdefault("format", MIXED_FORMAT)
    calibration = changed.get("calibration")
    if isinstance(calibration, dict) and calibration.get("dataset") == NO_TEXT and _asks_for_text(overrides or {}):
        changed["calibration"] = {key: value for key, value in calibration.items() if key != "dataset"}
    try:
        return parse_recipe(changed, where)
    except ConfigError as error:
        raise ConfigError(f"{error}{_other_recipes(data, changed.get('format'))}") from None


def _asks_for_text(overrides: dict[str, Any]) -> bool:
    """Whether one of the values says how much text there is, or needs some."""
    size = {key: value for key, value in (overrides.get("calibration") or {}).items() if key != "dataset"}
    kv_bits = (overrides.get("kv") or {}).get("bits")
    return any(value is not None for value in (*size.values(), overrides.get("average_bits"))) or kv_bits not in (
        None,
        16,
    )


def _other_recipes(data: dict[str, Any], weight_format: Any) -> str:
    """`; --recipe fp8_block writes fp8`, if recipes were made for that format and this one (`data`) was not."""
    if data.get("format", "awq") == weight_format:
        return ""
    names = [name for name in _shipped() if load_recipe(name).format == weight_format][:3]
    return f"; --recipe {' or '.join(names)} writes {weight_format}" if names else ""


def parse_recipe(data: dict[str, Any], where: str) -> Recipe:
    """Plain data -> Recipe. The error for an unknown key lists the keys that are allowed at its place."""
    try:
        return parse(data, Recipe, where)
    except ConfigError as error:
        raise ConfigError(f"{error}{_allowed_keys(str(error), data)}") from None


def find_recipe(name: str) -> Path:
    """The file of a recipe. Raises ConfigError for an unknown name; the error lists the known ones."""
    path = Path(name)
    if path.suffix in (".yaml", ".yml"):
        if path.is_file():
            return path
        raise ConfigError(f"recipe {name}: no such file")
    shipped = _shipped()
    if advice := hint(name, table="recipe"):
        raise ConfigError(f"no recipe {name}{advice}")
    if name not in shipped:
        near = hint(name, shipped)
        raise ConfigError(f"recipe {name!r}: not a .yaml file and not one of {', '.join(shipped)}{near}")
    return shipped[name]


def _shipped() -> dict[str, Path]:
    """The files of recipes/ by name."""
    return {file.stem: file for file in sorted(RECIPES.glob("*.yaml"))}


def _allowed_keys(message: str, data: dict[str, Any]) -> str:
    """`; allowed keys: ...` for a message about an unknown key."""
    if "unknown field" not in message:
        return ""
    found = re.search(r"at `\$\.?(.*?)`", message)
    place = found[1] if found else ""
    moved = [text for key, text in MOVED.items() if not place and f"`{key}`" in message]
    if moved:
        return f"; {moved[0]}"
    if step := re.fullmatch(r"steps\[(\d+)\]", place):
        kind = STEPS[data["steps"][int(step[1])]["step"]]
        return f"; allowed keys: {', '.join(('step', *kind.__struct_fields__))}"
    sections: dict[str, type[StrictStruct]] = {
        "": Recipe, "scheme": SchemeRecipe, "kv": KVRecipe, "kv.layers[...]": KVLayerRecipe,
        "calibration": CalibrationRecipe, "calibration.dataset[]": DatasetRecipe,
    }  # fmt: skip
    return f"; allowed keys: {_keys(sections[re.sub(r'[0-9]+(?=])', '', place)])}"


def _keys(kind: type[StrictStruct]) -> str:
    return ", ".join(kind.__struct_fields__)
