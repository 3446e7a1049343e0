"""GPTQ (arXiv 2210.17323): columns are rounded one after the other, and what a column's rounding does to the output is
made good, as far as the inputs are correlated, by the columns that are still to come.

The grid is fixed beforehand, from the weight and its clipping, so that columns may be visited in any order while codes
stay where they are: the file needs no index of groups. Linears that read the same input are rounded together, as rows
of one weight. Weights are float32, products of inputs float64 until they are factorized.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from lmkit.qtensor import QTensor

BLOCK = 128  # columns whose errors are passed on to the later ones in one product
MAX_DAMPING = 1.0

_SMALLEST_SCALE = torch.finfo(torch.float16).smallest_normal


@dataclass(frozen=True)
class Factor:
    """`upper` float32 [in, in] with upper^T upper = (H + damping * mean(diag H))^-1, columns in `order` int64 [in]."""

    upper: Tensor
    order: Tensor
    damping: float


def factorize(hessian: Tensor, order: Tensor, damping: float) -> Factor | None:
    """The factor of `hessian` float64 [in, in]; damping grows tenfold, to MAX_DAMPING, until there is one.

    None: there is none, or the input is nothing but zeros. A dead input, of which H has only zeros, is left to itself.
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
    """int64 [in]: columns with the largest inputs first ("activation"), the same within groups that stay together
    ("gar"), or as they stand ("natural")."""
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


def round_columns(weight: Tensor, grid: QTensor, factor: Factor) -> QTensor:
    """Codes for `weight` float32 [out, in] on the scales and zeros of `grid`, whose codes do not matter."""
    scheme, order = grid.scheme, factor.order
    group_of = order // _group_size(grid)
    rest = weight.T[order].contiguous()  # [in, out], so that a column of the weight lies in one piece
    scales, zeros = grid.scales.float().T[group_of], grid.zeros.float().T[group_of]
    codes = torch.empty_like(rest)
    for begin in range(0, len(order), BLOCK):
        end = min(begin + BLOCK, len(order))
        errors = torch.empty_like(rest[begin:end])
        for i in range(begin, end):
            codes[i] = (rest[i] / scales[i]).round_().add_(zeros[i]).clamp_(0, scheme.max_code)
            errors[i - begin] = (rest[i] - (codes[i] - zeros[i]) * scales[i]) / factor.upper[i, i]
            rest[i + 1 : end].addr_(factor.upper[i, i + 1 : end], errors[i - begin], alpha=-1)
        rest[end:] -= factor.upper[begin:end, end:].T @ errors
    unordered = torch.empty_like(codes)
    unordered[order] = codes
    return QTensor(unordered.T.to(torch.uint8).contiguous(), grid.scales, grid.zeros, scheme)


def regress(weight: Tensor, cross: Tensor, hessian: Tensor, damping: float, strength: float) -> Tensor:
    """The weight W' for which x W'^T comes nearest to e W^T, where x is what a linear will see and e what it saw in the
    original model: W + strength * W (E^T X - X^T X) (X^T X + lambda)^-1.

    weight float32 [out, in]; cross E^T X and hessian X^T X over tokens, float64 [in, in]; lambda: see `Factor`.
    """
    damped = hessian.clone()
    damped.diagonal().add_(damping * hessian.diagonal().mean())
    lower, failed = torch.linalg.cholesky_ex(damped)
    if failed:
        return weight
    change = torch.cholesky_solve((weight.double() @ (cross - hessian)).T, lower).T
    return weight + strength * change.float()


def refine(weight: Tensor, rounded: QTensor, hessian: Tensor, rounds: int) -> QTensor:
    """Coordinate descent on tr((W - W^) H (W - W^)^T), which no step raises: for one group of inputs after the other
    the best scale for its codes, then for one column after the other the best code."""
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
    """One group's scales [out] and codes [size, out], in place; returns the change of the weight [size, out]."""
    before = (codes - zeros) * scales
    steps = codes - zeros
    curvature = (steps * (h @ steps)).sum(0)
    best = (scales + (steps * gradient).sum(0) / curvature).to(torch.float16).float()
    scales.copy_(torch.where((curvature > 0) & (best >= _SMALLEST_SCALE) & best.isfinite(), best, scales))
    gradient = gradient - h @ (steps * scales - before)
    diagonal = h.diagonal()
    for i in range(len(codes)):
        if diagonal[i] <= 0:
            continue
        wanted = (steps[i] * scales + gradient[i] / diagonal[i]) / scales
        code = (wanted + zeros).round_().clamp_(0, max_code)
        change = (code - codes[i]) * scales
        gradient.addr_(h[:, i], change, alpha=-1)
        codes[i] = code
    return (codes - zeros) * scales - before


def _group_size(q: QTensor) -> int:
    """Inputs that share a scale; groups are whole."""
    num_groups = q.scales.shape[1]
    assert q.codes.shape[1] % num_groups == 0
    return q.codes.shape[1] // num_groups
