"""Recipes: what to quantize and how, as a YAML file that is read strictly.

    scheme: {bits: 4, group_size: 128, symmetric: false}
    steps: [{step: awq_scale}, {step: awq_clip}, {step: rtn}]
    kv: {bits: 8}
    calibration: {dataset: demo, num_samples: 64, seq_len: 512, seed: 0}
    ignore: [attn.o, "model.layers.0.*"]

An unknown key, a repeated key or a value out of range is a ConfigError that names the file, the place and what may
stand there.
"""

from __future__ import annotations

import math
import re
from collections.abc import Hashable
from pathlib import Path
from typing import Annotated, Any, Literal

import yaml
from msgspec import Meta

from lmkit.config import PositiveInt, StrictStruct, parse
from lmkit.errors import ConfigError
from lmkit.qtensor import QuantScheme

RECIPES = Path(__file__).parents[1] / "data" / "recipes"
DEFAULT_RECIPE = "awq_w4a16_g128"

KVBits = Literal[16, 8, 4]


class SchemeRecipe(StrictStruct, frozen=True):
    """The grid of the weights: `group_size` inputs of an output row share a scale and, unless symmetric, a zero."""

    bits: Literal[4] = 4
    group_size: Literal[32, 64, 128] = 128
    symmetric: bool = False

    def scheme(self) -> QuantScheme:
        return QuantScheme(self.bits, self.group_size, self.symmetric)


class AwqScale(StrictStruct, frozen=True, tag_field="step", tag="awq_scale"):
    """Move difficulty from weights to the operation before them (quant.transforms.awq_scale)."""

    duo: Literal["both"] | bool = "both"  # candidates from activations and weights, from activations alone, or both
    grid: Annotated[int, Meta(ge=1, le=1000)] = 20  # candidates of each kind
    tokens: Annotated[int, Meta(ge=16)] = 2048  # of the calibration data, on which candidates are compared


class AwqClip(StrictStruct, frozen=True, tag_field="step", tag="awq_clip"):
    """Narrow the range of each group where that lowers the output error (quant.rounders.awq_clip)."""

    grid: Annotated[int, Meta(ge=1, le=1000)] = 10  # steps from no clipping to `max_shrink`, at each end
    max_shrink: Annotated[float, Meta(gt=0, lt=1)] = 0.5


class Rtn(StrictStruct, frozen=True, tag_field="step", tag="rtn"):
    """Round to the nearest point of the grid."""


Step = AwqScale | AwqClip | Rtn
STEPS: dict[str, type[StrictStruct]] = {"awq_scale": AwqScale, "awq_clip": AwqClip, "rtn": Rtn}


class KVLayerRecipe(StrictStruct, frozen=True):
    """Bits of one layer that differ from the rest."""

    k_bits: KVBits | None = None
    v_bits: KVBits | None = None


class KVRecipe(StrictStruct, frozen=True):
    """Bits of the KV cache; 16 = as the model computes."""

    bits: KVBits = 16
    layers: dict[Annotated[int, Meta(ge=0)], KVLayerRecipe] = {}


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

    def __post_init__(self) -> None:
        if not self.dataset:
            raise ValueError("`dataset` names nothing; write a preset or a path")


class Recipe(StrictStruct, frozen=True, kw_only=True):
    """One quantization from end to end."""

    format: Literal["awq"] = "awq"
    scheme: SchemeRecipe = SchemeRecipe()
    steps: tuple[Step, ...]
    kv: KVRecipe = KVRecipe()
    calibration: CalibrationRecipe = CalibrationRecipe()
    ignore: tuple[str, ...] = ()  # roles (attn.o) or patterns of module names (*.down_proj) that stay dense

    def __post_init__(self) -> None:
        order = [type(step) for step in self.steps]
        if order not in ([Rtn], [AwqScale, Rtn], [AwqClip, Rtn], [AwqScale, AwqClip, Rtn]):
            raise ValueError("`steps` are awq_scale and awq_clip, each at most once and in this order, then rtn")

    def step(self, kind: type[StrictStruct]) -> Any:
        """The step of this kind, or None."""
        return next((step for step in self.steps if isinstance(step, kind)), None)


def load_recipe(name: str, overrides: dict[str, dict[str, Any]] | None = None) -> Recipe:
    """Read a recipe by its name in recipes/ or by its path. `overrides` ({section: {key: value}}) replace values of the
    file and pass the same checks; a value None overrides nothing. Raises ConfigError."""
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
        given = {key: value for key, value in values.items() if value is not None}
        if given:
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
