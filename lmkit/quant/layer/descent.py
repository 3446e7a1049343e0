"""Coordinate descent on the error of a group of linears, with weights for errors of their outputs.

The error is tr(H_O E H E^T) of E = W^ - (W + S H^-1), for the moments H of the inputs and the curvature H_O of the
outputs (YAQA, arXiv 2505.22988). Its gradient at W^ is H_O E H, so every change of a weight moves the gradients of all
others. Weights are therefore visited in tiles: a few rows of one group of inputs. Inside a tile a change is passed on
at once. The gradients of the other groups and of the other rows follow in products, after the tile and after the
rows. The order is that of H_O: rows with the largest weight come first.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import replace
from typing import Any

import numba
import numpy as np
import torch
from torch import Tensor

from lmkit.codes import stepped
from lmkit.kernels.cpu.jit import FASTMATH
from lmkit.qtensor import QTensor
from lmkit.quant.layer.products import times
from lmkit.quant.layer.refine import by_halves, group_size, scales_and_zeros, with_steps

ROWS = 64  # of a tile


def descend(
    weight: Tensor,
    rounded: QTensor,
    hessian: Tensor,
    blocks: Iterable[tuple[Tensor, Tensor]],
    rounds: int,
    dtype: torch.dtype = torch.float32,
    shift: Tensor | None = None,
) -> QTensor:
    """`rounded` with better scales and codes for `weight` W float32 [out, in]. No step raises the error, up to the
    errors of products in `dtype`.

    `hessian` H float32 [in, in] has a positive diagonal. `blocks` are (rows int64 [n], H_O float32 [n, n]); other rows
    stay. `shift` S [out, in] is that of Moments. Tiles are visited on the CPU, wherever the tensors are.
    """
    if rounds == 0:
        return rounded
    found = replace(rounded, codes=rounded.codes.clone(), scales=rounded.scales.clone())
    for rows, outputs in blocks:
        order = outputs.diagonal().argsort(descending=True, stable=True)
        rows, outputs = rows[order].to(weight.device), outputs[order][:, order].to(weight.device)
        zeros = rounded.zeros[rows] if rounded.zeros.numel() else rounded.zeros
        part = replace(rounded, codes=found.codes[rows], scales=found.scales[rows], zeros=zeros)
        better = _descend(weight[rows], None if shift is None else shift[rows], part, hessian, outputs, rounds, dtype)
        found.codes[rows], found.scales[rows] = better.codes, better.scales
    return found


def _descend(
    weight: Tensor,
    shift: Tensor | None,
    rounded: QTensor,
    h: Tensor,
    outputs: Tensor,
    rounds: int,
    dtype: torch.dtype,
) -> QTensor:
    """As `descend`, for one block and its H_O `outputs`."""
    kind, size, short = stepped(rounded.scheme.codes), group_size(rounded), h.to(dtype)
    scales, zeros = scales_and_zeros(rounded)
    steps = kind.steps(rounded.codes, zeros.repeat_interleave(size, 1))
    levels, top = np.array(kind.levels, np.float32), np.float32((1 << kind.bits) - 1)
    spacing = tuple(np.float32(number) for number in rounded.scheme.scales.spacing(rounded.factor))
    groups = [slice(begin, begin + size) for begin in range(0, len(h), size)]
    own = [h[group, group].contiguous() for group in groups]
    columns = [part.diagonal().argsort(descending=True, stable=True).cpu().numpy() for part in own]

    def visit_tile(rows: slice, k: int, gradients: Tensor) -> Tensor:
        """The change of the tile's weights [rows, size]."""
        scale, part = scales[rows, k], steps[rows, groups[k]]
        before = part * scale[:, None]
        given = part, scale, zeros[rows, k], gradients, part @ own[k], outputs[rows, rows], own[k]
        tile = [each.cpu().contiguous() for each in given]
        _visit(*(each.numpy() for each in tile), columns[k], top, levels, spacing)
        steps[rows, groups[k]], scales[rows, k] = tile[0].to(steps.device), tile[1].to(steps.device)
        return steps[rows, groups[k]] * scales[rows, k, None] - before

    def visit_rows(rows: slice) -> Tensor:
        """The change of the rows' weights [rows, in]."""
        gradients, changes = times(outputs[rows], pull.T, dtype), torch.empty_like(pull[rows])

        def visit(begin: int, end: int) -> None:
            for k in range(begin, end):
                changes[:, groups[k]] = visit_tile(rows, k, gradients[:, groups[k]])

        def pass_on(begin: int, middle: int, end: int) -> None:
            seen, later = (slice(first * size, last * size) for first, last in ((begin, middle), (middle, end)))
            gradients[:, later] += outputs[rows, rows] @ times(changes[:, seen], short[later, seen], dtype)

        by_halves(0, len(groups), visit, pass_on, few=1)
        return changes

    for _ in range(rounds):
        rows_found = steps.view(len(steps), len(groups), size) * scales[..., None]
        pull = times(rows_found.view(steps.shape) - weight, short, dtype)  # E H
        if shift is not None:
            pull -= shift
        for begin in range(0, len(steps), ROWS):
            rows = slice(begin, begin + ROWS)
            pull[rows] += times(visit_rows(rows), short, dtype)
    return with_steps(rounded, steps, scales)


@numba.njit(error_model="numpy", fastmath=FASTMATH | {"reassoc"})
def _visit(
    steps: Any, scales: Any, zeros: Any, gradients: Any, products: Any, outputs: Any, h: Any, columns: Any, top: Any,
    levels: Any, spacing: Any,
) -> None:  # fmt: skip
    """Visit the rows of a tile in order. `steps` [n, size], `scales` [n] and `gradients` [n, size] change. `products`
    [n, size] are the steps times `h` [size, size]. `columns` are all inputs in order. Steps are `levels`, or without
    any the whole numbers from -zero to top - zero; `spacing` are the fields of scales.Spacing."""
    num_rows, size = steps.shape
    for i in range(num_rows):
        gradient, own = gradients[i], outputs[i, i]
        before = gradient.copy()
        slope, curvature = np.float32(0), np.float32(0)
        for j in range(size):
            slope += steps[i, j] * gradient[j]
            curvature += steps[i, j] * products[i, j]
        if curvature > 0:
            best = _nearest_scale(scales[i] - slope / (own * curvature), spacing)
            if best > 0:
                change = own * (best - scales[i])
                scales[i] = best
                for j in range(size):
                    gradient[j] += change * products[i, j]
        for j in columns:
            wanted = steps[i, j] - gradient[j] / (own * h[j, j] * scales[i])
            if len(levels):
                step = _nearest_level(wanted, levels)
            else:
                step = min(max(np.rint(wanted), -zeros[i]), top - zeros[i])
            if step != steps[i, j]:
                change = own * (step - steps[i, j]) * scales[i]
                steps[i, j] = step
                for other in range(size):
                    gradient[other] += change * h[j, other]
        for later in range(i + 1, num_rows):
            share = outputs[later, i] / own
            for j in range(size):
                gradients[later, j] += share * (gradient[j] - before[j])


@numba.njit(error_model="numpy")
def _nearest_level(x: Any, levels: Any) -> Any:
    best = levels[0]
    for level in levels[1:]:
        if abs(level - x) < abs(best - x):
            best = level
    return best


@numba.njit(error_model="numpy")
def _nearest_scale(x: Any, spacing: Any) -> Any:
    """scales.Spacing.nearest of one number."""
    digits, smallest, largest, finest, factor = spacing
    wanted = x / factor
    if not smallest <= wanted <= largest:
        return np.float32(0)
    unit = max(math.ldexp(1.0, math.frexp(wanted)[1] - int(digits)), finest)
    return np.float32(np.rint(wanted / unit) * unit * factor)
