"""AWQ clipping, asymmetric: narrower ranges give finer steps, at the cost of the few weights that saturate.

The lower and the upper end are chosen for each output row and group of inputs. They minimise the squared error that the
group adds to the output over all calibration tokens, sum_t ((w^ - w) . x_t)^2 = d^T (X^T X) d. The ends are searched in
turn, so the error never rises. The search starts from no clipping, and no clipping wins ties. The first time, an end is
tried at every second place of the grid, and at both places beside the best of them; later, beside the best alone.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, ClassVar

import torch
from msgspec import Meta
from torch import Tensor

from lmkit.codes import stepped
from lmkit.formats.names import Activations
from lmkit.models.roles import QKV
from lmkit.option import Note
from lmkit.qtensor import PIECE, QuantScheme, plain_grid
from lmkit.quant.layer.grid import Shrink, round_to_nearest
from lmkit.quant.layer.layer import CalibratedLayer
from lmkit.quant.layer.work import LayerWork
from lmkit.quant.report.layer_report import ClipReport
from lmkit.quant.steps.base import LayerCost, Speed, Stage, Step

ROUNDS = 2  # of lower end, then upper end; a third changes next to nothing
SCORES = ("attn.q", "attn.k")  # only products of their outputs count, and this error does not see products


class AwqClip(Step, frozen=True, tag="awq_clip"):
    """Narrow the range of each group where this lowers the output error."""

    stage: ClassVar = Stage.CLIP

    grid: Annotated[int, Meta(ge=1, le=1000), Note("Steps from no clipping to `max_shrink`, at each end.")] = 10
    max_shrink: Annotated[float, Meta(gt=0, lt=1), Note("The largest share of a range that is cut off.")] = 0.5

    def refuses(self, scheme: QuantScheme, activations: Activations) -> str | None:
        return self.needs_groups(scheme)

    def apply(self, work: LayerWork) -> None:
        work.clips = {role: found.report() for role, found in clip_layer(work.calibrated, self).items()}

    def seconds(self, cost: LayerCost, speed: Speed) -> float:
        trials = (2 * ROUNDS * 2 + self.grid) * cost.layer.num_weights
        return trials * (2.0 * cost.group_size / speed.short + 1 / speed.rounding)

    def working_numbers(self, cost: LayerCost) -> int:
        return cost.search_numbers + 2 * cost.largest


@dataclass(frozen=True)
class ClipSearch:
    """`loss` [out, groups] is the error with `shrink`, `unclipped` the error without it."""

    shrink: Shrink
    loss: Tensor
    unclipped: Tensor

    @property
    def clipped_share(self) -> float:
        """The share of groups whose range is narrower than their weights."""
        return float((self.loss < self.unclipped).float().mean())

    def report(self) -> ClipReport:
        return ClipReport(
            loss=float(self.loss.sum()), unclipped_loss=float(self.unclipped.sum()), clipped_share=self.clipped_share
        )


def clip_layer(calibrated: CalibratedLayer, step: AwqClip) -> dict[str, ClipSearch]:
    """Choose `calibrated.shrinks`, by role. The shrinks of q and k are kept only if they improve the attention's
    output."""
    searches = {
        role: search_shrink(
            calibrated.weight(role),
            calibrated.input(role).gram,
            scheme,
            step.grid,
            step.max_shrink,
            calibrated.layer.product_dtype,
            calibrated.largest(role),
        )
        for role, scheme in calibrated.schemes.items()
        if calibrated.has_statistics(role)
    }
    shrinks = {role: found.shrink for role, found in searches.items()}
    without = {role: shrink for role, shrink in shrinks.items() if role not in SCORES}
    if len(without) < len(shrinks) and _attention_error(calibrated, without) <= _attention_error(calibrated, shrinks):
        shrinks = without
    calibrated.shrinks = shrinks
    return {role: found for role, found in searches.items() if role in shrinks}


def _attention_error(calibrated: CalibratedLayer, shrinks: dict[str, Shrink]) -> float:
    """Summed squared error of the attention's output with q, k and v rounded with `shrinks`."""
    exact = calibrated.block_output("norm.attn")
    weights = calibrated.layer.weights
    originals = {role: calibrated.weight(role) for role in QKV if role in calibrated.schemes}
    for role, weight in originals.items():
        largest = calibrated.largest(role, weight)
        weights[role] = round_to_nearest(weight, calibrated.schemes[role], shrinks.get(role), largest)
    error = calibrated.block_output("norm.attn") - exact
    weights.update(originals)
    return float(error.square().sum(dtype=torch.float64))


def search_shrink(
    weight: Tensor,
    gram: Tensor,
    scheme: QuantScheme,
    grid: int,
    max_shrink: float,
    dtype: torch.dtype = torch.float32,
    largest: Tensor | None = None,
) -> ClipSearch:
    """Search the ends of each group's range. weight float32 [out, in]; gram [groups, group_size, group_size],
    X_g^T X_g of each group's inputs. Products are of `dtype`. `largest` is as in `quantize`."""
    gram, step = gram.to(dtype), max(1, PIECE // weight.shape[1])
    largest = weight.abs().max() if largest is None else largest
    found = [_search(Groups.of(part, gram, scheme, largest), grid, max_shrink) for part in weight.split(step)]
    lower, upper, loss, unclipped = (torch.cat(part, 1).T.contiguous() for part in zip(*found, strict=True))
    return ClipSearch((lower, upper), loss, unclipped)


def _search(groups: Groups, grid: int, max_shrink: float) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """(lower, upper, loss, loss without clipping), each [groups, out]."""
    whole = torch.ones_like(groups.low)
    best = whole, whole
    unclipped = loss = groups.losses(best)
    ends = [(True, True)] if groups.scheme.symmetric else [(True, False), (False, True)] * ROUNDS
    top = stepped(groups.scheme.codes).stretch
    step = (top - 1 + max_shrink) / grid
    for turn, moves in enumerate(ends):
        for place in range(2 if top == 1 else 0, grid + 1, 2) if turn < 2 else ():
            best, loss = _better(groups, moves, whole * top - step * place, best, loss)
        found = ((top - best[moves.index(True)]) / step).round()
        for beside in (-1, 1):
            factor = top - step * (found + beside).clamp(0, grid)
            best, loss = _better(groups, moves, factor, best, loss)
    return *best, loss, unclipped


def _better(
    groups: Groups, moves: tuple[bool, bool], factor: Tensor, best: Shrink, loss: Tensor
) -> tuple[Shrink, Tensor]:
    """`best` with the ends that move at `factor` where this lowers `loss`, and the loss. All are [groups, out]."""
    lower, upper = (factor if move else end for move, end in zip(moves, best, strict=True))
    trial_loss = groups.losses((lower, upper))
    better = trial_loss < loss
    best = torch.where(better, lower, best[0]), torch.where(better, upper, best[1])
    return best, torch.where(better, trial_loss, loss)


@dataclass(frozen=True)
class Groups:
    """A weight in its groups of inputs.

    `values` float32 [groups, out, group_size]; their ranges `low` <= 0 and `high` >= 0 [groups, out]; `gram`
    [groups, group_size, group_size] of the inputs, in the numbers that are multiplied.
    """

    values: Tensor
    low: Tensor
    high: Tensor
    gram: Tensor
    scheme: QuantScheme
    largest: Tensor | None = None  # as in `quantize`

    @classmethod
    def of(cls, weight: Tensor, gram: Tensor, scheme: QuantScheme, largest: Tensor | None = None) -> Groups:
        values = weight.view(weight.shape[0], -1, scheme.group_size).transpose(0, 1).contiguous()
        return cls(values, values.amin(-1).clamp(max=0), values.amax(-1).clamp(min=0), gram, scheme, largest)

    def losses(self, shrink: Shrink) -> Tensor:
        """[groups, out]: d^T (X_g^T X_g) d, where d is the change by rounding with `shrink` [groups, out]."""
        scales, zeros = plain_grid(self.low * shrink[0], self.high * shrink[1], self.scheme, self.largest)
        scale, zero = scales.unsqueeze(-1), zeros.unsqueeze(-1)
        steps = stepped(self.scheme.codes).nearest_steps(self.values / scale, zero)
        error = steps.mul_(scale).sub_(self.values)
        return (error.to(self.gram.dtype) @ self.gram).mul(error).sum(-1).clamp_min_(0)
