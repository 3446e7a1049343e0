"""Experts that a module of transformers keeps in tensors [experts, ...], as linears of their own.

    gate_up_proj [E, 2I, in]  ->  0.gate_proj [I, in], 0.up_proj [I, in], 1.gate_proj, ...
    down_proj    [E, out, I]  ->  0.down_proj [out, I], 1.down_proj, ...

Some modules keep [E, in, out], some have gate and up side by side for each output, biases, or no gate. They say so in
attributes, and all go through transformers' experts interface. A module that does not is left to transformers.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from fractions import Fraction
from typing import Any

import torch
from torch import Tensor, nn

from lmkit.formats.views import Rows
from lmkit.kernels import ops
from lmkit.kernels.cpu import workspace
from lmkit.layers.moe import Together, by_expert, parts_of, suiting, together_of
from lmkit.models.flexible.site import Site

GATE_UP, GATE, UP, DOWN = "gate_up_proj", "gate_proj", "up_proj", "down_proj"
BIAS = "_bias"
_places, _sum_places = ops.expert_places.select("cpu"), ops.sum_places.select("cpu")


@dataclass(frozen=True)
class Part:
    """A linear of each expert: some outputs of a parameter."""

    name: str
    parameter: str
    rows: Rows
    site: Site


@dataclass(frozen=True)
class Mixture:
    """The experts of a module. `transposed`: its parameters are [experts, in, out]."""

    num_experts: int
    parts: tuple[Part, ...]
    transposed: bool

    def sites(self, module: str) -> dict[str, Site]:
        """The linears by their names."""
        return {f"{module}.{e}.{part.name}": part.site for e in range(self.num_experts) for part in self.parts}


def pairs_of_experts(model: nn.Module) -> list[tuple[str, ...]]:
    """The names of each expert's gate and up, which read the same tensor."""
    found = ((name, mixture) for name, mixture in find_mixtures(model).items() if len(mixture.parts) > 2)
    return [tuple(f"{name}.{e}.{part}" for part in (GATE, UP)) for name, mix in found for e in range(mix.num_experts)]


def find_mixtures(model: nn.Module) -> dict[str, Mixture]:
    """The experts of a model by the name of their module. The model may be on `meta`."""
    found = ((name, mixture_of(module)) for name, module in model.named_modules())
    return {name: mixture for name, mixture in found if mixture is not None}


def mixture_of(module: nn.Module) -> Mixture | None:
    """The experts of a module; None if it has none that transformers' interface knows."""
    if not hasattr(module, "has_gate") or not hasattr(module, "is_transposed"):
        return None
    first = GATE_UP if module.has_gate else UP
    tensors = [getattr(module, name, None) for name in (first, DOWN)]
    weights = [weight for weight in tensors if isinstance(weight, Tensor) and weight.ndim == 3]
    if len(weights) < 2 or len({len(weight) for weight in weights}) > 1:
        return None
    transposed, has_bias = bool(module.is_transposed), bool(module.has_bias)
    (up_out, up_in), (down_out, down_in) = (w.shape[:0:-1] if transposed else w.shape[1:] for w in weights)
    down = Part(DOWN, DOWN, Rows(Fraction(0), Fraction(1)), Site((down_out, down_in), False, has_bias))
    if not module.has_gate:
        up = Part(UP, UP, Rows(Fraction(0), Fraction(1)), Site((up_out, up_in), False, has_bias))
        return Mixture(len(weights[0]), (up, down), transposed)
    groups = 1 if module.is_concatenated else up_out // 2
    half, site = Fraction(1, 2), Site((up_out // 2, up_in), False, has_bias)
    halves = ((GATE, Rows(Fraction(0), half, groups)), (UP, Rows(half, Fraction(1), groups)))
    return Mixture(len(weights[0]), (*(Part(name, GATE_UP, rows, site) for name, rows in halves), down), transposed)


class Experts(nn.Module):
    """In the place of a module of experts, with a linear for each part of each expert.

    `all_tokens` is for calibration: every expert computes every token, so that observers of its linears see all. The
    output is still that of the chosen ones.
    """

    def __init__(self, old: Any, linears: dict[str, nn.Module], mixture: Mixture) -> None:
        super().__init__()
        self._old = (old,)  # no module of this one: its weights stay on meta
        self.num_experts, self.all_tokens = mixture.num_experts, False
        for number in range(mixture.num_experts):
            parts = {part.name: linears[f"{number}.{part.name}"] for part in mixture.parts}
            self.add_module(str(number), nn.ModuleDict(parts))
        if old.has_post_expert_norm:
            self.post_expert_norm = old.post_expert_norm

    def forward(self, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
        """hidden_states [T, hidden], numbers of experts int64 and their weights [T, k] -> [T, hidden]"""
        if self.all_tokens:
            everyone = top_k_weights.new_zeros(len(hidden_states), self.num_experts + 1)
            top_k_weights = everyone.scatter_add(1, top_k_index.clamp(max=self.num_experts), top_k_weights)
            top_k_index = torch.arange(self.num_experts + 1).expand_as(top_k_weights)
        together = None if self.all_tokens else self._together
        together = suiting(together, top_k_index.numel() / self.num_experts, torch.float32)
        if together is not None:
            return self._computed_together(hidden_states, top_k_index, top_k_weights, together)
        out, factors = torch.zeros_like(hidden_states), top_k_weights.flatten()
        for expert, places in by_expert(top_k_index):
            if expert < self.num_experts:  # a number above stands for no expert
                tokens = places // top_k_index.shape[1]
                y = self._one(expert, hidden_states[tokens]) * factors[places, None]
                out.index_add_(0, tokens, y.to(out.dtype))
        return out

    def _one(self, number: int, x: Tensor) -> Tensor:
        """The output of an expert."""
        parts = self._parts(number)
        y = parts[DOWN](self._activated(parts[UP](x), parts[GATE](x) if GATE in parts else None))
        normed: Tensor = self.post_expert_norm(y) if self._old[0].has_post_expert_norm else y
        return normed

    def _parts(self, number: int) -> Any:
        """The linears of an expert by their names: a ModuleDict."""
        return self.get_submodule(str(number))

    def _activated(self, up: Tensor, gate: Tensor | None) -> Tensor:
        """The input of `down_proj`."""
        (old,) = self._old
        if gate is None:
            found: Tensor = old.act_fn(up)
        else:
            both = torch.cat([gate, up], -1) if old.is_concatenated else torch.stack([gate, up], -1).flatten(-2)
            found = old._apply_gate(both)
        return found

    @functools.cached_property
    def _together(self) -> Together | None:
        """The linears of all experts, if they are packed and alike."""
        every = [self._parts(number) for number in range(self.num_experts)]
        known = all(hasattr(part, "product") for parts in every for part in parts.values())  # linears.PackedLinear
        if self._old[0].has_post_expert_norm or not known:
            return None
        first = [{parts[name].product for name in parts if name != DOWN} for parts in every]
        if any(len(products) != 1 for products in first):
            return None
        return together_of(
            [product.linear for products in first for product in products], [parts[DOWN].linear for parts in every]
        )

    def _computed_together(self, x: Tensor, experts: Tensor, weights: Tensor, together: Together) -> Tensor:
        """As `forward`, with nothing that the host looks at."""
        parts, (up, down) = self._parts(0), together
        is_one = experts < self.num_experts  # a number above stands for no expert
        experts, weights = experts.where(is_one, 0), weights.where(is_one, 0).float()
        rows, out = x.float().contiguous(), workspace.empty(*x.shape)
        for part in parts_of(experts, self.num_experts, together):
            places = _places(experts[part], self.num_experts, range(self.num_experts))
            roles = parts[UP].product.split(up(rows[part], places, by_token=True), parts[UP].sizes)
            gate = roles[parts[GATE].role] if GATE in parts else None
            y = self._activated(roles[parts[UP].role], gate)
            _sum_places(down(y.contiguous(), places), weights[part].contiguous(), places, out[part])
        return out.to(x.dtype)


def place_experts(model: nn.Module, linear_of: Callable[[str], nn.Module | None]) -> None:
    """Put linears in the places of experts, where `linear_of` has each of them by its name."""
    for name, mixture in find_mixtures(model).items():
        linears = {each.removeprefix(f"{name}."): linear_of(each) for each in mixture.sites(name)}
        known = {each: linear for each, linear in linears.items() if linear is not None}
        if len(known) == len(linears):
            model.set_submodule(name, Experts(model.get_submodule(name), known, mixture))
