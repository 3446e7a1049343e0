"""Weights on the device that computes with them."""

from __future__ import annotations

import torch
from torch import Tensor

from lmkit.devices import named
from lmkit.qtensor import QTensor, QuantScheme, dequantize


def placed(weight: Tensor | QTensor, device: str, at: str, dtype: torch.dtype | None) -> Tensor | QTensor:
    """The weight on the device. GPUs have no kernel for groups of 16, and none for planes: such a weight becomes dense
    there."""
    if isinstance(weight, QTensor) and becomes_dense(weight.scheme, device):
        dense = dequantize(weight)
        return (dense if dtype is None else dense.to(dtype)).to(at)
    return weight.to(at)


def becomes_dense(scheme: QuantScheme, device: str) -> bool:
    """Whether a weight of this scheme is dense on the device."""
    return not named(device).float4 and (scheme.group_size == 16 or scheme.in_planes)
