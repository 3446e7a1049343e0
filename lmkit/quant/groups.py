"""The grid of each linear: its groups are whole. A size that does not divide a linear's inputs falls back to a smaller
one, and what no size divides stays dense.

A format with one scheme for a whole file gives all linears the size that leaves the fewest weights dense, and of equal
ones the largest. compressed-tensors chooses a size for each set of linears that engines compute together.
"""

from __future__ import annotations

import math
import re
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from typing import Any

import msgspec

from lmkit.codes import Integers
from lmkit.errors import ConfigError
from lmkit.formats.base import get_format
from lmkit.layers.blocks.base import Shape
from lmkit.models.layer_spec import LayerSpec
from lmkit.models.rounding import MAX_DENSE, group_text
from lmkit.models.spec import ModelSpec
from lmkit.qtensor import Linears, QuantScheme
from lmkit.quant.recipe import MIXED_FORMAT, Recipe
from lmkit.quant.sections import WIDE_GROUPS

LOW_BITS = 2, 3  # for budgets that the recipe's scheme exceeds
EXPERTS = "mlp.experts."


@dataclass(frozen=True)
class Linear:
    """A linear that the recipe quantizes if its format can store it."""

    module: str
    shape: Shape

    @property
    def num_weights(self) -> int:
        return math.prod(self.shape)


@dataclass(frozen=True)
class Grids:
    """`linears` maps the module of each linear to its scheme before a budget of bits (None = it stays dense). `dense`
    maps those that stay dense to the reason. `refused` are those among them that the recipe wants to quantize."""

    linears: dict[str, QuantScheme | None]
    dense: dict[str, str]
    refused: tuple[Linear, ...]
    groups: str  # the sizes as a user reads them: "groups of 64 (128 does not divide 576)"


def candidates(recipe: Recipe, base: QuantScheme | None = None) -> tuple[QuantScheme, ...]:
    """The schemes that a linear may get whose own is `base`, by default the recipe's. Without a budget of bits, this is
    `base` alone."""
    base = base or recipe.grid
    if recipe.average_bits is None or recipe.format == "awq" or base.bits != 4:  # an AWQ file has one scheme
        return (base,)
    finer = () if base.group_size == 32 else (replace(base, group_size=32),)
    of_scale = base.group_bits / max(base.group_size, 1)
    widths = LOW_BITS if recipe.average_bits < base.bits + of_scale else ()
    low = [replace(scheme, codes=Integers(bits)) for bits in widths for scheme in (base, *finer)]
    return *low, base, *finer, replace(base, codes=Integers(8, symmetric=True))


def computed_together(layer: LayerSpec) -> list[tuple[str, ...]]:
    """The roles of a layer's linears in sets that share a scheme: those of one product, and all experts."""
    fused = {role: group[0] for group in layer.fused for role in group}
    sets: dict[str, list[str]] = {}
    for role in layer.linears:
        sets.setdefault(EXPERTS if role.startswith(EXPERTS) else fused.get(role, role), []).append(role)
    return [tuple(roles) for roles in sets.values()]


def fit_groups(spec: ModelSpec, recipe: Recipe) -> Grids:
    """The grid of each linear. Raises ConfigError for a pattern of `ignore` that matches none."""
    dense = _left_dense(spec, recipe)
    sets = [[linear for linear in linears if linear.module not in dense] for linears in _sets(spec)]
    if recipe.format != MIXED_FORMAT:
        sets = [[linear for linears in sets for linear in linears]]
    schemes: dict[str, QuantScheme | None] = dict.fromkeys(dense)
    refused: list[Linear] = []
    for linears in sets:
        scheme = _largest(recipe, linears)
        for linear in linears:
            reason = _problem(recipe, linear.shape, scheme)
            schemes[linear.module] = None if reason else scheme
            if reason:
                dense[linear.module] = reason
                refused.append(linear)
    widths = {linear.shape[1] for linears in sets for linear in linears}
    return Grids(schemes, dense, tuple(refused), _sizes(recipe, schemes, widths))


def check_dense(path: object, spec: ModelSpec, recipe: Recipe, grids: Grids) -> None:
    """Raise ConfigError if much stays dense that the recipe wants to quantize. The error names the mend."""
    share = _refused_share(spec, grids)
    if share <= MAX_DENSE:
        return
    largest = max(grids.refused, key=lambda linear: linear.num_weights)
    raise ConfigError(
        f"{path}: {len(grids.refused)} of {len(grids.linears)} linears, {share:.0%} of the weights, would stay dense "
        f"({largest.module}: {grids.dense[largest.module]}); {_mend(spec, recipe)}, or name them under `ignore` of a "
        "recipe to leave them dense"
    )


def _refused_share(spec: ModelSpec, grids: Grids) -> float:
    return sum(linear.num_weights for linear in grids.refused) / spec.num_weights


def _mend(spec: ModelSpec, recipe: Recipe) -> str:
    """The first change of the recipe with which hardly anything stays dense."""
    smaller = {} if recipe.scheme.smaller_groups else {"smaller_groups": True}
    own = ["leave out --group-size"] if smaller else []
    changes: tuple[tuple[list[str], dict[str, Any], dict[str, Any]], ...] = (
        (own, {}, smaller),
        ([*own, "take --format compressed-tensors"], {"format": MIXED_FORMAT}, smaller),
        (["take --group-size channel"], {}, {"group_size": "channel"}),
    )
    for texts, of_recipe, of_scheme in changes:
        try:
            scheme = msgspec.structs.replace(recipe.scheme, **of_scheme)
            changed = msgspec.structs.replace(recipe, scheme=scheme, **of_recipe)
        except ValueError:  # steps, format and scheme do not go together
            continue
        if texts and _refused_share(spec, fit_groups(spec, changed)) <= MAX_DENSE:
            return " and ".join(texts)
    return "take --recipe rtn_w8a16 --group-size channel"


def _sets(spec: ModelSpec) -> list[list[Linear]]:
    """All linears, in the sets that are computed together."""
    return [
        [Linear(layer.module_name(index, role), layer.linears[role]) for role in roles]
        for index, layer in enumerate(spec.layers)
        for roles in computed_together(layer)
    ]


def _left_dense(spec: ModelSpec, recipe: Recipe) -> dict[str, str]:
    """The linears that are not to be quantized, with the reason."""
    dense, matched = {}, set()
    for index, layer in enumerate(spec.layers):
        for role in layer.linears:
            module = layer.module_name(index, role)
            patterns = [p for p in recipe.ignore if fnmatchcase(role, p) or fnmatchcase(module, p)]
            matched |= set(patterns)
            if patterns:
                dense[module] = f"ignored by the recipe ({patterns[0]})"
            elif role in layer.unrounded:
                dense[module] = "small, and every later state depends on it"
    for pattern in recipe.ignore:
        if pattern not in matched:
            raise ConfigError(
                f"recipe: ignore: {pattern!r} matches no linear; use a role ({_role_patterns(spec)}) or a pattern of "
                "module names such as *.layers.0.*"
            )
    return dense


def _role_patterns(spec: ModelSpec) -> str:
    """Every role of the model, with * for the number of an expert."""
    every = [role for layer in spec.kinds for role in layer.linears]
    return ", ".join(dict.fromkeys(re.sub(r"\d+", "*", role) for role in every))


def _largest(recipe: Recipe, linears: list[Linear]) -> QuantScheme:
    """The recipe's scheme in the groups that leave the fewest weights dense, and of equal ones in the largest."""
    can_write = get_format(recipe.format).can_write

    def left(scheme: QuantScheme) -> int:
        return sum(linear.num_weights for linear in linears if can_write(linear.shape, scheme))

    return min(recipe.grids, key=left)


def _problem(recipe: Recipe, shape: Shape, scheme: QuantScheme) -> str | None:
    """Why the recipe's format cannot store a linear whose scheme is `scheme`, nor any other that a budget allows."""
    can_write = get_format(recipe.format).can_write
    reasons = [can_write(shape, candidate) for candidate in candidates(recipe, scheme)]
    return reasons[0] if all(reasons) else None


def _sizes(recipe: Recipe, schemes: Linears, widths: set[int]) -> str:
    """`groups of 128 and 64 (128 does not divide 576)`, `per channel`."""
    asked = recipe.scheme.group_size
    if asked in WIDE_GROUPS:
        return f"per {'channel' if asked == -1 else asked}"
    assert isinstance(asked, int)
    return group_text(asked, {scheme.group_size for scheme in schemes.values() if scheme is not None}, widths)
