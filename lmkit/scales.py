"""How a quantized weight keeps the scales of its groups: values that answer for their kind.

Scales are a tensor [row groups, groups]. Some kinds have `factor`, float32 [1], for the whole weight besides.
"""

from __future__ import annotations

from typing import ClassVar

import msgspec
import torch
from torch import Tensor


class Numbers(msgspec.Struct, frozen=True, tag="numbers"):
    """A float16, bfloat16 or float32 for each group."""

    bits: ClassVar[int] = 16  # of a group, as files have them

    def plain(self, scales: Tensor, factor: Tensor | None) -> Tensor:
        """The scales as numbers of their own."""
        return scales


class Exponents(msgspec.Struct, frozen=True, tag="exponents"):
    """A power of two for each group (e8m0 of OCP Microscaling Formats 1.0): uint8, 2^(byte - 127). 255 is NaN."""

    bits: ClassVar[int] = 8

    def plain(self, scales: Tensor, factor: Tensor | None) -> Tensor:
        ones = torch.ones(scales.shape, device=scales.device)
        return torch.ldexp(ones, scales.to(torch.int32) - 127)


class TwoLevel(msgspec.Struct, frozen=True, tag="two_level"):
    """A float8 e4m3 for each group times the factor; `divided`: the factor divides it."""

    bits: ClassVar[int] = 8

    divided: bool = False

    def plain(self, scales: Tensor, factor: Tensor | None) -> Tensor:
        assert factor is not None
        return scales.float() / factor if self.divided else scales.float() * factor


NUMBERS = Numbers()
EXPONENTS = Exponents()
Scales = Numbers | Exponents | TwoLevel
