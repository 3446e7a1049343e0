"""GPTQ (arXiv 2210.17323): columns are rounded one after the other. The columns that are still to come compensate the
error of a rounded column in the output, as far as the inputs are correlated.

The grid is fixed beforehand, from the weight and its clipping. So columns may be visited in any order while codes stay
where they are, and the file needs no index of groups. Linears that read the same input are rounded together, as rows of
one weight. Weights are float32. Products of inputs are float64 until they are factorized.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Annotated, ClassVar, Literal

import torch
from msgspec import Meta
from torch import Tensor

from lmkit.formats.parts import Activations
from lmkit.qtensor import QTensor, QuantScheme, dequantize
from lmkit.quant.layer.layer import CalibratedLayer
from lmkit.quant.layer.moments import Moments, collect, squared
from lmkit.quant.layer.routed import MIN_TOKENS
from lmkit.quant.layer.work import LayerWork, Rounding
from lmkit.quant.steps.base import LayerCost, Stage, Step

FEW = 16  # columns that are visited one after the other; their changes are passed on to later columns in products
MAX_DAMPING = 1.0

_SMALLEST_SCALE = torch.finfo(torch.float16).smallest_normal


class Gptq(Step, frozen=True, tag="gptq"):
    """Round column by column. The columns that follow compensate each error."""

    stage: ClassVar = Stage.ROUNDER
    by_parts: ClassVar = True

    order: Literal["activation", "gar", "natural"] = "activation"  # of the columns; groups stay as they are
    damping: Annotated[float, Meta(gt=0, le=1)] = 0.01  # share of the Hessian's mean diagonal, added to it
    targets: Literal["exact", "same"] = "exact"  # reach the original layer's outputs, or this layer's own
    strength: Annotated[float, Meta(ge=0, le=1)] = 1.0  # share of the way from this layer's own outputs to the exact
    sequential: bool = True  # attn.o and mlp.down are rounded on the outputs of the rounded linears before them
    refine: Annotated[int, Meta(ge=0, le=100)] = 2  # rounds of coordinate descent over scales and codes afterwards

    @property
    def needs_exact(self) -> bool:
        return self.targets == "exact" and self.strength > 0

    def refuses(self, scheme: QuantScheme, activations: Activations) -> str | None:
        return self.needs_integers(scheme)

    def apply(self, work: LayerWork) -> None:
        round_layer(work, self)

    def flops(self, cost: LayerCost) -> float:
        moments = sum(width**2 for width in cost.input_widths)
        again = 0.0 if self.sequential else cost.num_streams * cost.forward  # up to mlp.down, then from the beginning
        original = (cost.num_streams - 1) * cost.forward
        return 2.0 * cost.num_tokens * cost.num_streams * moments + again + original

    def working_numbers(self, cost: LayerCost) -> int:
        # The largest input's moments, their factor while it is computed, and the columns in work, all counted in
        # numbers of four bytes. Without `sequential`, every input's moments are in memory at once.
        moments = (max if self.sequential else sum)(4 * width**2 for width in cost.input_widths)
        return cost.batch_tokens * cost.token_width + moments + 8 * max(cost.input_widths) ** 2 + 6 * cost.largest


def round_layer(work: LayerWork, step: Gptq) -> None:
    """Round the linears in the order of the layer. The rounded weights are put into the layer, so that the linears
    behind them are rounded on their outputs."""
    calibrated = work.calibrated
    stages = _stages(calibrated)
    readers = [tuple(group[0] for group in stage) for stage in stages]
    early: dict[str, Moments] = {}
    if not step.sequential:
        for wanted in readers:
            early |= collect(*work.passes, wanted)
        work.start_passes()
    for stage, wanted in zip(stages, readers, strict=True):
        moments = early or collect(*work.passes, wanted)
        found: dict[str, Rounding] = {}
        for group in stage:
            inputs = moments[group[0]]
            if group[0] in work.columns:
                inputs.divide_exact(work.columns[group[0]])
            found |= _round_group(calibrated, step, group, inputs)
        work.store(found)


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


def _round_group(
    calibrated: CalibratedLayer, step: Gptq, group: tuple[str, ...], moments: Moments
) -> dict[str, Rounding]:
    """Round linears that read one input, as rows of one weight."""
    weights, size = [calibrated.weight(role) for role in group], calibrated.schemes[group[0]].group_size
    plain = [calibrated.rounded(role, weight) for role, weight in zip(group, weights, strict=True)]
    factor = None
    if moments.num_tokens < MIN_TOKENS:
        reason = f"its input saw {moments.num_tokens} calibration tokens, fewer than {MIN_TOKENS}"
    else:
        reason = "the Hessian of its input has no Cholesky factor, even damped"
        factor = factorize(moments.hessian, column_order(moments.hessian, step.order, size), step.damping)
    if factor is None:
        return {role: Rounding(q, "rtn", reason) for role, q in zip(group, plain, strict=True)}
    weight = torch.cat(weights)
    if moments.cross is not None and step.targets == "exact":
        weight = regress(weight, moments.cross, moments.hessian, factor.damping, step.strength)
    rounded = round_columns(weight, _stack(plain), factor)
    rounded = refine(weight, rounded, moments.hessian, step.refine)
    parts = _split(rounded, [len(w) for w in weights])
    return {
        role: _judge(w, q, p, moments, factor.damping)
        for role, w, q, p in zip(group, weights, parts, plain, strict=True)
    }


def _judge(weight: Tensor, rounded: QTensor, plain: QTensor, moments: Moments, damping: float) -> Rounding:
    """`rounded`, or `plain` if it comes nearer to the original linear's output for the held-out rows."""
    target = moments.held_exact @ weight.T
    signal = squared(target)
    if signal <= 0:
        return Rounding(rounded, "gptq", damping=damping)
    error, plain_error = (squared(moments.held @ dequantize(q).T - target) / signal for q in (rounded, plain))
    if error <= plain_error:
        return Rounding(rounded, "gptq", None, damping, error, plain_error)
    return Rounding(plain, "rtn", "plain rounding errs less on held-out rows", damping, error, plain_error)


def _stack(parts: list[QTensor]) -> QTensor:
    return QTensor(
        torch.cat([q.codes for q in parts]),
        torch.cat([q.scales for q in parts]),
        torch.cat([q.zeros for q in parts]),
        parts[0].scheme,
    )


def _split(q: QTensor, sizes: list[int]) -> list[QTensor]:
    """The rows of `q` in pieces; the inverse of `_stack`."""
    parts = zip(q.codes.split(sizes), q.scales.split(sizes), q.zeros.split(sizes), strict=True)
    return [
        QTensor(codes.contiguous(), scales.contiguous(), zeros.contiguous(), q.scheme) for codes, scales, zeros in parts
    ]


@dataclass(frozen=True)
class Factor:
    """`upper` float32 [in, in] with upper^T upper = (H + damping * mean(diag H))^-1. The columns are in `order`,
    int64 [in]."""

    upper: Tensor
    order: Tensor
    damping: float


def factorize(hessian: Tensor, order: Tensor, damping: float) -> Factor | None:
    """The factor of `hessian` float64 [in, in]. Damping grows tenfold, up to MAX_DAMPING, until a factor exists.

    Returns None if there is none, or if the input has only zeros. A dead input has only zeros in H and is rounded by
    itself.
    """
    diagonal = hessian.diagonal()
    mean = diagonal[diagonal > 0].mean()
    if not bool(hessian.isfinite().all()) or not bool(mean > 0):
        return None
    ordered = hessian[order][:, order]
    while damping <= MAX_DAMPING:
        damped = ordered.clone()
        damped.diagonal().add_(damping * mean)
        lower, failed = torch.linalg.cholesky_ex(damped)
        if not failed:
            upper, failed = torch.linalg.cholesky_ex(torch.cholesky_inverse(lower), upper=True)
            if not failed and bool(upper.isfinite().all()):
                return Factor(upper.float(), order, damping)
        damping *= 10
    return None


def column_order(hessian: Tensor, kind: str, group_size: int) -> Tensor:
    """The order of the columns, int64 [in].

    "activation": columns with the largest inputs first. "gar": the same within groups that stay together. "natural":
    as they stand.
    """
    diagonal = hessian.diagonal()
    if kind == "natural":
        return torch.arange(len(diagonal))
    if kind == "activation":
        return diagonal.argsort(descending=True, stable=True)
    if group_size == -1:
        group_size = len(diagonal)
    groups = diagonal.view(-1, group_size)
    first = groups.amax(1).argsort(descending=True, stable=True)
    within = groups.argsort(dim=1, descending=True, stable=True)
    return (first[:, None] * group_size + within[first]).flatten()


def _by_halves(
    begin: int, end: int, visit: Callable[[int, int], None], pass_on: Callable[[int, int, int], None]
) -> None:
    """`visit` all columns from `begin` to `end` in order, a few at a time. The changes by the columns from begin to
    middle are passed on to those from middle to end in one product."""
    if end - begin <= FEW:
        visit(begin, end)
        return
    middle = (begin + end + 1) // 2
    _by_halves(begin, middle, visit, pass_on)
    pass_on(begin, middle, end)
    _by_halves(middle, end, visit, pass_on)


def round_columns(weight: Tensor, grid: QTensor, factor: Factor) -> QTensor:
    """Codes for `weight` float32 [out, in] on the scales and zeros of `grid`. The codes of `grid` do not matter."""
    scheme, order = grid.scheme, factor.order
    group_of = order // _group_size(grid)
    rest = weight.T[order].contiguous()  # [in, out], so that a column of the weight lies in one piece
    scales, zeros = grid.scales.float().T[group_of], grid.zeros.float().T[group_of]
    codes, errors = torch.empty_like(rest), torch.empty_like(rest)

    def round_some(begin: int, end: int) -> None:
        for i in range(begin, end):
            codes[i] = (rest[i] / scales[i]).round_().add_(zeros[i]).clamp_(0, scheme.max_code)
            errors[i] = (rest[i] - (codes[i] - zeros[i]) * scales[i]) / factor.upper[i, i]
            rest[i + 1 : end].addr_(factor.upper[i, i + 1 : end], errors[i], alpha=-1)

    def pass_on(begin: int, middle: int, end: int) -> None:
        rest[middle:end] -= factor.upper[begin:middle, middle:end].T @ errors[begin:middle]

    _by_halves(0, len(order), round_some, pass_on)
    unordered = torch.empty_like(codes)
    unordered[order] = codes
    return QTensor(unordered.T.to(torch.uint8).contiguous(), grid.scales, grid.zeros, scheme)


def regress(weight: Tensor, cross: Tensor, hessian: Tensor, damping: float, strength: float) -> Tensor:
    """The weight W' for which x W'^T comes nearest to e W^T: W + strength * W (E^T X - X^T X) (X^T X + lambda)^-1.

    x is the input that the linear will see, e its input in the original model. weight float32 [out, in]; cross E^T X
    and hessian X^T X over tokens, float64 [in, in]; lambda: see `Factor`.
    """
    damped = hessian.clone()
    damped.diagonal().add_(damping * hessian.diagonal().mean())
    lower, failed = torch.linalg.cholesky_ex(damped)
    if failed:
        return weight
    change = torch.cholesky_solve((weight.double() @ (cross - hessian)).T, lower).T
    return weight + strength * change.float()


def refine(weight: Tensor, rounded: QTensor, hessian: Tensor, rounds: int) -> QTensor:
    """Coordinate descent on tr((W - W^) H (W - W^)^T). No step raises it.

    A round visits one group of inputs after the other. It takes the best scale for the group's codes, then the best
    code for one column after the other.
    """
    scheme, size, h = rounded.scheme, _group_size(rounded), hessian.float()
    codes = rounded.codes.float().T.contiguous()  # [in, out]
    scales, zeros = rounded.scales.float().T.contiguous(), rounded.zeros.float().T.contiguous()  # [groups, out]
    steps = (codes.view(len(scales), size, -1) - zeros[:, None]) * scales[:, None]
    gradient = h @ (weight.T - steps.view(codes.shape))  # [in, out], H (W - W^)^T
    for _ in range(rounds):
        for group in range(len(scales)):
            part = slice(group * size, (group + 1) * size)
            change = _refine_group(
                codes[part], scales[group], zeros[group], gradient[part], h[part, part], scheme.max_code
            )
            gradient -= h[:, part] @ change
    return QTensor(codes.T.to(torch.uint8).contiguous(), scales.T.to(torch.float16).contiguous(), rounded.zeros, scheme)


def _refine_group(codes: Tensor, scales: Tensor, zeros: Tensor, gradient: Tensor, h: Tensor, max_code: int) -> Tensor:
    """Refine one group's scales [out] and codes [size, out] in place. Returns the change of the weight [size, out]."""
    before = (codes - zeros) * scales
    steps = codes - zeros
    curvature = (steps * (h @ steps)).sum(0)
    best = (scales + (steps * gradient).sum(0) / curvature).to(torch.float16).float()
    scales.copy_(torch.where((curvature > 0) & (best >= _SMALLEST_SCALE) & best.isfinite(), best, scales))
    gradient = gradient - h @ (steps * scales - before)
    diagonal, changes = h.diagonal().tolist(), torch.zeros_like(codes)

    def refine_some(begin: int, end: int) -> None:
        for i in range(begin, end):
            if diagonal[i] > 0:
                wanted = (steps[i] * scales + gradient[i] / diagonal[i]) / scales
                code = (wanted + zeros).round_().clamp_(0, max_code)
                changes[i] = (code - codes[i]) * scales
                gradient[i + 1 : end].addr_(h[i + 1 : end, i], changes[i], alpha=-1)
                codes[i] = code

    def pass_on(begin: int, middle: int, end: int) -> None:
        gradient[middle:end] -= h[middle:end, begin:middle] @ changes[begin:middle]

    _by_halves(0, len(codes), refine_some, pass_on)
    return (codes - zeros) * scales - before


def _group_size(q: QTensor) -> int:
    """Inputs that share a scale; groups are whole."""
    num_groups = q.scales.shape[1]
    assert q.codes.shape[1] % num_groups == 0
    return q.codes.shape[1] // num_groups
