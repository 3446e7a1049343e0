"""SmoothQuant (arXiv 2211.10438): inputs are rounded token by token, and outliers leave few steps for the other
channels. The scales move outliers from the inputs to the weights.

Channel j of the input is divided by s_j = max|x_j|^alpha / max|w_j|^(1-alpha). The division is folded into the
operation before, as AWQ's scales are, and the weights after are multiplied by s_j. Nothing changes in exact
arithmetic, but the weights carry the outliers. alpha 1 leaves no outliers in the input, alpha 0 none in the weights. A
search compares a grid of alphas and s = 1 on the output of the block. The linears' input and weights are rounded as an
engine will round them.
"""

from __future__ import annotations

import math
from typing import Annotated, ClassVar, Literal

import torch
from msgspec import Meta
from torch import Tensor

from lmkit.formats.names import Activations
from lmkit.models.layer_spec import LayerSpec
from lmkit.models.spec import ModelSpec
from lmkit.option import Note
from lmkit.qtensor import QuantScheme, dequantize, quantize
from lmkit.quant.layer.layer import CalibratedLayer
from lmkit.quant.layer.scaling import (
    IDENTITY,
    Candidate,
    ScaleSearch,
    by_value_head,
    expand,
    fold_each_pair,
    normalized,
    record,
    storable,
)
from lmkit.quant.layer.work import LayerWork
from lmkit.quant.steps.base import LayerCost, Speed, Stage, Step

INT8_MAX = 127
FP8_MAX = torch.finfo(torch.float8_e4m3fn).max


class SmoothQuant(Step, frozen=True, tag="smooth_quant"):
    """Move difficulty from rounded activations to the weights after them."""

    stage: ClassVar = Stage.TRANSFORM
    sees_all: ClassVar = True

    alpha: Annotated[
        Annotated[float, Meta(ge=0, le=1)] | Literal["search"],
        Note("How much difficulty is moved. search: the best by the error of the output."),
    ] = "search"
    grid: Annotated[int, Meta(ge=1, le=1000), Note("Values of alpha from 0 to 1 that a search compares.")] = 20

    def refuses(self, scheme: QuantScheme, activations: Activations) -> str | None:
        if activations == "none":
            return "smooth_quant is for rounded activations: `activations: int8`, float8 or float4"
        return None

    def refuses_model(self, spec: ModelSpec) -> str | None:
        return self.needs_pairs(spec)

    def apply(self, work: LayerWork) -> None:
        record(work, smooth_layer(work.calibrated, self, work.activations))

    def seconds(self, cost: LayerCost, speed: Speed) -> float:
        return cost.search_seconds(speed, self.grid, self.grid)

    def working_numbers(self, cost: LayerCost) -> int:
        return cost.search_numbers


def smooth_layer(calibrated: CalibratedLayer, step: SmoothQuant, activations: Activations) -> list[ScaleSearch]:
    """Choose and fold s for each pair of LayerSpec.smooth."""

    def choose(source: str, consumers: tuple[str, ...]) -> ScaleSearch:
        candidates = pair_candidates(calibrated, source, consumers, step)
        found = compare(calibrated, source, candidates, activations)
        if step.alpha != "search":
            return ScaleSearch(source, consumers, candidates[-1], found.losses)
        return found

    return fold_each_pair(calibrated, choose)


def pair_candidates(
    calibrated: CalibratedLayer, source: str, consumers: tuple[str, ...], step: SmoothQuant
) -> list[Candidate]:
    """Identity, then one candidate for each alpha. They are adjusted so that a norm divided by s is stored without
    rounding."""
    spec = calibrated.layer.spec
    x_max = _shared(calibrated.input(consumers[0]).abs_max, source, spec)
    w_max = torch.stack([calibrated.weight(role).abs().amax(0) for role in consumers]).amax(0)
    alphas = [step.alpha] if step.alpha != "search" else [i / max(step.grid - 1, 1) for i in range(step.grid)]
    candidates = [Candidate(IDENTITY, torch.ones_like(x_max))]
    candidates += make_candidates(x_max, _shared(w_max, source, spec), alphas)
    return storable(calibrated, source, candidates)


def make_candidates(x_max: Tensor, w_max: Tensor, alphas: list[float]) -> list[Candidate]:
    """The candidate for each alpha. x_max, w_max float32 [n]: the largest magnitude of each channel.

    A dead channel keeps s = 1. A common factor of s changes nothing, so the middle of s is put at 1.
    """
    live = (x_max > 0) & (w_max > 0) & x_max.isfinite() & w_max.isfinite()
    if not live.any():
        return [Candidate(f"alpha {alpha:.3g}", torch.ones_like(x_max)) for alpha in alphas]
    return [Candidate(f"alpha {a:.3g}", normalized(x_max**a / w_max.clamp(min=1e-5) ** (1 - a), live)) for a in alphas]


def compare(
    calibrated: CalibratedLayer, source: str, candidates: list[Candidate], activations: Activations
) -> ScaleSearch:
    """Find the candidate whose rounded inputs and weights change the output of the block least. Identity comes first
    and wins ties. The layer's weights are restored."""
    layer = calibrated.layer
    consumers = dict(layer.spec.smooth)[source]
    stats = calibrated.input(consumers[0])
    originals = {role: calibrated.weight(role) for role in consumers if role in calibrated.schemes}
    scheme = calibrated.schemes[next(iter(originals))]
    reference, sample = calibrated.block_output(source), stats.sample
    losses: dict[str, float] = {}
    for candidate in candidates:
        for role, weight in originals.items():
            s = expand(candidate.scale, role, layer.spec)
            layer.weights[role] = dequantize(calibrated.rounded(role, weight * s)) / s
        s = expand(candidate.scale, consumers[0], layer.spec)
        stats.sample = round_activations(sample / s, activations, scheme) * s
        error = calibrated.block_output(source) - reference
        losses[candidate.name] = float(error.square().sum(dtype=torch.float64))
    layer.weights.update(originals)
    stats.sample = sample
    finite = [c for c in candidates if math.isfinite(losses[c.name])] or candidates[:1]
    return ScaleSearch(source, consumers, min(finite, key=lambda c: losses[c.name]), losses)


def round_activations(x: Tensor, activations: Activations, scheme: QuantScheme) -> Tensor:
    """x float32 [tokens, in] as an engine rounds it before weights of `scheme`: int8 symmetric from -127 to 127, float8
    e4m3, or float4 as the weights.

    There is one scale for each token, or for each of its groups of inputs as weights have them.
    """
    if activations == "none":
        return x
    if activations == "float4":
        return dequantize(quantize(x, scheme))
    size = x.shape[1] if scheme.group_size == -1 else scheme.group_size
    groups = torch.nn.functional.pad(x, (0, -x.shape[1] % size)).view(len(x), -1, size)
    largest = groups.abs().amax(-1, keepdim=True).clamp(min=torch.finfo(torch.float32).smallest_normal)
    if activations == "int8":
        scale = largest / INT8_MAX
        rounded = (groups / scale).round() * scale
    else:
        scale = largest / FP8_MAX
        rounded = (groups / scale).clamp(-FP8_MAX, FP8_MAX).to(torch.float8_e4m3fn).float() * scale
    return rounded.flatten(1)[:, : x.shape[1]]


def _shared(x: Tensor, source: str, spec: LayerSpec) -> Tensor:
    """[inputs of the consumers] -> [outputs of the source]. Where query heads share a value head, take the largest."""
    if source != "attn.v":
        return x
    return by_value_head(x, spec).amax(1).flatten()
