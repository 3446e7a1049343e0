"""AWQ scaling (arXiv 2306.00978): the input columns of a linear are multiplied by s, the operation before it is divided
by s.

Nothing changes in exact arithmetic, but a column with large activations gets finer steps of the 4-bit grid. For each
pair of LayerSpec.smooth, s is the candidate whose rounded weights change the output of the block least. Candidates:
s = 1 (always, and it wins ties), s = x_mean^r, and s = x_mean^r / w_mean^(1-r) ("duo"), with r over a grid in [0, 1].
"""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Annotated, ClassVar, Literal, Self

import msgspec
import torch
from msgspec import Meta
from torch import Tensor

from lmkit.formats.names import Activations
from lmkit.log import get_logger
from lmkit.models.layer_spec import LayerSpec
from lmkit.models.spec import ModelSpec
from lmkit.option import Note
from lmkit.qtensor import QuantScheme, dequantize
from lmkit.quant.layer.grid import round_to_nearest
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

log = get_logger(__name__)

ROUGH = 8  # candidates are compared on one of so many outputs first
ROUGH_TOKENS = 512  # of a sample that is so large that few candidates should be compared on it
MOST = 8  # candidates that are compared on the whole sample, besides identity


class AwqScale(Step, frozen=True, tag="awq_scale"):
    """Move difficulty from weights to the operation before them."""

    stage: ClassVar = Stage.TRANSFORM

    duo: Annotated[
        Literal["both"] | bool,
        Note("Candidates from activations and weights (true), from activations alone (false), or both."),
    ] = "both"
    grid: Annotated[int, Meta(ge=1, le=1000), Note("Candidates of each kind.")] = 20
    tokens: Annotated[int, Meta(ge=16), Note("Tokens of the text on which candidates are compared.")] = 2048
    min_gain: Annotated[float, Meta(ge=0, lt=1), Note("A scale must save this share of the loss without a scale.")] = (
        0.0
    )

    def for_model(self, spec: ModelSpec) -> Self:
        if reason := self.needs_pairs(spec):
            log.warning("%s: it changes nothing", reason)
        return self

    @property
    def sample_tokens(self) -> int:
        return self.tokens

    def with_sample(self, tokens: int) -> Self:
        return msgspec.structs.replace(self, tokens=tokens)

    def refuses(self, scheme: QuantScheme, activations: Activations) -> str | None:
        return self.needs_groups(scheme)

    def apply(self, work: LayerWork) -> None:
        record(work, scale_layer(work.calibrated, self))

    def seconds(self, cost: LayerCost, speed: Speed) -> float:
        candidates = 1 + self.grid * (2 if self.duo == "both" else 1)
        few = cost.sample_tokens < ROUGH_TOKENS
        compared = candidates if few else 3 if self.min_gain else 1 + MOST  # usually, hardly one gains so much
        rough = 0 if few else 2 * candidates / ROUGH
        return cost.search_seconds(speed, 2 * compared + rough, compared + 1)

    def working_numbers(self, cost: LayerCost) -> int:
        return cost.search_numbers + cost.layer.num_weights


def scale_layer(calibrated: CalibratedLayer, step: AwqScale) -> list[ScaleSearch]:
    """Search and fold s for each pair of LayerSpec.smooth."""

    def choose(source: str, consumers: tuple[str, ...]) -> ScaleSearch:
        candidates = pair_candidates(calibrated, source, consumers, step)
        found = search(calibrated, source, consumers, candidates, step.min_gain)
        if found.losses[found.best.name] > (1 - step.min_gain) * found.losses[IDENTITY]:
            return replace(found, best=candidates[0])
        return found

    return fold_each_pair(calibrated, choose)


def pair_candidates(
    calibrated: CalibratedLayer, source: str, consumers: tuple[str, ...], step: AwqScale
) -> list[Candidate]:
    """The candidates for one pair. They are adjusted so that a norm divided by s is stored without rounding."""
    spec = calibrated.layer.spec
    weights = [calibrated.weight(role) for role in consumers if role in calibrated.schemes]
    x_mean = reduce(calibrated.input(consumers[0]).abs_mean, source, spec)
    w_mean = reduce(weight_means(weights, calibrated.input(consumers[0]).group_size), source, spec)
    candidates = make_candidates(x_mean, w_mean, step.grid, step.duo)
    return storable(calibrated, source, candidates)


def search(
    calibrated: CalibratedLayer,
    source: str,
    consumers: tuple[str, ...],
    candidates: list[Candidate],
    min_gain: float = 0.0,
) -> ScaleSearch:
    """Compare candidates on the output of the block, with the consumers' weights rounded as they would be stored.

    If the sample is large, the consumers' own outputs decide first which candidates are compared (`_promising`), and
    the others lose. A candidate also loses if its loss is not finite. Identity comes first and wins ties. The layer's
    weights are restored.
    """
    layer = calibrated.layer
    originals = {role: calibrated.weight(role) for role in consumers if role in calibrated.schemes}
    reference = calibrated.block_output(source)

    def loss(candidate: Candidate) -> float:
        for role, weight in originals.items():
            s = expand(candidate.scale, role, layer.spec)
            layer.weights[role] = dequantize(calibrated.rounded(role, weight * s)).div_(s)
        error = calibrated.block_output(source) - reference
        return float(error.square().sum(dtype=torch.float64))

    compared = candidates
    if len(calibrated.input(consumers[0]).sample) >= ROUGH_TOKENS:
        compared = _promising(calibrated, originals, candidates, min_gain)
    losses = {c.name: math.inf for c in candidates} | {c.name: loss(c) for c in compared}
    layer.weights.update(originals)
    finite = [c for c in candidates if math.isfinite(losses[c.name])] or candidates[:1]
    return ScaleSearch(source, consumers, min(finite, key=lambda c: losses[c.name]), losses)


def _promising(
    calibrated: CalibratedLayer, weights: dict[str, Tensor], candidates: list[Candidate], min_gain: float
) -> list[Candidate]:
    """Identity, and the best candidates that gain at least half of `min_gain` on some outputs of the linears.

    The error of an output is d^T (X^T X) d for the change d of its row, as far as the moments of groups of inputs tell.
    """
    losses = dict.fromkeys((c.name for c in candidates), 0.0)
    for role, weight in weights.items():
        rows, gram = weight[::ROUGH].contiguous(), calibrated.input(role).gram.float()

        def power(change: Tensor, gram: Tensor = gram) -> float:
            grouped = change.view(len(change), len(gram), -1).transpose(0, 1)
            return float((grouped @ gram).mul_(grouped).sum(dtype=torch.float64))

        signal = power(rows)
        for candidate in candidates if signal > 0 else ():
            s = expand(candidate.scale, role, calibrated.layer.spec)
            change = dequantize(round_to_nearest(rows * s, calibrated.schemes[role])).div_(s).sub_(rows)
            losses[candidate.name] += power(change) / signal
    limit = (1 - min_gain / 2) * losses[IDENTITY]
    best = sorted((name for name, loss in losses.items() if loss < limit), key=losses.__getitem__)[:MOST]
    return [c for c in candidates if c.name in (IDENTITY, *best)]


def make_candidates(x_mean: Tensor, w_mean: Tensor, grid: int, duo: str | bool) -> list[Candidate]:
    """The candidates for s. x_mean, w_mean float32 [n]: mean |x| over tokens; mean over rows of |w| relative to the
    largest of its group.

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


def weight_means(weights: list[Tensor], group_size: int) -> Tensor:
    """float32 [in]: mean over all rows of |w| / (the largest |w| of the row's group)."""
    total = weights[0].new_zeros(weights[0].shape[1], dtype=torch.float64)
    for weight in weights:
        grouped = weight.abs().view(weight.shape[0], -1, group_size)
        relative = grouped / (grouped.amax(-1, keepdim=True) + 1e-6)
        total += relative.sum(0, dtype=torch.float64).flatten()
    return (total / sum(w.shape[0] for w in weights)).float()


def reduce(x: Tensor, source: str, spec: LayerSpec) -> Tensor:
    """[inputs of the consumers] -> [outputs of the source]. Where query heads share a value head, take their mean."""
    if source != "attn.v":
        return x
    return by_value_head(x, spec).mean(1).flatten()
