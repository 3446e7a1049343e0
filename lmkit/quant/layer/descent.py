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

from lmkit.kernels.cpu.jit import FASTMATH
from lmkit.qtensor import LARGEST_SCALE, SMALLEST_SCALE, QTensor
from lmkit.quant.layer.products import times
from lmkit.quant.layer.refine import by_halves, group_size

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
        part = QTensor(found.codes[rows], found.scales[rows], rounded.zeros[rows], rounded.scheme)
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
    codes, scales, zeros = (part.float() for part in (rounded.codes, rounded.scales, rounded.zeros))
    size, short, top = group_size(rounded), h.to(dtype), np.float32(rounded.scheme.max_code)
    groups = [slice(begin, begin + size) for begin in range(0, len(h), size)]
    own = [h[group, group].contiguous() for group in groups]
    columns = [part.diagonal().argsort(descending=True, stable=True).cpu().numpy() for part in own]

    def visit_tile(rows: slice, k: int, gradients: Tensor) -> Tensor:
        """The change of the tile's weights [rows, size]."""
        scale, steps = scales[rows, k], codes[rows, groups[k]] - zeros[rows, k, None]
        before = steps * scale[:, None]
        given = codes[rows, groups[k]], scale, zeros[rows, k], gradients, steps @ own[k], outputs[rows, rows], own[k]
        tile = [part.cpu().contiguous() for part in given]
        _visit(*(part.numpy() for part in tile), columns[k], top)
        codes[rows, groups[k]], scales[rows, k] = tile[0].to(codes.device), tile[1].to(codes.device)
        return (codes[rows, groups[k]] - zeros[rows, k, None]) * scales[rows, k, None] - before

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
        steps = (codes.view(len(codes), len(groups), size) - zeros[..., None]) * scales[..., None]
        pull = times(steps.view(codes.shape) - weight, short, dtype)  # E H
        if shift is not None:
            pull -= shift
        for begin in range(0, len(codes), ROWS):
            rows = slice(begin, begin + ROWS)
            pull[rows] += times(visit_rows(rows), short, dtype)
    return QTensor(codes.to(torch.uint8), scales.to(torch.float16), rounded.zeros, rounded.scheme)


@numba.njit(error_model="numpy", fastmath=FASTMATH | {"reassoc"})
def _visit(
    codes: Any, scales: Any, zeros: Any, gradients: Any, products: Any, outputs: Any, h: Any, columns: Any, top: Any
) -> None:
    """Visit the rows of a tile in order. `codes` [n, size], `scales` [n] and `gradients` [n, size] change. `products`
    [n, size] are the steps, codes less zeros, times `h` [size, size]. `columns` are all inputs in order."""
    num_rows, size = codes.shape
    for i in range(num_rows):
        gradient, own = gradients[i], outputs[i, i]
        before = gradient.copy()
        slope, curvature = np.float32(0), np.float32(0)
        for j in range(size):
            step = codes[i, j] - zeros[i]
            slope += step * gradient[j]
            curvature += step * products[i, j]
        if curvature > 0:
            best = _as_float16(scales[i] - slope / (own * curvature))
            if SMALLEST_SCALE <= best <= LARGEST_SCALE:
                change = own * (best - scales[i])
                scales[i] = best
                for j in range(size):
                    gradient[j] += change * products[i, j]
        for j in columns:
            code = np.rint(codes[i, j] - gradient[j] / (own * h[j, j] * scales[i]))
            code = min(max(code, np.float32(0)), top)
            if code != codes[i, j]:
                change = own * (code - codes[i, j]) * scales[i]
                codes[i, j] = code
                for other in range(size):
                    gradient[other] += change * h[j, other]
        for later in range(i + 1, num_rows):
            share = outputs[later, i] / own
            for j in range(size):
                gradients[later, j] += share * (gradient[j] - before[j])


@numba.njit(error_model="numpy")
def _as_float16(x: Any) -> Any:
    """The float16 that is nearest to x, if it is normal."""
    if not x >= SMALLEST_SCALE:
        return np.float32(0)
    unit = math.ldexp(1.0, math.frexp(x)[1] - 11)
    return np.float32(np.rint(x / unit) * unit)
