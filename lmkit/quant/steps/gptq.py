"""GPTQ (arXiv 2210.17323): columns are rounded one after the other. The columns that are still to come compensate the
error of a rounded column in the output, as far as the inputs are correlated.

The grid is fixed beforehand, from the weight and its clipping. So columns may be visited in any order while codes stay
where they are, and the file needs no index of groups. Linears that read the same input are rounded together, as rows of
one weight.

The order of the columns turns the error tr((W^ - W) H (W^ - W)^T) into a sum of squares: with H = R R^T, R upper
triangular, it is |(W^ - W) R|^2. Each column of the product has one column of W^ that no earlier one has, so this
column is rounded to make up for the earlier ones. This gives the codes of the paper, and H is never inverted.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Annotated, ClassVar, Literal, Self

import msgspec
import torch
from msgspec import Meta
from torch import Tensor

from lmkit.codes import stepped
from lmkit.formats.names import Activations
from lmkit.layers.linear import in_full
from lmkit.log import get_logger
from lmkit.models.spec import ModelSpec
from lmkit.option import Note
from lmkit.qtensor import QTensor, QuantScheme, dequantize
from lmkit.quant.layer.curvature import MAX_TOKENS, block_size, weights_of_outputs
from lmkit.quant.layer.descent import descend
from lmkit.quant.layer.layer import CalibratedLayer
from lmkit.quant.layer.moments import HELD_OUT, Moments, collect, squared
from lmkit.quant.layer.products import SHORT_TOKENS, times
from lmkit.quant.layer.refine import by_halves, group_size, refine, scales_and_zeros
from lmkit.quant.layer.routed import MIN_TOKENS
from lmkit.quant.layer.work import LayerWork, Rounding
from lmkit.quant.split import is_split
from lmkit.quant.steps.base import LayerCost, Speed, Stage, Step

log = get_logger(__name__)

MIN_DAMPING, MAX_DAMPING = 0.01, 1.0
AUTO_LOSS = 2
# For the estimate of time: products with the held-out inputs, the time of a weight in a round in roundings to nearest,
# and calls of torch for a column.
JUDGED, ROUNDING, COLUMN_CALLS = 4, 13, 15
# The same for the rounds that weigh outputs: passes of the sweep, and the time of a weight in a round.
SWEEP, DESCENT = 4, 12


class Gptq(Step, frozen=True, tag="gptq"):
    """Round column by column. The columns that follow compensate each error."""

    stage: ClassVar = Stage.ROUNDER
    by_parts: ClassVar = True

    order: Annotated[Literal["activation", "gar", "natural"], Note("Of the columns. Groups stay as they are.")] = (
        "activation"
    )
    damping: Annotated[
        Annotated[float, Meta(gt=0, le=1)] | Literal["auto"],
        Note("Share of the Hessian's mean diagonal that is added to it. auto: more for few tokens."),
    ] = "auto"
    targets: Annotated[
        Literal["exact", "same"], Note("The outputs to reach: the original layer's, or this layer's own.")
    ] = "exact"
    strength: Annotated[
        float, Meta(ge=0, le=1), Note("Share of the way from this layer's own outputs to the exact ones.")
    ] = 1.0
    sequential: Annotated[
        bool, Note("Round attn.o and mlp.down on the outputs of the rounded linears before them.")
    ] = True
    refine: Annotated[
        int, Meta(ge=0, le=100), Note("Rounds of coordinate descent over scales and codes afterwards.")
    ] = 2
    loss: Annotated[
        Annotated[int, Meta(ge=0, le=100)] | Literal["auto"],
        Note("Rounds after these that weigh errors by the curvature of the model's loss. auto: 2 where that is known."),
    ] = 0

    @property
    def needs_exact(self) -> bool:
        return self.targets == "exact" and self.strength > 0

    @property
    def loss_rounds(self) -> int:
        return AUTO_LOSS if self.loss == "auto" else self.loss

    @property
    def needs_curvature(self) -> bool:
        return self.loss_rounds > 0

    def refuses(self, scheme: QuantScheme, activations: Activations) -> str | None:
        return self.needs_steps(scheme)

    def refuses_model(self, spec: ModelSpec) -> str | None:
        if not self.needs_curvature:
            return None
        if spec.is_recurrent:  # for each token, gradients keep a state that is larger than all else
            return "gptq: loss does not go with linear attention"
        if any(is_split(layer) for layer in spec.kinds):
            return "gptq: loss does not go with experts that are held one at a time"
        return self.needs_states_alone(spec, "gptq: loss")

    def for_model(self, spec: ModelSpec) -> Self:
        if self.loss != "auto" or (reason := self.refuses_model(spec)) is None:
            return self
        log.warning("%s: it is left out", reason)
        return msgspec.structs.replace(self, loss=0)

    def apply(self, work: LayerWork) -> None:
        round_layer(work, self)

    def seconds(self, cost: LayerCost, speed: Speed) -> float:
        passes = (cost.num_streams - 1) + (0 if self.sequential else cost.num_streams) + JUDGED / HELD_OUT
        rounds, short, full, numbers, columns = 1 + self.refine, 0.0, 0.0, 0.0, 0
        for rows, width in cost.readers:
            short += cost.num_tokens * width**2  # the Hessian is symmetric
            numbers += cost.num_tokens * (2 * width + width**2 / 2 / SHORT_TOKENS) + ROUNDING * rounds * rows * width
            if self.needs_exact:
                shift = 2.0 * cost.num_tokens * width * min(width, 2 * rows)
                short, full = short + shift, full + 2.0 * rows * width**2
            short += (1 + 3 * self.refine) * rows * width**2
            full += width**3 / 3
            columns += rounds * width
            short += self.loss_rounds * rows * width * (5 * width + 2 * block_size(rows))
            numbers += self.loss_rounds * DESCENT * rows * width
        products = short / speed.short + full / speed.full
        rest = numbers / speed.rounding + columns * COLUMN_CALLS / speed.calls
        return cost.forward_seconds(passes * cost.num_tokens, speed.short, speed) + products + rest

    def seconds_before(self, cost: LayerCost, speed: Speed) -> float:
        if not self.needs_curvature:
            return 0.0
        num_tokens = min(cost.num_tokens, MAX_TOKENS)
        squares = sum(num_tokens * rows * block_size(rows) for rows, _ in cost.readers)
        return cost.forward_seconds(SWEEP * num_tokens, speed.short, speed) + squares / speed.short

    def seconds_of_head(self, spec: ModelSpec, num_tokens: int, speed: Speed) -> float:
        products = 3 * 2.0 * min(num_tokens, MAX_TOKENS) * spec.vocab_size * spec.hidden_size
        return products / speed.short if self.needs_curvature else 0.0

    def whole_numbers(self, spec: ModelSpec, group_size: int) -> int:
        return spec.vocab_size * spec.hidden_size if self.needs_curvature else 0

    def working_numbers(self, cost: LayerCost) -> int:
        # The moments of a part's inputs, the largest one's factor while it is computed, and the columns in work.
        # Without `sequential`, every input's moments are in memory at once.
        moments = (max if self.sequential else sum)(sum(2 * width**2 for width in part) for part in cost.part_widths)
        rounding = cost.batch_tokens * cost.token_width + moments + 4 * max(cost.input_widths) ** 2 + 6 * cost.largest
        if not self.needs_curvature:
            return rounding
        # Before: a layer's curvature, and what autograd keeps of a batch. Later: a block, and a few times its weights.
        curvature = sum(rows * block_size(rows) for rows, _ in cost.readers)
        sweep = curvature + cost.layer.num_weights + 3 * cost.batch_tokens * cost.token_width
        block = max(6 * width * block_size(rows) + 3 * block_size(rows) ** 2 for rows, width in cost.readers)
        return max(sweep, rounding + curvature + block)


def round_layer(work: LayerWork, step: Gptq) -> None:
    """Round the linears in the order of the layer. The rounded weights are put into the layer, so that the linears
    after them are rounded on their outputs."""
    calibrated = work.calibrated
    stages = _stages(calibrated)
    early: dict[str, Moments] = {}
    if not step.sequential:
        for stage in stages:
            early |= collect(*work.passes, _rows(calibrated, stage), work.columns)
        work.start_passes()
    for stage in stages:
        moments = early or collect(*work.passes, _rows(calibrated, stage), work.columns)
        found: dict[str, Rounding] = {}
        for group in stage:
            found |= _round_group(work, step, group, moments[group[0]])
        work.store(found)


def _rows(calibrated: CalibratedLayer, stage: list[tuple[str, ...]]) -> dict[str, Tensor]:
    """The weights of each group of a stage as rows of one weight, by the group's first role."""
    return {group[0]: torch.cat([calibrated.weight(role) for role in group]) for group in stage}


def _stages(calibrated: CalibratedLayer) -> list[list[tuple[str, ...]]]:
    """The stages of a layer in order: q k v; o; all gates and ups; all downs.

    A stage lists groups of roles. The roles of a group read one input with one grid.
    """
    layer = calibrated.layer
    input_of = layer.spec.input_of
    groups: dict[tuple[str, QuantScheme], list[str]] = {}
    for role, scheme in calibrated.schemes.items():
        groups.setdefault((input_of[role], scheme), []).append(role)
    stages: dict[str, list[tuple[str, ...]]] = {}
    for group in groups.values():
        depth = {"q": "q", "k": "q", "v": "q", "up": "gate"}
        last = group[0].split(".")[-1]
        stages.setdefault(depth.get(last, last), []).append(tuple(group))
    return list(stages.values())


def _round_group(work: LayerWork, step: Gptq, group: tuple[str, ...], moments: Moments) -> dict[str, Rounding]:
    """Round linears that read one input, as rows of one weight."""
    calibrated = work.calibrated
    weights, size = [calibrated.weight(role) for role in group], calibrated.schemes[group[0]].group_size
    dtype = calibrated.layer.product_dtype
    plain = [calibrated.rounded(role) for role in group]
    factor = None
    if moments.num_tokens < MIN_TOKENS:
        reason = f"its input saw {moments.num_tokens} calibration tokens, fewer than {MIN_TOKENS}"
    else:
        reason = "the Hessian of its input has no Cholesky factor, even damped"
        enough = enough_damping(len(moments.hessian), moments.num_tokens)
        damping = enough if step.damping == "auto" else step.damping
        factor = factorize(moments.hessian, column_order(moments.hessian, step.order, size), damping)
    if factor is None:
        return {role: Rounding(q, "rtn", reason) for role, q in zip(group, plain, strict=True)}
    weight, shift = torch.cat(weights), None
    if moments.shift is not None and step.needs_exact:
        projected = moments.weight is not None
        shift = step.strength * (moments.shift if projected else times(weight, moments.shift.T, dtype))
    rounded = round_columns(weight, _stack(plain), factor, dtype, shift)
    moments.hessian.diagonal().add_(factor.added)
    rounded = refine(weight, rounded, moments.hessian, step.refine, dtype, shift)
    sizes = [len(w) for w in weights]
    found = {
        role: _judge(w, q, p, moments, factor.damping, dtype)
        for role, w, q, p in zip(group, weights, _split(rounded, sizes), plain, strict=True)
    }
    # The judge counts all outputs alike, so it compares what has been made without the curvature.
    blocks = weights_of_outputs(work.curvature, calibrated.layer.spec, group, work.rows)
    weighted = descend(weight, rounded, moments.hessian, blocks, step.loss_rounds, dtype, shift)
    return {
        role: replace(rounding, weight=q) if rounding.method == "gptq" else rounding
        for (role, rounding), q in zip(found.items(), _split(weighted, sizes), strict=True)
    }


def _judge(
    weight: Tensor, rounded: QTensor, plain: QTensor, moments: Moments, damping: float, dtype: torch.dtype
) -> Rounding:
    """`rounded`, or `plain` if it comes nearer to the original linear's output for the held-out rows."""
    held, exact = in_full(moments.held), in_full(moments.held_exact)
    signal = squared(times(exact, weight, dtype))
    if signal <= 0:
        return Rounding(rounded, "gptq", damping=damping)
    missing = times(exact - held, weight, dtype)
    if moments.held_lack is not None:
        missing[: len(moments.held)] += moments.held_lack
    error, plain_error = (
        squared(times(held, dequantize(q) - weight, dtype) - missing) / signal for q in (rounded, plain)
    )
    if error <= plain_error:
        return Rounding(rounded, "gptq", None, damping, error, plain_error)
    return Rounding(plain, "rtn", "plain rounding errs less on held-out rows", damping, error, plain_error)


def _stack(parts: list[QTensor]) -> QTensor:
    """The weights as one; those that read one input share a factor (CalibratedLayer.largest)."""
    return QTensor(
        torch.cat([q.codes for q in parts]),
        torch.cat([q.scales for q in parts]),
        torch.cat([q.zeros for q in parts]),
        parts[0].scheme,
        factor=parts[0].factor,
    )


def _split(q: QTensor, sizes: list[int]) -> list[QTensor]:
    """The rows of `q` in pieces; the inverse of `_stack`."""
    zeros = q.zeros.split(sizes) if q.zeros.numel() else [q.zeros] * len(sizes)
    parts = zip(q.codes.split(sizes), q.scales.split(sizes), zeros, strict=True)
    return [replace(q, codes=c.contiguous(), scales=s.contiguous(), zeros=z.contiguous()) for c, s, z in parts]


@dataclass(frozen=True)
class Factor:
    """`lower` float32 [in, in] with lower lower^T = H + `added` to the diagonal, the columns in the reverse of `order`,
    int64 [in]. `added` is the share `damping` of H's mean diagonal."""

    lower: Tensor
    order: Tensor
    damping: float
    added: float

    @property
    def feedback(self) -> Tensor:
        """float32 [in, in], unit upper triangular, the columns in `order`: entry (i, j) is the share of the error of
        column i that column j makes up for."""
        return (self.lower / self.lower.diagonal()).flip(0, 1)

    def pull(self, shift: Tensor) -> Tensor:
        """What is added to the wanted columns, float32 [in, out], in `order`, for a `shift` [out, in] of the target.

        The error is |(W^ - W) R - S R^-T|^2 for the shift S, so each column of S R^-T is a change that is wanted of it.
        """
        solved = torch.linalg.solve_triangular(self.lower, shift[:, self.order.flip(0)].T, upper=False)
        wanted: Tensor = (solved / self.lower.diagonal()[:, None]).flip(0)
        return wanted


def enough_damping(in_features: int, num_tokens: int) -> float:
    """The share of the Hessian's mean diagonal that makes up for few tokens: a third of the inputs to each token."""
    return min(MAX_DAMPING, max(MIN_DAMPING, in_features / (3 * num_tokens)))


def factorize(hessian: Tensor, order: Tensor, damping: float) -> Factor | None:
    """The factor of `hessian` float32 [in, in]. Damping grows tenfold, up to MAX_DAMPING, until a factor exists.

    Returns None if there is none, or if the input has only zeros. A dead input has only zeros in H and is rounded by
    itself.
    """
    diagonal = hessian.diagonal()
    mean = diagonal[diagonal > 0].mean()
    if not bool(hessian.isfinite().all()) or not bool(mean > 0):
        return None
    reverse = order.flip(0)
    reversed_hessian = hessian[reverse][:, reverse]
    while damping <= MAX_DAMPING:
        damped = reversed_hessian.clone()
        damped.diagonal().add_(damping * mean)
        lower, failed = torch.linalg.cholesky_ex(damped)
        if not failed and bool(lower.isfinite().all()):
            return Factor(lower, order, damping, float(damping * mean))
        damping *= 10
    return None


def column_order(hessian: Tensor, kind: str, group_size: int) -> Tensor:
    """The order of the columns, int64 [in].

    "activation": columns with the largest inputs first. "gar": the same within groups that stay together. "natural":
    as they stand.
    """
    diagonal = hessian.diagonal()
    if kind == "natural":
        return torch.arange(len(diagonal), device=diagonal.device)
    if kind == "activation":
        return diagonal.argsort(descending=True, stable=True)
    if group_size == -1:
        group_size = len(diagonal)
    groups = diagonal.view(-1, group_size)
    first = groups.amax(1).argsort(descending=True, stable=True)
    within = groups.argsort(dim=1, descending=True, stable=True)
    return (first[:, None] * group_size + within[first]).flatten()


def round_columns(
    weight: Tensor,
    grid: QTensor,
    factor: Factor,
    dtype: torch.dtype = torch.float32,
    shift: Tensor | None = None,
) -> QTensor:
    """Codes for `weight` W float32 [out, in] on the scales and zeros of `grid`. The codes of `grid` do not matter.
    Products are of `dtype`.

    With a `shift` S [out, in], as Moments have it, the target is W + S H^-1 in place of W. Its outputs for the inputs
    that the linear will see come nearest to those of the original model.
    """
    kind, order, feedback = stepped(grid.scheme.codes), factor.order, factor.feedback
    group_of = order // group_size(grid)
    exact = weight.T[order].contiguous()  # [in, out], so that a column of the weight lies in one piece
    wanted = exact.clone() if shift is None else exact + factor.pull(shift)
    scales, zeros = (part.T[group_of] for part in scales_and_zeros(grid))
    steps, errors = torch.empty_like(wanted), torch.empty_like(wanted)

    def round_some(begin: int, end: int) -> None:
        for i in range(begin, end):
            steps[i] = kind.nearest_steps(wanted[i] / scales[i], zeros[i])
            errors[i] = steps[i] * scales[i] - exact[i]
            wanted[i + 1 : end].addr_(feedback[i, i + 1 : end], errors[i], alpha=-1)

    def pass_on(begin: int, middle: int, end: int) -> None:
        wanted[middle:end] -= times(feedback[begin:middle, middle:end].T, errors[begin:middle].T, dtype)

    by_halves(0, len(order), round_some, pass_on)
    codes = torch.empty(wanted.shape, dtype=kind.element, device=wanted.device)
    codes[order] = kind.of_steps(steps, zeros)
    return replace(grid, codes=codes.T.contiguous())
