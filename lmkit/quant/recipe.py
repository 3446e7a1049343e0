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

import re
from collections.abc import Hashable
from pathlib import Path
from typing import Annotated, Any, Literal, get_args

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
    min_gain: Annotated[float, Meta(ge=0, lt=1)] = 0.0  # share of the loss without a scale that one must save


class AwqClip(StrictStruct, frozen=True, tag_field="step", tag="awq_clip"):
    """Narrow the range of each group where that lowers the output error (quant.rounders.awq_clip)."""

    grid: Annotated[int, Meta(ge=1, le=1000)] = 10  # steps from no clipping to `max_shrink`, at each end
    max_shrink: Annotated[float, Meta(gt=0, lt=1)] = 0.5


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


Step = AwqScale | AwqClip | Rtn | Gptq | SignRound
STEPS: dict[str, type[StrictStruct]] = {kind.__struct_config__.tag: kind for kind in get_args(Step)}  # type: ignore[misc]

# Steps of one stage exclude each other; stages come in this order, and a recipe has one ROUNDER.
TRANSFORMS, CLIPS, ROUNDERS, TUNERS = (AwqScale,), (AwqClip,), (Rtn, Gptq), (SignRound,)
STAGES = (TRANSFORMS, CLIPS, ROUNDERS, TUNERS)


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

    format: Literal["awq"] = "awq"
    scheme: SchemeRecipe = SchemeRecipe()
    steps: tuple[Step, ...]
    kv: KVRecipe = KVRecipe()
    calibration: CalibrationRecipe = CalibrationRecipe()
    ignore: tuple[str, ...] = ()  # roles (attn.o) or patterns of module names (*.down_proj) that stay dense

    def __post_init__(self) -> None:
        stages = [i for step in self.steps for i, kinds in enumerate(STAGES) if isinstance(step, kinds)]
        if stages != sorted(set(stages)) or STAGES.index(ROUNDERS) not in stages:
            order = ", then ".join(" or ".join(kind.__struct_config__.tag for kind in kinds) for kinds in STAGES)  # type: ignore
            raise ValueError(
                f"`steps` are {order}: at most one of each, in this order, and one of them rounds (rtn or gptq)"
            )

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
        return f"; allowed keys: {', '.join(('step', *kind.__struct_fields__))}"
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
