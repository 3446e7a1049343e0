"""Linears of weights in planes of bits, and linears whose inputs keep 16 bits. See ops."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from lmkit.kernels.ops import Norm
from lmkit.kernels.registry import op


@op
def linear_planes(x: Tensor, packed: Any, bias: Tensor | None, norm: Norm | None = None) -> Tensor:
    """As linear_w4a8, of weights whose scheme is `in_planes`: y += sx * (sw * sum(code * xq) - offset * sum(xq)).
    Traits: `scheme`, and `scales`, their dtype."""


@op
def linear_split(x: Tensor, packed: Any, bias: Tensor | None, norm: Norm | None = None) -> Tensor:
    """As linear_planes, linear_w4a8 or linear_w8a8, by the weight's scheme, with inputs of 16 bits: the product of xq,
    and that of x - sx * xq, rounded with the scale sx / 256. An input errs by 2^-16 of its group's largest."""
