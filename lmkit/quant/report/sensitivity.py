"""The cost of each scheme for each linear, and the choice of schemes by this cost. The cost is the KL of the model's
output when this linear alone is rounded.

For every group of fused linears and every scheme there is a variant of the model that differs from it in that group
alone. All variants go through the model together, a layer at a time, so that each layer is read once. After layer l
there are the hidden states of the model, and of a variant for each choice in layers 0 .. l. With L layers, this takes
L^2 / 2 times the choices of a layer forward passes of a few tokens. If VARIANT_BYTES do not hold all variants, they
take several passes.
"""

from __future__ import annotations

import dataclasses
import math
import time
from dataclasses import dataclass

import torch
from torch import Tensor

from lmkit.kernels.cuda.module import tensor_device
from lmkit.models.decoder import Decoder
from lmkit.models.decoder_layer import DecoderLayer, joined
from lmkit.models.resolved import resolve_dtype
from lmkit.models.source import ModelSource
from lmkit.qtensor import QuantScheme
from lmkit.quant.groups import fit_groups
from lmkit.quant.layer.grid import round_to_nearest
from lmkit.quant.layer.layer import Geometry
from lmkit.quant.mixed_precision import MEASURED_LEN, MEASURED_ROWS, BitBudget, Group, choose, make_bit_budget, name_of
from lmkit.quant.plan import Plan
from lmkit.quant.recipe import Recipe
from lmkit.quant.report.evaluate import LOGIT_BYTES, Progress
from lmkit.quant.report.report import MixedPrecisionGroup, MixedPrecisionReport

VARIANT_BYTES = 1 << 30  # of hidden states at a time


@dataclass(frozen=True)
class Variant:
    """The model with one group of linears rounded by `scheme`."""

    group: int
    choice: int
    layer: int
    roles: tuple[str, ...]
    scheme: QuantScheme


@torch.inference_mode()
def choose_schemes(
    source: ModelSource,
    recipe: Recipe,
    plan: Plan,
    rows: Tensor,
    progress: Progress = lambda *state: None,
    device: str = "cpu",
) -> tuple[Plan, MixedPrecisionReport]:
    """The plan with every linear's scheme chosen within `recipe.average_bits`. The choice is deterministic.

    rows int64 [num_rows, seq_len]; a few of them are used.
    """
    assert recipe.average_bits is not None
    start = time.perf_counter()
    grids = fit_groups(source.spec, recipe)
    linears, dense = dict(plan.linears), grids.dense
    budget = make_bit_budget(source.spec, recipe, grids.linears)
    used = rows[torch.linspace(0, len(rows) - 1, min(MEASURED_ROWS, len(rows))).round().long(), :MEASURED_LEN]
    kl = measure(source, budget.groups, used, progress, device)
    chosen = choose(budget, kl, recipe.average_bits)
    for group, choice in zip(budget.groups, chosen, strict=True):
        for module in group.modules.values():
            linears[module] = group.choices[choice]
            if group.choices[choice] is None:
                dense[module] = "dense by the budget of bits"
    report = MixedPrecisionReport(
        bits=recipe.average_bits,
        reached=round(budget.reached(chosen), 4),
        kl=sum(losses[choice] for losses, choice in zip(kl, chosen, strict=True)),
        num_tokens=used.numel(),
        groups=_group_reports(source, budget, kl, chosen),
        seconds=round(time.perf_counter() - start, 2),
    )
    return dataclasses.replace(plan, linears=linears, dense=dense), report


def measure(
    source: ModelSource,
    groups: tuple[Group, ...],
    rows: Tensor,
    progress: Progress = lambda *state: None,
    device: str = "cpu",
) -> list[list[float]]:
    """Mean KL in nats per token from the unrounded model, by group and choice; 0 for dense. rows int64 [n, seq_len]."""
    variants = [
        Variant(number, choice, group.layer, tuple(group.modules), scheme)
        for number, group in enumerate(groups)
        for choice, scheme in enumerate(group.choices)
        if scheme is not None
    ]
    rows = rows.to(tensor_device(device))
    head = source.head(getattr(torch, resolve_dtype("auto", source.spec.dtype, "cpu")), device)
    head.lm_head.pack("exact")
    at_once = VARIANT_BYTES // (4 * rows.shape[1] * source.spec.hidden_size)  # rows times variants
    num_rows = min(len(rows), max(1, at_once // len(variants)))
    num_variants = max(1, at_once // num_rows)
    passes = [
        (part, variants[begin : begin + num_variants])
        for part in rows.split(num_rows)
        for begin in range(0, len(variants), num_variants)
    ]
    total = [[0.0] * len(group.choices) for group in groups]
    for done, (part, some) in enumerate(passes):
        progress("mixed precision", done, len(passes))
        for variant, value in zip(some, _divergences(source, head, part, some), strict=True):
            total[variant.group][variant.choice] += value / rows.numel()
    return total


def _divergences(source: ModelSource, head: Decoder, rows: Tensor, variants: list[Variant]) -> list[float]:
    """Sum of KL over the tokens of `rows` for each variant. Variants are in the order of their layers."""
    exact = head.embed_rows(rows)
    states: list[Tensor] = []
    for index in range(source.spec.num_layers):
        layer = source.layer(index, torch.float32, head.lm_head.device)
        geometry = Geometry.of(layer.spec, len(rows), rows.shape[1], layer.device)
        states = [_forward(layer, state, geometry) for state in states]
        states += [_rounded(layer, v, exact, geometry) for v in variants if v.layer == index]
        exact = _forward(layer, exact, geometry)
        source.reader.release()
    return _compare(head, exact, states)


def _rounded(layer: DecoderLayer, variant: Variant, hidden: Tensor, geometry: Geometry) -> Tensor:
    originals = {role: layer.weights[role] for role in variant.roles}
    for role, weight in originals.items():
        assert isinstance(weight, Tensor)
        layer.weights[role] = round_to_nearest(weight, variant.scheme)
    output = _forward(layer, hidden, geometry)
    layer.weights.update(originals)
    return output


def _forward(layer: DecoderLayer, hidden: Tensor, geometry: Geometry) -> Tensor:
    # An op may write into its residual argument.
    delta, residual = layer(hidden.clone(), None, geometry.batch, geometry.rope, geometry.kv)
    return joined(delta, residual)


def _compare(head: Decoder, exact: Tensor, states: list[Tensor]) -> list[float]:
    """Sum of KL for each of `states`. Logits are computed a few tokens at a time, those of `exact` once."""
    sums = [0.0] * len(states)
    num_tokens = max(1, LOGIT_BYTES // (4 * head.spec.vocab_size))
    for begin in range(0, len(exact), num_tokens):
        part = slice(begin, begin + num_tokens)
        p = head.head(exact[part], None).log_softmax(-1)
        weights = p.exp()
        for i, state in enumerate(states):
            q = head.head(state[part], None).log_softmax(-1)
            kl = (weights * (p - q)).sum(-1, dtype=torch.float64)
            sums[i] += float(kl.clamp_min(0).sum())
    return sums


def _group_reports(
    source: ModelSource, budget: BitBudget, kl: list[list[float]], chosen: list[int]
) -> tuple[MixedPrecisionGroup, ...]:
    reports = []
    for group, losses, choice in zip(budget.groups, kl, chosen, strict=True):
        num_weights = sum(math.prod(source.spec.layers[group.layer].linears[role]) for role in group.modules)
        names = [name_of(scheme) for scheme in group.choices]
        bits = {name: round(total / num_weights, 4) for name, total in zip(names, group.bits, strict=True)}
        reports.append(
            MixedPrecisionGroup(
                tuple(group.modules.values()), names[choice], dict(zip(names, losses, strict=True)), bits
            )
        )
    return tuple(reports)
