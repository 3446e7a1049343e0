"""Mixed precision by budget: the schemes each linear may have, their cost in bits, and the best choice in the budget.

The budget is the average number of bits of a weight over all linears of the decoder. It includes scales, zeros and
dense linears. Linears that are fused into one product get one scheme. quant.report.sensitivity measures the cost of a
choice in KL.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from lmkit.errors import ConfigError
from lmkit.formats.base import get_format
from lmkit.layers.blocks.base import Shape
from lmkit.models.spec import ModelSpec
from lmkit.qtensor import Linears, QuantScheme
from lmkit.quant.groups import candidates, computed_together
from lmkit.quant.recipe import Recipe

MEASURED_ROWS, MEASURED_LEN = 8, 128  # KL is measured on so many rows of the calibration data, of so many tokens
RESOLUTION = 1 << 16  # the spare bits are counted in this many units, if their costs have no larger common divisor
DENSE_BITS = {"float32": 32, "bfloat16": 16, "float16": 16}


@dataclass(frozen=True)
class Group:
    """Linears of a layer that share a scheme.

    `bits` counts the bits of all their weights for each of the `choices`, the cheapest first.
    """

    layer: int
    modules: dict[str, str]  # by role
    choices: tuple[QuantScheme | None, ...]  # None = dense
    bits: tuple[int, ...]


@dataclass(frozen=True)
class BitBudget:
    """The groups that a scheme is chosen for. `fixed_bits` counts the linears that stay dense in any case."""

    groups: tuple[Group, ...]
    fixed_bits: int
    num_weights: int

    @property
    def lowest(self) -> float:
        """Average bits of a weight with the cheapest choices."""
        return (self.fixed_bits + sum(group.bits[0] for group in self.groups)) / self.num_weights

    @property
    def highest(self) -> float:
        return (self.fixed_bits + sum(group.bits[-1] for group in self.groups)) / self.num_weights

    def reached(self, chosen: list[int]) -> float:
        """Average bits of a weight with choice `chosen[i]` of group i."""
        spent = sum(group.bits[choice] for group, choice in zip(self.groups, chosen, strict=True))
        return (self.fixed_bits + spent) / self.num_weights


def make_bit_budget(spec: ModelSpec, recipe: Recipe, linears: Linears) -> BitBudget:
    """The groups and their choices for a model. `linears`: the schemes that `groups.fit_groups` gives."""
    groups, fixed_bits = [], 0
    for index, layer in enumerate(spec.layers):
        for roles in computed_together(layer):
            modules = {role: layer.module_name(index, role) for role in roles}
            fixed = [role for role, module in modules.items() if linears[module] is None]
            fixed_bits += sum(stored_bits(spec, recipe, layer.linears[role], None) for role in fixed)
            if free := {role: module for role, module in modules.items() if role not in fixed}:
                groups.append(_group(spec, recipe, index, free, linears[next(iter(free.values()))]))
    return BitBudget(tuple(groups), fixed_bits, spec.num_weights)


def _group(spec: ModelSpec, recipe: Recipe, layer: int, names: dict[str, str], base: QuantScheme | None) -> Group:
    can_write = get_format(recipe.format).can_write
    shapes = [spec.layers[layer].linears[role] for role in names]
    choices: list[QuantScheme | None] = [
        scheme for scheme in candidates(recipe, base) if all(can_write(shape, scheme) is None for shape in shapes)
    ]
    bits = {choice: sum(stored_bits(spec, recipe, shape, choice) for shape in shapes) for choice in [*choices, None]}
    ordered = sorted(bits, key=lambda choice: bits[choice])
    return Group(layer, names, tuple(ordered), tuple(bits[choice] for choice in ordered))


def stored_bits(spec: ModelSpec, recipe: Recipe, shape: Shape, scheme: QuantScheme | None) -> int:
    """Bits of a linear's weight in the file; None = dense."""
    out_features, in_features = shape
    if scheme is None:
        return out_features * in_features * DENSE_BITS[spec.dtype]
    zero_bits = scheme.bits if scheme.symmetric and recipe.format == "awq" else 0  # AWQ always stores zeros
    groups = out_features * scheme.num_groups(in_features)
    return out_features * in_features * scheme.bits + groups * (scheme.group_bits + zero_bits)


def check_reachable(spec: ModelSpec, recipe: Recipe, linears: Linears) -> None:
    """Raise ConfigError for a budget below the lowest possible one, or for one that leaves every linear dense."""
    if recipe.average_bits is None:
        return
    asked, budget = f"average_bits {recipe.average_bits:g}", make_bit_budget(spec, recipe, linears)
    if recipe.average_bits < budget.lowest:
        lowest = math.ceil(1000 * budget.lowest) / 1000
        raise ConfigError(f"recipe: {asked} cannot be reached; the lowest for this model is {lowest:g}")
    if recipe.average_bits >= budget.highest:
        raise ConfigError(f"recipe: {asked} would leave every linear dense; this model has {budget.highest:g}")


def choose(budget: BitBudget, losses: list[list[float]], bits: float) -> list[int]:
    """The choice of each group that minimises the sum of `losses[group][choice]` within an average of `bits`.

    This is a knapsack. It is solved exactly where the costs have a common divisor, as they do for weights of the usual
    sizes. Otherwise costs are rounded up to 1 / RESOLUTION of the spare bits. Of equal sums, the cheapest choices win.
    """
    extra = [[b - group.bits[0] for b in group.bits] for group in budget.groups]
    spare = math.floor(bits * budget.num_weights) - budget.fixed_bits - sum(group.bits[0] for group in budget.groups)
    unit = max(math.gcd(*(cost for costs in extra for cost in costs)), -(-spare // RESOLUTION), 1)
    capacity = spare // unit
    best, picks = np.zeros(capacity + 1), []  # best[n]: the smallest sum so far that spends at most n units
    for costs, group_losses in zip(extra, losses, strict=True):
        sums = np.full((len(costs), capacity + 1), np.inf)
        for choice, (cost, loss) in enumerate(zip(costs, group_losses, strict=True)):
            units = -(-cost // unit)
            if units <= capacity:
                sums[choice, units:] = best[: capacity + 1 - units] + loss
        picks.append((np.argmin(sums, axis=0), [-(-cost // unit) for cost in costs]))
        best = sums.min(axis=0)
    chosen, left = [], capacity
    for pick, units_of in reversed(picks):
        chosen.append(int(pick[left]))
        left -= units_of[chosen[-1]]
    return chosen[::-1]


def name_of(scheme: QuantScheme | None) -> str:
    """The name of a scheme: `int4 g128`, `int8 channel`, `float8 block`, `dense`."""
    if scheme is None:
        return "dense"
    return str(scheme)
