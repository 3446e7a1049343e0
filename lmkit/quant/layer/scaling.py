"""Scales between an operation and the linears after it. The operation's outputs are divided by s, and the input
columns of the linears are multiplied by s. Nothing changes in exact arithmetic. The steps choose s."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from lmkit.layers.linear import Weights
from lmkit.models.layer_spec import LayerSpec
from lmkit.quant.layer.layer import CalibratedLayer
from lmkit.quant.layer.work import LayerWork
from lmkit.quant.report.layer_report import ScaleReport

IDENTITY = "identity"  # the candidate that scales nothing
LIMIT = 1e4  # largest ratio between s and its typical value, either way


@dataclass(frozen=True)
class Candidate:
    name: str  # "identity", "x^0.35", "duo 0.35"
    scale: Tensor  # float32, one for each output of the source


@dataclass(frozen=True)
class ScaleSearch:
    """`losses`: summed squared error of the block's output by candidate; identity is the first."""

    source: str
    consumers: tuple[str, ...]
    best: Candidate
    losses: dict[str, float]

    def report(self) -> ScaleReport:
        return ScaleReport(
            source=self.source,
            consumers=self.consumers,
            chosen=self.best.name,
            loss=self.losses[self.best.name],
            identity_loss=self.losses[IDENTITY],
            losses={name: loss if math.isfinite(loss) else None for name, loss in self.losses.items()},
        )


def record(work: LayerWork, searches: list[ScaleSearch]) -> None:
    """Record for the report and for later steps which scales a transform has folded into the layer."""
    spec = work.calibrated.layer.spec
    work.scales += [found.report() for found in searches]
    work.columns |= {role: expand(found.best.scale, role, spec) for found in searches for role in found.consumers}
    work.rows |= {found.source: 1 / found.best.scale for found in searches if found.source in spec.linears}


def fold_each_pair(
    calibrated: CalibratedLayer, choose: Callable[[str, tuple[str, ...]], ScaleSearch]
) -> list[ScaleSearch]:
    """Fold `choose(source, consumers)` for each pair of LayerSpec.smooth that is rounded and has statistics, in order.
    Each choice sees the layer with the earlier scales folded in."""
    searches = []
    for source, consumers in calibrated.layer.spec.smooth:
        if set(consumers) & set(calibrated.schemes) and calibrated.has_statistics(consumers[0]):
            searches.append(choose(source, consumers))
            fold(calibrated, searches[-1])
    return searches


def normalized(s: Tensor, live: Tensor) -> Tensor:
    """s over live channels, divided by the geometric mean of its extremes and bounded; 1 elsewhere."""
    smallest, largest = s[live].clamp_min(1e-30).min(), s[live].max()
    s = s / (smallest.double() * largest.double()).sqrt().float()
    s = torch.where(live, s, 1.0).clamp(1 / LIMIT, LIMIT)
    return torch.where(s.isfinite(), s, 1.0)


def storable(calibrated: CalibratedLayer, source: str, candidates: list[Candidate]) -> list[Candidate]:
    """The candidates, adjusted so that a norm divided by s is stored without rounding. The first, identity, stays."""
    if not source.startswith("norm."):
        return candidates
    norm, read_back = calibrated.weight(source), functools.partial(calibrated.read_back, source)
    return [
        candidates[0],
        *(Candidate(c.name, representable(c.scale, norm, read_back)) for c in candidates[1:]),
    ]


def fold(calibrated: CalibratedLayer, found: ScaleSearch) -> None:
    """Fold the scale that was found into the layer's weights and divide the statistics of the inputs by it."""
    if found.best.name != IDENTITY:
        apply(calibrated.layer.weights, found.source, found.consumers, found.best.scale, calibrated.layer.spec)
        divide_inputs(calibrated, found)


def expand(s: Tensor, consumer: str, spec: LayerSpec) -> Tensor:
    """[outputs of the source] -> [inputs of the consumer]. Query heads that share a value head share its s."""
    if consumer != "attn.o":
        return s
    heads = s.view(spec.num_kv_heads, 1, -1)
    return heads.expand(-1, spec.num_heads // spec.num_kv_heads, -1).reshape(-1)


def by_value_head(x: Tensor, spec: LayerSpec) -> Tensor:
    """[inputs of attn.o] -> [value heads, query heads that share one, channels of a head]."""
    return x.view(spec.num_kv_heads, spec.num_heads // spec.num_kv_heads, -1)


def representable(s: Tensor, norm: Tensor, read_back: Callable[[Tensor], Tensor]) -> Tensor:
    """The nearest s for which norm / s is stored without rounding error."""
    divided = read_back(norm / s)
    exact = norm / divided
    return torch.where(exact.isfinite() & (exact > 0), exact, 1.0)


def apply(weights: Weights, source: str, consumers: tuple[str, ...], s: Tensor, spec: LayerSpec) -> None:
    """Fold s [outputs of the source] into float32 weights. The layer's output changes by rounding errors only."""
    weights[source] = _divide_rows(weights[source], s)
    bias = source + ".bias"
    if bias in weights:
        weights[bias] = _divide_rows(weights[bias], s)
    for role in consumers:
        weight = weights[role]
        assert isinstance(weight, Tensor)
        weights[role] = weight * expand(s, role, spec)


def divide_inputs(calibrated: CalibratedLayer, found: ScaleSearch) -> None:
    """Divide the statistics of the consumers' inputs, so that they stay consistent with the weights. Each expert has a
    record of its own."""
    spec = calibrated.layer.spec
    for reader in dict.fromkeys(spec.input_of[role] for role in found.consumers):
        if reader in calibrated.inputs:
            calibrated.inputs[reader].divide(expand(found.best.scale, reader, spec))


def _divide_rows(weight: object, s: Tensor) -> Tensor:
    assert isinstance(weight, Tensor)
    return weight / (s if weight.ndim == 1 else s[:, None])
