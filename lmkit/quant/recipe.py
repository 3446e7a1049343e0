"""Recipes: what to quantize and how, as a YAML file that is read strictly.

    format: compressed-tensors
    scheme: {bits: 4, group_size: 128, symmetric: false}
    bits: 4.5
    steps: [{step: awq_scale}, {step: awq_clip}, {step: rtn}]
    kv: {bits: 8}
    calibration: {dataset: demo, num_samples: 64, seq_len: 512, seed: 0}
    ignore: [attn.o, "model.layers.0.*"]

An unknown key, a repeated key, a value out of range or values that do not go together are a ConfigError that names the
file, the place and what may stand there. docs/quantization.md describes every key.
"""

from __future__ import annotations

import re
from collections.abc import Hashable
from pathlib import Path
from typing import Annotated, Any, Literal

import yaml
from msgspec import Meta

from lmkit.config import PositiveInt, StrictStruct, parse
from lmkit.errors import ConfigError, UnsupportedError
from lmkit.formats.base import get_format
from lmkit.formats.parts import Activations
from lmkit.qtensor import QuantScheme

RECIPES = Path(__file__).parents[1] / "data" / "recipes"
DEFAULT_RECIPE = "awq_w4a16_g128"

KVBits = Literal[16, 8, 4]


FormatName = Literal["awq", "gptq", "gptq_v2", "compressed-tensors", "fp8"]
# What a format's files can say about the activations.
DECLARES: dict[str, tuple[Activations, ...]] = {
    "awq": ("none",), "gptq": ("none",), "gptq_v2": ("none",), "fp8": ("float8",),
    "compressed-tensors": ("none", "int8", "float8"),
}  # fmt: skip
# group_size by name -> (rows, group_size) of a QuantScheme; an integer is of one row.
WIDE_GROUPS = {"channel": (1, -1), -1: (1, -1), "tensor": (-1, -1), "block": (128, 128)}
ANY_SHAPE = (1024, 1024)  # a weight that every group size divides


class SchemeRecipe(StrictStruct, frozen=True):
    """The grid of the weights. Inputs of an output row that share a scale and, unless symmetric, a zero: `group_size`
    of them, or the whole row (channel, also written -1); for type float (float8 e4m3, symmetric) the row, the whole
    tensor, or a block of 128 rows and 128 inputs."""

    bits: Literal[4, 8] = 4
    type: Literal["int", "float"] = "int"
    group_size: Literal[-1, 32, 64, 128, "channel", "tensor", "block"] = 128
    symmetric: bool | None = None  # by default false for int

    def __post_init__(self) -> None:
        if self.type == "int" and self.group_size in ("tensor", "block"):
            raise ValueError(f"group_size {self.group_size} is for type float; int has 32, 64, 128 or channel")
        if self.type == "float" and self.group_size not in WIDE_GROUPS:
            raise ValueError(f"group_size {self.group_size} is for type int; float has channel, tensor or block")
        if self.type == "float" and self.bits != 8:
            raise ValueError("type float has `bits: 8`")
        if self.type == "float" and self.symmetric is False:
            raise ValueError("type float is symmetric")

    def scheme(self) -> QuantScheme:
        rows, size = (1, self.group_size) if isinstance(self.group_size, int) else WIDE_GROUPS[self.group_size]
        symmetric = self.type == "float" or bool(self.symmetric)
        return QuantScheme(self.bits, size, symmetric, self.type, rows)


class AwqScale(StrictStruct, frozen=True, tag_field="step", tag="awq_scale"):
    """Move difficulty from weights to the operation before them (quant.transforms.awq_scale)."""

    duo: Literal["both"] | bool = "both"  # candidates from activations and weights, from activations alone, or both
    grid: Annotated[int, Meta(ge=1, le=1000)] = 20  # candidates of each kind
    tokens: Annotated[int, Meta(ge=16)] = 2048  # of the calibration data, on which candidates are compared


class AwqClip(StrictStruct, frozen=True, tag_field="step", tag="awq_clip"):
    """Narrow the range of each group where that lowers the output error (quant.rounders.awq_clip)."""

    grid: Annotated[int, Meta(ge=1, le=1000)] = 10  # steps from no clipping to `max_shrink`, at each end
    max_shrink: Annotated[float, Meta(gt=0, lt=1)] = 0.5


class SmoothQuant(StrictStruct, frozen=True, tag_field="step", tag="smooth_quant"):
    """Move difficulty from activations that are rounded to the weights behind them (quant.transforms.smooth_quant)."""

    alpha: Annotated[float, Meta(ge=0, le=1)] | Literal["search"] = "search"  # how much of it
    grid: Annotated[int, Meta(ge=1, le=1000)] = 20  # values of alpha from 0 to 1 that a search compares


class Rtn(StrictStruct, frozen=True, tag_field="step", tag="rtn"):
    """Round to the nearest point of the grid."""


Step = AwqScale | AwqClip | SmoothQuant | Rtn
STEPS: dict[str, type[StrictStruct]] = {
    "awq_scale": AwqScale, "awq_clip": AwqClip, "smooth_quant": SmoothQuant, "rtn": Rtn,
}  # fmt: skip


class KVLayerRecipe(StrictStruct, frozen=True):
    """Bits of one layer that differ from the rest."""

    k_bits: KVBits | None = None
    v_bits: KVBits | None = None


class KVRecipe(StrictStruct, frozen=True):
    """Bits of the KV cache; 16 = as the model computes."""

    bits: KVBits = 16
    layers: dict[Annotated[int, Meta(ge=0)], KVLayerRecipe] = {}


class CalibrationRecipe(StrictStruct, frozen=True):
    """Which text, how much of it: `num_samples` rows of `seq_len` tokens. `dataset`: a preset's name or paths."""

    dataset: str | tuple[str, ...] = "demo"
    num_samples: PositiveInt = 64
    seq_len: Annotated[int, Meta(ge=8)] = 512
    seed: Annotated[int, Meta(ge=0, lt=1 << 32)] = 0

    def __post_init__(self) -> None:
        if not self.dataset:
            raise ValueError("`dataset` names nothing; write a preset or a path")


class Recipe(StrictStruct, frozen=True, kw_only=True):
    """One quantization from end to end."""

    format: FormatName = "awq"
    scheme: SchemeRecipe = SchemeRecipe()
    activations: Activations = "none"  # how engines are to round the inputs of quantized linears, each token by itself
    bits: Annotated[float, Meta(gt=0, le=32)] | None = None  # average of all linears, chosen by quant.budget
    steps: tuple[Step, ...]
    kv: KVRecipe = KVRecipe()
    calibration: CalibrationRecipe = CalibrationRecipe()
    ignore: tuple[str, ...] = ()  # roles (attn.o) or patterns of module names (*.down_proj) that stay dense

    def __post_init__(self) -> None:
        order = [type(step) for step in self.steps]
        if order not in ([Rtn], [AwqScale, Rtn], [AwqClip, Rtn], [AwqScale, AwqClip, Rtn], [SmoothQuant, Rtn]):
            raise ValueError(
                "`steps` are awq_scale and awq_clip, each at most once and in this order, or smooth_quant, then rtn"
            )
        if problem := _scheme_problem(self) or _budget_problem(self):
            raise ValueError(problem)

    def step(self, kind: type[StrictStruct]) -> Any:
        """The step of this kind, or None."""
        return next((step for step in self.steps if isinstance(step, kind)), None)


def _scheme_problem(recipe: Recipe) -> str | None:
    """Why format, scheme, activations and steps do not go together."""
    weights, activations = recipe.scheme.scheme(), recipe.activations
    per_channel = (weights.kind, weights.bits, weights.group_size, weights.symmetric) == ("int", 8, -1, True)
    if activations == "int8" and not per_channel:
        return "activations int8 need scheme {bits: 8, group_size: channel, symmetric: true}"
    if activations == "float8" and weights.kind != "float":
        return "activations float8 need scheme {bits: 8, type: float}"
    if activations not in DECLARES[recipe.format]:
        return f"format {recipe.format} has activations {' or '.join(DECLARES[recipe.format])}, not {activations}"
    try:
        reason = get_format(recipe.format).can_write(ANY_SHAPE, weights)
    except UnsupportedError as error:
        return str(error)
    if reason is not None:
        return f"format {recipe.format} cannot store the scheme: {reason}"
    if recipe.step(SmoothQuant) is not None and activations == "none":
        return "smooth_quant is for rounded activations: `activations: int8` or float8"
    for kind in (AwqScale, AwqClip):
        if recipe.step(kind) is not None and (weights.kind != "int" or weights.group_size == -1):
            return f"{kind.__struct_config__.tag} needs type int and groups of 32, 64 or 128 inputs"
    return None


def _budget_problem(recipe: Recipe) -> str | None:
    if recipe.bits is None:
        return None
    if recipe.format not in ("compressed-tensors", "awq"):
        return f"bits: linears of format {recipe.format} all have one scheme; compressed-tensors can mix them"
    if recipe.scheme.type != "int" or recipe.activations != "none":
        return "bits: is for type int and activations none"
    return None


def load_recipe(name: str, overrides: dict[str, Any] | None = None) -> Recipe:
    """Read a recipe by its name in recipes/ or by its path. `overrides` ({key: value}, {section: {key: value}}) replace
    values of the file and pass the same checks; a value None overrides nothing. Raises ConfigError."""
    path = find_recipe(name)
    try:
        data = yaml.load(path.read_text("utf-8"), Loader=_UniqueKeyLoader)
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"recipe {path}: {error}") from None
    except yaml.YAMLError as error:
        raise ConfigError(f"recipe {path}: not valid YAML: {' '.join(str(error).split())}") from None
    if not isinstance(data, dict):
        raise ConfigError(f"recipe {path}: expected keys {_keys(Recipe)}")
    for section, values in (overrides or {}).items():
        if not isinstance(values, dict):
            data |= {} if values is None else {section: values}
        elif given := {key: value for key, value in values.items() if value is not None}:
            stored = data.get(section) or {}
            data[section] = (stored if isinstance(stored, dict) else {}) | given
    return parse_recipe(data, f"recipe {path}")


def parse_recipe(data: dict[str, Any], where: str) -> Recipe:
    """Plain data -> Recipe; an unknown key's error lists the keys that are allowed at its place."""
    try:
        return parse(data, Recipe, where)
    except ConfigError as error:
        raise ConfigError(f"{error}{_allowed_keys(str(error), data)}") from None


def find_recipe(name: str) -> Path:
    """The file of a recipe. Raises ConfigError that lists the names there are."""
    path = Path(name)
    if path.suffix in (".yaml", ".yml"):
        if path.is_file():
            return path
        raise ConfigError(f"recipe {name}: no such file")
    shipped = {file.stem: file for file in sorted(RECIPES.glob("*.yaml"))}
    if name not in shipped:
        raise ConfigError(f"recipe {name!r}: not a .yaml file and not one of {', '.join(shipped)}")
    return shipped[name]


def _allowed_keys(message: str, data: dict[str, Any]) -> str:
    """`; allowed keys: ...` for a message about an unknown key."""
    if "unknown field" not in message:
        return ""
    found = re.search(r"at `\$\.?(.*?)`", message)
    place = found[1] if found else ""
    if step := re.fullmatch(r"steps\[(\d+)\]", place):
        kind = STEPS[data["steps"][int(step[1])]["step"]]
        return f"; allowed keys: step, {_keys(kind)}" if kind is not Rtn else "; allowed keys: step"
    sections: dict[str, type[StrictStruct]] = {
        "": Recipe, "scheme": SchemeRecipe, "kv": KVRecipe, "kv.layers[...]": KVLayerRecipe,
        "calibration": CalibrationRecipe,
    }  # fmt: skip
    return f"; allowed keys: {_keys(sections[place])}"


def _keys(kind: type[StrictStruct]) -> str:
    return ", ".join(kind.__struct_fields__)


class _UniqueKeyLoader(yaml.SafeLoader):
    """SafeLoader keeps the last of two equal keys; a recipe that says a thing twice is refused instead."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Hashable, Any]:
        seen = set()
        for key_node, _ in node.value:
            key = self.construct_object(key_node, deep=True)
            if isinstance(key, Hashable):
                if key in seen:
                    raise yaml.constructor.ConstructorError(
                        None, None, f"key {key!r} is given twice", key_node.start_mark
                    )
                seen.add(key)
        return super().construct_mapping(node, deep)
