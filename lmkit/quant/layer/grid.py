"""Rounding to the nearest point of a grid. The ends of the grid may be narrowed."""

from __future__ import annotations

from torch import Tensor

from lmkit.qtensor import QTensor, QuantScheme, quantize

Shrink = tuple[Tensor, Tensor]  # factors in (0, 1] on the lower and the upper end of each group's range, [out, groups]


def round_to_nearest(weight: Tensor, scheme: QuantScheme, shrink: Shrink | None = None) -> QTensor:
    """weight float32 [out, in] -> codes on the grid from the smallest to the largest weight of each group.

    `shrink` narrows the ends of the grid. Weights outside saturate.
    """
    if shrink is None:
        return quantize(weight, scheme)
    grouped = weight.view(weight.shape[0], -1, scheme.group_size)
    return quantize(weight, scheme, clip=(grouped.amin(-1) * shrink[0], grouped.amax(-1) * shrink[1]))
