"""Weights on the device that computes with them."""

from __future__ import annotations

import torch
from torch import Tensor

from lmkit.codes import E2M1
from lmkit.devices import named
from lmkit.qtensor import QTensor, QuantScheme, dequantize
from lmkit.scales import NUMBERS


def placed(weight: Tensor | QTensor, device: str, at: str, dtype: torch.dtype | None) -> Tensor | QTensor:
    """The weight on the device. GPUs have no kernel for groups of 16 but those of float4 and of super-groups: such a
    weight becomes dense there."""
    if isinstance(weight, QTensor) and becomes_dense(weight.scheme, device):
        dense = dequantize(weight)
        return (dense if dtype is None else dense.to(dtype)).to(at)
    return weight.to(at)


def becomes_dense(scheme: QuantScheme, device: str) -> bool:
    """Whether a weight of this scheme is dense on the device."""
    facts, small = named(device), scheme.group_size == 16
    if scheme.codes.plain == E2M1.plain:
        return not facts.float4 and small
    if small and scheme.scales.kept == NUMBERS and not facts.small_groups:
        return True
    return scheme.in_planes and not facts.planes


def held_bytes(scheme: QuantScheme, shape: tuple[int, int], device: str, dense: int) -> int:
    """Bytes of a weight [out, in] of this scheme on the device, where a dense number has `dense`."""
    if becomes_dense(scheme, device):
        return shape[0] * shape[1] * dense
    return scheme.num_bytes(shape, named(device).widths if scheme.in_planes else ())
