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

import math
import re
from collections.abc import Hashable
from pathlib import Path
from typing import Annotated, Any, Literal, get_args

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
Switch = Literal["auto"] | bool


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
    min_gain: Annotated[float, Meta(ge=0, lt=1)] = 0.0  # share of the loss without a scale that one must save


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


class Gptq(StrictStruct, frozen=True, tag_field="step", tag="gptq"):
    """Round column by column, each error made good by the columns that follow (quant.rounders.gptq)."""

    order: Literal["activation", "gar", "natural"] = "activation"  # of the columns; groups stay as they are
    damping: Annotated[float, Meta(gt=0, le=1)] = 0.01  # of the mean of the Hessian's diagonal, added to it
    targets: Literal["exact", "same"] = "exact"  # what to reach: the original layer's outputs, or this layer's own
    strength: Annotated[float, Meta(ge=0, le=1)] = 1.0  # of the way from this layer's own outputs to the exact ones
    sequential: bool = True  # attn.o and mlp.down are rounded on what the rounded linears before them give
    refine: Annotated[int, Meta(ge=0, le=100)] = 2  # rounds of coordinate descent over scales and codes afterwards


class SignRound(StrictStruct, frozen=True, tag_field="step", tag="signround"):
    """Tune the rounding and the ranges of a whole layer by gradient signs (quant.rounders.signround)."""

    iters: Annotated[int, Meta(ge=1)] = 200
    batch: PositiveInt = 8  # rows of the calibration data in one iteration


Step = AwqScale | AwqClip | SmoothQuant | Rtn | Gptq | SignRound
STEPS: dict[str, type[StrictStruct]] = {kind.__struct_config__.tag: kind for kind in get_args(Step)}  # type: ignore[misc]

# Steps of one stage exclude each other; stages come in this order, and a recipe has one ROUNDER.
TRANSFORMS, CLIPS, ROUNDERS, TUNERS = (AwqScale, SmoothQuant), (AwqClip,), (Rtn, Gptq), (SignRound,)
STAGES = (TRANSFORMS, CLIPS, ROUNDERS, TUNERS)


class KVLayerRecipe(StrictStruct, frozen=True):
    """Bits of one layer that differ from the rest."""

    k_bits: KVBits | None = None
    v_bits: KVBits | None = None


class KVRecipe(StrictStruct, frozen=True):
    """Bits of the KV cache, 16 = as the model computes, auto = 4 or 8 for each layer's keys and values; and what is
    done to keys before they become codes (quant.kv_fit), auto = where it helps."""

    bits: KVBits | Literal["auto"] = 16
    average_bits: Annotated[float, Meta(ge=4, le=8)] = 5.0  # of bits auto, at most
    type: Literal["int", "fp8"] = "int"  # of 8 bits
    smooth: bool = True  # SmoothAttention, its exponent searched
    key_mean: Switch = "auto"  # leave the mean before RoPE out of the cache
    hadamard: Switch = "auto"  # turn keys by the Walsh-Hadamard matrix
    scheme: Literal["online", "static8"] = "online"  # static8: one scale for all tokens, in the checkpoint
    layers: dict[Annotated[int, Meta(ge=0)], KVLayerRecipe] = {}

    def __post_init__(self) -> None:
        if self.scheme == "static8" and (self.bits != 8 or self.layers or True in (self.key_mean, self.hadamard)):
            raise ValueError("`scheme` static8 has 8 bits everywhere, and neither key_mean nor hadamard")


class DatasetRecipe(StrictStruct, frozen=True):
    """A source of text (a preset's name or a path) and how much it counts among the others."""

    source: str
    weight: Annotated[float, Meta(gt=0)] = 1.0

    def __post_init__(self) -> None:
        if not math.isfinite(self.weight):
            raise ValueError("`weight` must be a finite number")


class CalibrationRecipe(StrictStruct, frozen=True):
    """Which text, how much of it: `num_samples` rows of `seq_len` tokens. `dataset`: a source, sources that are pooled,
    or sources with weights, each of which fills its share of the rows (a name alone weighs 1)."""

    dataset: str | tuple[str | DatasetRecipe, ...] = "demo"
    num_samples: PositiveInt = 64
    seq_len: Annotated[int, Meta(ge=8)] = 512
    seed: Annotated[int, Meta(ge=0, lt=1 << 32)] = 0
    all_experts: bool = False  # of a sparse layer, every expert is calibrated on all tokens, not only on those it gets

    def __post_init__(self) -> None:
        if not self.dataset:
            raise ValueError("`dataset` names nothing; write a preset or a path")


class Recipe(StrictStruct, frozen=True, kw_only=True):
    """One quantization from end to end."""

    format: FormatName = "awq"
    scheme: SchemeRecipe = SchemeRecipe()
    activations: Activations = "none"  # how engines are to round the inputs of quantized linears, each token by itself
    bits: Annotated[float, Meta(gt=0, le=32)] | None = None  # average of all linears, chosen by quant.mixed_precision
    steps: tuple[Step, ...]
    kv: KVRecipe = KVRecipe()
    calibration: CalibrationRecipe = CalibrationRecipe()
    ignore: tuple[str, ...] = ()  # patterns of roles (attn.o) or of module names (*.down_proj) that stay dense

    def __post_init__(self) -> None:
        stages = [i for step in self.steps for i, kinds in enumerate(STAGES) if isinstance(step, kinds)]
        if stages != sorted(set(stages)) or STAGES.index(ROUNDERS) not in stages:
            order = ", then ".join(" or ".join(kind.__struct_config__.tag for kind in kinds) for kinds in STAGES)  # type: ignore
            raise ValueError(
                f"`steps` are {order}: at most one of each, in this order, and one of them rounds (rtn or gptq)"
            )
        if problem := _scheme_problem(self) or _budget_problem(self):
            raise ValueError(problem)

    @property
    def is_plain(self) -> bool:
        """Whether all there is to do is to round to nearest."""
        return len(self.steps) == 1 and isinstance(self.steps[0], Rtn)

    @property
    def needs_exact(self) -> bool:
        """Whether a step wants to know what the original model computes."""
        gptq, tuner = self.step(Gptq), self.step(SignRound)
        return tuner is not None or (gptq is not None and gptq.targets == "exact" and gptq.strength > 0)

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
    for tuner in (Gptq, SignRound):
        if recipe.step(tuner) is not None and weights.kind != "int":
            return f"{tuner.__struct_config__.tag} needs type int"
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
        return f"; allowed keys: {', '.join(('step', *kind.__struct_fields__))}"
    sections: dict[str, type[StrictStruct]] = {
        "": Recipe, "scheme": SchemeRecipe, "kv": KVRecipe, "kv.layers[...]": KVLayerRecipe,
        "calibration": CalibrationRecipe, "calibration.dataset[]": DatasetRecipe,
    }  # fmt: skip
    return f"; allowed keys: {_keys(sections[re.sub(r'[0-9]+(?=])', '', place)])}"


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
