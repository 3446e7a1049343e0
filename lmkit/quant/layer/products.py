"""Matrix products of a calibration. Operands may be bfloat16, sums over tokens are float32."""

from __future__ import annotations

import torch
from torch import Tensor

BANDS = 8  # of rows, in which a matrix of sums is computed
SHORT_TOKENS = 1024  # of one product of short numbers: its result is short, too, and these errors average out


def times(x: Tensor, weight: Tensor, dtype: torch.dtype) -> Tensor:
    """x weight^T, float32 [..., n, out], of x float32 [..., n, in] and weight float32 [..., out, in] as `dtype`."""
    return (x.to(dtype) @ weight.to(dtype).transpose(-1, -2)).float()


def add_product(total: Tensor, x: Tensor, y: Tensor) -> None:
    """total float32 [m, n] += x^T y, x [tokens, m] and y [tokens, n] of one dtype."""
    for rows in _bands(len(total)):
        _add(total[rows], x[:, rows], y)


def add_square(total: Tensor, x: Tensor) -> None:
    """total float32 [n, n] += x^T x, x [tokens, n]. Entries below the diagonal are missing: see `mirror`."""
    for rows in _bands(len(total)):
        _add(total[rows, rows.start :], x[:, rows], x[:, rows.start :])


def mirror(total: Tensor) -> None:
    """Copy the entries above the diagonal to those below."""
    for rows in _bands(len(total)):
        total[rows.stop :, rows] = total[rows, rows.stop :].T
        total[rows, rows] = total[rows, rows].triu() + total[rows, rows].triu(1).T


def _bands(size: int) -> list[slice]:
    step = -(-size // BANDS)
    return [slice(begin, min(begin + step, size)) for begin in range(0, size, step)]


def _add(total: Tensor, x: Tensor, y: Tensor) -> None:
    if x.dtype == total.dtype:
        total.addmm_(x.T, y)
        return
    for part, other in zip(x.split(SHORT_TOKENS), y.split(SHORT_TOKENS), strict=True):
        total.add_(part.T @ other)
