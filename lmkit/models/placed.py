"""Weights on the device that computes with them."""

from __future__ import annotations

import torch
from torch import Tensor

from lmkit.codes import E2M1
from lmkit.devices import named
from lmkit.qtensor import QTensor, QuantScheme, dequantize


def placed(weight: Tensor | QTensor, device: str, at: str, dtype: torch.dtype | None) -> Tensor | QTensor:
    """The weight on the device. GPUs have no kernel for planes, and none for groups of 16 but those of float4: such a
    weight becomes dense there."""
    if isinstance(weight, QTensor) and becomes_dense(weight.scheme, device):
        dense = dequantize(weight)
        return (dense if dtype is None else dense.to(dtype)).to(at)
    return weight.to(at)


def becomes_dense(scheme: QuantScheme, device: str) -> bool:
    """Whether a weight of this scheme is dense on the device."""
    facts = named(device)
    if scheme.codes.plain == E2M1.plain:
        return not facts.float4 and scheme.group_size == 16
    return not facts.planes and (scheme.group_size == 16 or scheme.in_planes)
