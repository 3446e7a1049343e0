"""The one canonical quantized tensor: methods make it, formats store it, kernels pack it.

Uniform affine grid, unsigned codes: w = (code - zero) * scale, per output row and group of `group_size` inputs.
A symmetric scheme is the same with zero = 2**(bits-1). `quantize` and `dequantize` are the oracle for everything else.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from lmkit.errors import CheckpointError, UnsupportedError

Range = tuple[Tensor, Tensor]  # (lower, upper), each [out, groups]

_FP16 = torch.finfo(torch.float16)


@dataclass(frozen=True)
class QuantScheme:
    """How a weight is quantized. `group_size` inputs share a scale and a zero; -1 = the whole row."""

    bits: int  # 4 or 8
    group_size: int
    symmetric: bool = False

    @property
    def max_code(self) -> int:
        return (1 << self.bits) - 1

    def num_groups(self, in_features: int) -> int:
        return 1 if self.group_size == -1 else -(-in_features // self.group_size)


@dataclass(frozen=True)
class QTensor:
    """codes uint8 [out, in] (one code a byte), scales float16/float32 [out, groups], zeros uint8 [out, groups]."""

    codes: torch.Tensor
    scales: torch.Tensor
    zeros: torch.Tensor
    scheme: QuantScheme


def quantize(weight: Tensor, scheme: QuantScheme, *, clip: Range | None = None) -> QTensor:
    """Round `weight` [out, in], any float dtype, to the nearest points of its grid; `clip` and errors: see `grid`."""
    scales, zeros = grid(weight, scheme, clip)
    return QTensor(codes_for(weight, scales, zeros, scheme), scales, zeros, scheme)


def dequantize(q: QTensor) -> Tensor:
    """The weight that `q` stands for, float32 [out, in]."""
    in_features = q.codes.shape[-1]
    codes = _grouped(q.codes, q.scheme).float()
    values = (codes - q.zeros.float().unsqueeze(-1)) * q.scales.float().unsqueeze(-1)
    return values.flatten(-2)[..., :in_features].contiguous()


def grid(weight: Tensor, scheme: QuantScheme, clip: Range | None = None) -> tuple[Tensor, Tensor]:
    """(scales float16, zeros uint8), each [..., out, groups], of a weight [..., out, in].

    The grid spans each group's minimum to its maximum, or `clip`'s lower to upper, widened to contain 0, so that 0 is
    exact and groups of one sign do not saturate. A scale is rounded to float16, and is at least its smallest normal
    number, before anything is derived from it: the search sees what the file will hold.
    Raises CheckpointError for a weight that is not finite, UnsupportedError for a group too wide for a float16 scale.
    """
    low, high = _range(weight, scheme)
    if clip is not None:
        low, high = clip[0].float().clamp(max=0), clip[1].float().clamp(min=0)
    if scheme.symmetric:
        high = torch.maximum(-low, high)
        low = -high
    scales = ((high - low) / scheme.max_code).to(torch.float16).clamp(min=_FP16.smallest_normal)
    if not bool(scales.isfinite().all()):
        widest = float(torch.maximum(-low, high).max())
        raise UnsupportedError(f"a weight of magnitude {widest:.3g} is beyond what a float16 scale can reach")
    if scheme.symmetric:
        return scales, torch.full_like(scales, 1 << (scheme.bits - 1), dtype=torch.uint8)
    return scales, torch.round(-low / scales.float()).clamp(0, scheme.max_code).to(torch.uint8)


def codes_for(weight: Tensor, scales: Tensor, zeros: Tensor, scheme: QuantScheme) -> Tensor:
    """Nearest codes uint8 [..., out, in] of `weight` on a given grid, saturated; leading dimensions broadcast."""
    in_features = weight.shape[-1]
    steps = torch.round(_grouped(weight.float(), scheme) / scales.float().unsqueeze(-1))
    codes = (steps + zeros.float().unsqueeze(-1)).clamp(0, scheme.max_code).to(torch.uint8)
    return codes.flatten(-2)[..., :in_features].contiguous()


def _range(weight: Tensor, scheme: QuantScheme) -> Range:
    """Each group's (minimum or 0, maximum or 0), float32."""
    groups = _grouped(weight.float(), scheme)
    low, high = groups.amin(-1), groups.amax(-1)
    if not bool(low.isfinite().all() and high.isfinite().all()):
        where = (~weight.isfinite()).nonzero()[0].tolist()
        raise CheckpointError(f"the weight at {where} is {float(weight[tuple(where)])}, not a finite number")
    return low.clamp(max=0), high.clamp(min=0)


def _grouped(x: Tensor, scheme: QuantScheme) -> Tensor:
    """[..., in] -> [..., groups, group_size]; a short last group is filled with 0, which changes no range."""
    in_features = x.shape[-1]
    num_groups = scheme.num_groups(in_features)
    size = in_features if scheme.group_size == -1 else scheme.group_size
    if missing := num_groups * size - in_features:
        x = torch.nn.functional.pad(x, (0, missing))
    return x.reshape(*x.shape[:-1], num_groups, size)
