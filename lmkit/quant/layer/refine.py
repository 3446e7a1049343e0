"""Coordinate descent on the error of a rounded weight, all rows at a time."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import torch
from torch import Tensor

from lmkit.codes import Stepped, stepped
from lmkit.qtensor import QTensor
from lmkit.quant.layer.products import times
from lmkit.scales import Spacing

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
    kind, size, h, short = stepped(rounded.scheme.codes), group_size(rounded), hessian, hessian.to(dtype)
    scales, zeros = (part.T.contiguous() for part in scales_and_zeros(rounded))  # [groups, out]
    steps = kind.steps(rounded.codes.T, zeros.repeat_interleave(size, 0))  # [in, out]
    spacing = rounded.scheme.scales.spacing(rounded.factor)
    changes = torch.empty_like(steps)

    def inputs(begin: int, end: int) -> slice:
        return slice(begin * size, end * size)

    def visit(begin: int, end: int) -> None:
        for group in range(begin, end):
            part = inputs(group, group + 1)
            changes[part] = _refine_group(
                steps[part], scales[group], zeros[group], gradient[part], h[part, part], kind, spacing
            )

    def pass_on(begin: int, middle: int, end: int) -> None:
        seen, later = inputs(begin, middle), inputs(middle, end)
        gradient[later] -= times(short[later, seen], changes[seen].T, dtype)

    for _ in range(rounds):
        found = (steps.view(len(scales), size, -1) * scales[:, None]).view(steps.shape)
        gradient = times(short, weight - found.T, dtype)  # [in, out], H (W - W^)^T + S^T
        if shift is not None:
            gradient += shift.T
        by_halves(0, len(scales), visit, pass_on, few=1)
    return with_steps(rounded, steps.T, scales.T)


def _refine_group(
    steps: Tensor, scales: Tensor, zeros: Tensor, gradient: Tensor, h: Tensor, kind: Stepped, spacing: Spacing
) -> Tensor:
    """Refine one group's scales [out] and steps [size, out] in place. Returns the change of the weight [size, out]."""
    before = steps * scales
    curvature = (steps * (h @ steps)).sum(0)
    best = spacing.nearest(scales + (steps * gradient).sum(0) / curvature)
    scales.copy_(torch.where((curvature > 0) & (best > 0), best, scales))
    gradient = gradient - h @ (steps * scales - before)
    diagonal, changes = h.diagonal().tolist(), torch.zeros_like(steps)

    def refine_some(begin: int, end: int) -> None:
        for i in range(begin, end):
            if diagonal[i] > 0:
                step = kind.nearest_steps((steps[i] * scales + gradient[i] / diagonal[i]) / scales, zeros)
                changes[i] = (step - steps[i]) * scales
                gradient[i + 1 : end].addr_(h[i + 1 : end, i], changes[i], alpha=-1)
                steps[i] = step

    def pass_on(begin: int, middle: int, end: int) -> None:
        gradient[middle:end] -= h[middle:end, begin:middle] @ changes[begin:middle]

    by_halves(0, len(steps), refine_some, pass_on)
    return steps * scales - before


def scales_and_zeros(q: QTensor) -> tuple[Tensor, Tensor]:
    """The scales and zeros of stepped codes as numbers, float32 [out, groups] each. Codes without zeros have 0."""
    scales = q.scheme.scales.plain(q.scales, q.factor).float()
    return scales, q.zeros.float() if q.zeros.numel() else torch.zeros_like(scales)


def with_steps(q: QTensor, steps: Tensor, scales: Tensor) -> QTensor:
    """`q` with other steps float32 [out, in] and scales float32 [out, groups] of its spacing."""
    _, zeros = scales_and_zeros(q)
    codes = stepped(q.scheme.codes).of_steps(steps, zeros.repeat_interleave(group_size(q), 1))
    stored = q.scheme.scales.stored(scales, q.factor)
    return replace(q, codes=codes.contiguous(), scales=stored.contiguous())


def group_size(q: QTensor) -> int:
    """Inputs that share a scale; groups are whole."""
    num_groups = q.scales.shape[1]
    assert q.codes.shape[1] % num_groups == 0
    return q.codes.shape[1] // num_groups
