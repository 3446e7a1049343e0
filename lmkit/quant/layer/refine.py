"""Coordinate descent on the error of a rounded weight, all rows at a time."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from lmkit.qtensor import SMALLEST_SCALE, QTensor
from lmkit.quant.layer.products import times

FEW = 16  # columns that are visited one after the other; their changes are passed on to later columns in products


def by_halves(
    begin: int, end: int, visit: Callable[[int, int], None], pass_on: Callable[[int, int, int], None], few: int = FEW
) -> None:
    """`visit` all columns (or groups) from `begin` to `end` in order, a few at a time. The changes by those from begin
    to middle are passed on to those from middle to end in one product."""
    if end - begin <= few:
        visit(begin, end)
        return
    middle = (begin + end + 1) // 2
    by_halves(begin, middle, visit, pass_on, few)
    pass_on(begin, middle, end)
    by_halves(middle, end, visit, pass_on, few)


def refine(
    weight: Tensor,
    rounded: QTensor,
    hessian: Tensor,
    rounds: int,
    dtype: torch.dtype = torch.float32,
    shift: Tensor | None = None,
) -> QTensor:
    """Coordinate descent on tr((W - W^) H (W - W^)^T), with `shift` as in gptq.round_columns. No step raises it, up to
    the errors of products in `dtype`.

    A round visits one group of inputs after the other. It takes the best scale for the group's codes, then the best
    code for one column after the other.
    """
    scheme, size, h, short = rounded.scheme, group_size(rounded), hessian, hessian.to(dtype)
    codes = rounded.codes.float().T.contiguous()  # [in, out]
    scales, zeros = rounded.scales.float().T.contiguous(), rounded.zeros.float().T.contiguous()  # [groups, out]
    changes = torch.empty_like(codes)

    def inputs(begin: int, end: int) -> slice:
        return slice(begin * size, end * size)

    def visit(begin: int, end: int) -> None:
        for group in range(begin, end):
            part = inputs(group, group + 1)
            changes[part] = _refine_group(
                codes[part], scales[group], zeros[group], gradient[part], h[part, part], scheme.max_code
            )

    def pass_on(begin: int, middle: int, end: int) -> None:
        seen, later = inputs(begin, middle), inputs(middle, end)
        gradient[later] -= times(short[later, seen], changes[seen].T, dtype)

    for _ in range(rounds):
        steps = (codes.view(len(scales), size, -1) - zeros[:, None]) * scales[:, None]
        gradient = times(short, weight - steps.view(codes.shape).T, dtype)  # [in, out], H (W - W^)^T + S^T
        if shift is not None:
            gradient += shift.T
        by_halves(0, len(scales), visit, pass_on, few=1)
    return QTensor(codes.T.to(torch.uint8).contiguous(), scales.T.to(torch.float16).contiguous(), rounded.zeros, scheme)


def _refine_group(codes: Tensor, scales: Tensor, zeros: Tensor, gradient: Tensor, h: Tensor, max_code: int) -> Tensor:
    """Refine one group's scales [out] and codes [size, out] in place. Returns the change of the weight [size, out]."""
    before = (codes - zeros) * scales
    steps = codes - zeros
    curvature = (steps * (h @ steps)).sum(0)
    best = (scales + (steps * gradient).sum(0) / curvature).to(torch.float16).float()
    scales.copy_(torch.where((curvature > 0) & (best >= SMALLEST_SCALE) & best.isfinite(), best, scales))
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

    by_halves(0, len(codes), refine_some, pass_on)
    return (codes - zeros) * scales - before


def group_size(q: QTensor) -> int:
    """Inputs that share a scale; groups are whole."""
    num_groups = q.scales.shape[1]
    assert q.codes.shape[1] % num_groups == 0
    return q.codes.shape[1] // num_groups
