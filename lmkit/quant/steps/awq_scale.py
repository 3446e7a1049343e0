"""AWQ scaling (arXiv 2306.00978): input columns of a linear times s, the operation before it divided by s.

Nothing changes in exact arithmetic, but a column with large activations gets finer steps of the 4-bit grid. For each
pair of models.roles.smooth, s is the candidate whose rounded weights change the output of the block least. Candidates:
s = 1 (always, and it wins ties), s = x_mean^r, and s = x_mean^r / w_mean^(1-r) ("duo"), r over a grid in [0, 1].
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from lmkit.layers.linear import Weights
from lmkit.models.layer_spec import LayerSpec
from lmkit.qtensor import dequantize
from lmkit.quant.layer.layer import CalibratedLayer
from lmkit.quant.recipe import AwqScale

IDENTITY = "identity"  # the candidate that scales nothing
LIMIT = 1e4  # of the ratio between s and its typical value, either way


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


def scale_layer(calibrated: CalibratedLayer, step: AwqScale) -> list[ScaleSearch]:
    """Search and fold s for each pair, in the order of SMOOTH; each search sees the layer as the last one left it."""
    layer, searches = calibrated.layer, []
    for source, consumers in layer.spec.smooth:
        if not set(consumers) & set(calibrated.schemes) or not calibrated.has_statistics(consumers[0]):
            continue
        candidates = pair_candidates(calibrated, source, consumers, step)
        found = search(calibrated, source, consumers, candidates)
        if found.losses[found.best.name] > (1 - step.min_gain) * found.losses[IDENTITY]:
            found = replace(found, best=candidates[0])
        searches.append(found)
        fold(calibrated, found)
    return searches


def pair_candidates(
    calibrated: CalibratedLayer, source: str, consumers: tuple[str, ...], step: AwqScale
) -> list[Candidate]:
    """Candidates for one pair, adjusted so that a norm divided by s is stored without rounding."""
    spec = calibrated.layer.spec
    weights = [calibrated.weight(role) for role in consumers if role in calibrated.schemes]
    x_mean = reduce(calibrated.input(consumers[0]).abs_mean, source, spec)
    w_mean = reduce(weight_means(weights, calibrated.input(consumers[0]).group_size), source, spec)
    candidates = make_candidates(x_mean, w_mean, step.grid, step.duo)
    return storable(calibrated, source, candidates)


def storable(calibrated: CalibratedLayer, source: str, candidates: list[Candidate]) -> list[Candidate]:
    """The candidates, all but identity, the first, adjusted so that a norm divided by s is stored without rounding."""
    if not source.startswith("norm."):
        return candidates
    norm, read_back = calibrated.weight(source), functools.partial(calibrated.read_back, source)
    return [
        candidates[0],
        *(Candidate(c.name, representable(c.scale, norm, read_back)) for c in candidates[1:]),
    ]


def fold(calibrated: CalibratedLayer, found: ScaleSearch) -> None:
    """Put the scale that was found into the layer's weights and take it out of the statistics of its inputs."""
    if found.best.name != IDENTITY:
        apply(calibrated.layer.weights, found.source, found.consumers, found.best.scale, calibrated.layer.spec)
        divide_inputs(calibrated, found)


def search(
    calibrated: CalibratedLayer, source: str, consumers: tuple[str, ...], candidates: list[Candidate]
) -> ScaleSearch:
    """Compare candidates on the output of the block, the consumers' weights rounded as they would be stored.

    A candidate whose loss is not finite loses; identity, the first, wins ties. The layer's weights end as they were.
    """
    layer = calibrated.layer
    originals = {role: calibrated.weight(role) for role in consumers if role in calibrated.schemes}
    reference = calibrated.block_output(source)
    losses: dict[str, float] = {}
    for candidate in candidates:
        for role, weight in originals.items():
            s = expand(candidate.scale, role, layer.spec)
            layer.weights[role] = dequantize(calibrated.rounded(role, weight * s)) / s
        error = calibrated.block_output(source) - reference
        losses[candidate.name] = float(error.square().sum(dtype=torch.float64))
    layer.weights.update(originals)
    finite = [c for c in candidates if math.isfinite(losses[c.name])] or candidates[:1]
    return ScaleSearch(source, consumers, min(finite, key=lambda c: losses[c.name]), losses)


def make_candidates(x_mean: Tensor, w_mean: Tensor, grid: int, duo: str | bool) -> list[Candidate]:
    """x_mean, w_mean float32 [n]: mean |x| over tokens, mean |w| relative to the largest of its group over rows.

    A dead channel (no activation, or no weight) keeps s = 1.
    """
    candidates = [Candidate(IDENTITY, torch.ones_like(x_mean))]
    live = (x_mean > 0) & (w_mean > 0) & x_mean.isfinite() & w_mean.isfinite()
    if not live.any():
        return candidates
    for i in range(1, grid + 1):
        r = i / grid
        if duo in ("both", False):
            candidates.append(Candidate(f"x^{r:.3g}", normalized(x_mean**r, live)))
        if duo in ("both", True):
            r = (i - 1) / max(grid - 1, 1)
            candidates.append(Candidate(f"duo {r:.3g}", normalized(x_mean**r / (w_mean ** (1 - r) + 1e-4), live)))
    return candidates


def normalized(s: Tensor, live: Tensor) -> Tensor:
    """s over live channels divided by the geometric middle of its extremes and bounded; 1 elsewhere."""
    smallest, largest = s[live].clamp_min(1e-30).min(), s[live].max()
    s = s / (smallest.double() * largest.double()).sqrt().float()
    s = torch.where(live, s, 1.0).clamp(1 / LIMIT, LIMIT)
    return torch.where(s.isfinite(), s, 1.0)


def weight_means(weights: list[Tensor], group_size: int) -> Tensor:
    """float32 [in]: mean over all rows of |w| / (the largest |w| of the row's group)."""
    total = torch.zeros(weights[0].shape[1], dtype=torch.float64)
    for weight in weights:
        grouped = weight.abs().view(weight.shape[0], -1, group_size)
        relative = grouped / (grouped.amax(-1, keepdim=True) + 1e-6)
        total += relative.sum(0, dtype=torch.float64).flatten()
    return (total / sum(w.shape[0] for w in weights)).float()


def reduce(x: Tensor, source: str, spec: LayerSpec) -> Tensor:
    """[inputs of the consumers] -> [outputs of the source], by the mean where heads share a value head."""
    if source != "attn.v":
        return x
    return x.view(spec.num_kv_heads, -1, spec.head_dim).mean(1).flatten()


def expand(s: Tensor, consumer: str, spec: LayerSpec) -> Tensor:
    """[outputs of the source] -> [inputs of the consumer]: query heads that share a value head share its s."""
    if consumer != "attn.o":
        return s
    heads = s.view(spec.num_kv_heads, 1, spec.head_dim)
    return heads.expand(-1, spec.num_heads // spec.num_kv_heads, -1).reshape(-1)


def representable(s: Tensor, norm: Tensor, read_back: Callable[[Tensor], Tensor]) -> Tensor:
    """The s nearest to the given one for which norm / s has no rounding error where it is stored."""
    divided = read_back(norm / s)
    exact = norm / divided
    return torch.where(exact.isfinite() & (exact > 0), exact, 1.0)


def apply(weights: Weights, source: str, consumers: tuple[str, ...], s: Tensor, spec: LayerSpec) -> None:
    """Fold s [outputs of the source] into float32 weights: what the layer computes changes by rounding errors only."""
    weights[source] = _divide_rows(weights[source], s)
    bias = source + ".bias"
    if bias in weights:
        weights[bias] = _divide_rows(weights[bias], s)
    for role in consumers:
        weight = weights[role]
        assert isinstance(weight, Tensor)
        weights[role] = weight * expand(s, role, spec)


def divide_inputs(calibrated: CalibratedLayer, found: ScaleSearch) -> None:
    """Keep the records of what the consumers read true to the weights: each expert has one of its own."""
    spec = calibrated.layer.spec
    for reader in dict.fromkeys(spec.input_of[role] for role in found.consumers):
        if reader in calibrated.inputs:
            calibrated.inputs[reader].divide(expand(found.best.scale, reader, spec))


def _divide_rows(weight: object, s: Tensor) -> Tensor:
    assert isinstance(weight, Tensor)
    return weight / (s if weight.ndim == 1 else s[:, None])
