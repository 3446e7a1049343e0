"""Rounding to the nearest point of a grid. The ends of the grid may be narrowed."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import torch
from torch import Tensor

from lmkit.qtensor import QTensor, QuantScheme, quantize

Shrink = tuple[Tensor, Tensor]  # factors in (0, 1] on the lower and the upper end of each group's range, [out, groups]


def round_to_nearest(
    weight: Tensor, scheme: QuantScheme, shrink: Shrink | None = None, largest: Tensor | None = None
) -> QTensor:
    """weight float32 [out, in] -> codes on the grid from the smallest to the largest weight of each group.

    `shrink` narrows the ends of the grid. Weights outside saturate. `largest` is as in `quantize`.
    """
    if shrink is None:
        return quantize(weight, scheme, largest=largest)
    grouped = weight.view(weight.shape[0], -1, scheme.group_size)
    clip = grouped.amin(-1) * shrink[0], grouped.amax(-1) * shrink[1]
    return quantize(weight, scheme, clip=clip, largest=largest)


def largest_together(
    weights: Mapping[str, Tensor | QTensor], fused: Iterable[tuple[str, ...]], schemes: Mapping[str, QuantScheme]
) -> dict[str, Tensor]:
    """The largest magnitude of the weights that `role` is multiplied together with, for roles whose scales share a
    factor then."""
    shared = {role for role, scheme in schemes.items() if scheme.scales.shared}
    found = dict[str, Tensor]()
    for roles in (*((role,) for role in shared), *fused):
        plain = [weight for role in roles if role in shared and isinstance(weight := weights[role], Tensor)]
        if plain:
            found |= dict.fromkeys(roles, torch.stack([weight.abs().max() for weight in plain]).max())
    return found
