"""How a quantized weight keeps the scales of its groups: values that answer for their kind.

Scales are a tensor [row groups, groups]. Some kinds have `factor`, float32 [1], for the whole weight besides.
"""

from __future__ import annotations

from typing import ClassVar

import msgspec
import torch
from torch import Tensor

E4M3 = torch.finfo(torch.float8_e4m3fn)
SMALLEST_E4M3 = 2.0**-9  # subnormal
SMALLEST_TOP = 1e-30  # its factor is a number


class Numbers(msgspec.Struct, frozen=True, tag="numbers"):
    """A float16, bfloat16 or float32 for each group."""

    bits: ClassVar[int] = 16  # of a group, as files have them
    strategy: ClassVar[str] = "group"  # as compressed-tensors names groups of inputs with such scales
    shared: ClassVar[bool] = False  # weights that are multiplied together have one factor

    def fit(self, scales: Tensor, largest: Tensor) -> tuple[Tensor, Tensor | None]:
        """(scales, factor) nearest to scales float32 > 0. `largest` is the largest one of all that share a factor."""
        return scales, None

    def plain(self, scales: Tensor, factor: Tensor | None) -> Tensor:
        """The scales as numbers of their own."""
        return scales


class Exponents(msgspec.Struct, frozen=True, tag="exponents"):
    """A power of two for each group (e8m0 of OCP Microscaling Formats 1.0): uint8, 2^(byte - 127). 255 is NaN."""

    bits: ClassVar[int] = 8
    strategy: ClassVar[str] = "group"
    shared: ClassVar[bool] = False

    def fit(self, scales: Tensor, largest: Tensor) -> tuple[Tensor, Tensor | None]:
        """The next powers of two that are not smaller, so that nothing saturates."""
        return (scales.log2().ceil().clamp(-127, 127) + 127).to(torch.uint8), None

    def plain(self, scales: Tensor, factor: Tensor | None) -> Tensor:
        ones = torch.ones(scales.shape, device=scales.device)
        return torch.ldexp(ones, scales.to(torch.int32) - 127)


class TwoLevel(msgspec.Struct, frozen=True, tag="two_level"):
    """A float8 e4m3 for each group times the factor; `divided`: the factor divides it."""

    bits: ClassVar[int] = 8
    strategy: ClassVar[str] = "tensor_group"
    shared: ClassVar[bool] = True

    divided: bool = False

    def fit(self, scales: Tensor, largest: Tensor) -> tuple[Tensor, Tensor | None]:
        """The largest scale becomes 448, the largest float8 number. None becomes 0."""
        top = largest.float().clamp(min=SMALLEST_TOP)
        factor = E4M3.max / top if self.divided else top / E4M3.max
        wide = scales * factor if self.divided else scales / factor
        return wide.clamp(SMALLEST_E4M3, E4M3.max).to(torch.float8_e4m3fn), factor.reshape(1)

    def plain(self, scales: Tensor, factor: Tensor | None) -> Tensor:
        assert factor is not None
        return scales.float() / factor if self.divided else scales.float() * factor


NUMBERS = Numbers()
EXPONENTS = Exponents()
Scales = Numbers | Exponents | TwoLevel
