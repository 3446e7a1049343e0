"""How a quantized weight keeps the scales of its groups: values that answer for their kind.

Scales are a tensor [row groups, groups]. Some kinds have a `factor` besides: float32 [1] for the whole weight, or
float16 for the groups of a super-group.
"""

from __future__ import annotations

from typing import ClassVar, NamedTuple

import msgspec
import torch
from torch import Tensor

from lmkit.errors import UnsupportedError

E4M3 = torch.finfo(torch.float8_e4m3fn)
SMALLEST_E4M3 = 2.0**-9  # subnormal
SMALLEST_TOP = 1e-30  # its factor is a number
HALF = torch.finfo(torch.float16)


class Spacing(NamedTuple):
    """Scales that a file can hold: floating-point numbers of so many binary `digits`, times `factor`."""

    digits: int
    smallest: float
    largest: float
    finest: float = 0.0  # the least distance of two
    factor: float = 1.0

    def nearest(self, scales: Tensor) -> Tensor:
        """The nearest of them to float32 scales; 0 where a scale is beyond them, or is no number."""
        wanted = scales / self.factor
        unit = torch.ldexp(torch.ones_like(wanted), wanted.frexp().exponent - self.digits).clamp(min=self.finest)
        inside = (wanted >= self.smallest) & (wanted <= self.largest)
        return torch.where(inside, (wanted / unit).round() * unit * self.factor, 0.0)


class _Kind(msgspec.Struct, frozen=True):
    """What kinds of scales answer. Those of a kind that kernels do not have become numbers of their own."""

    bits: ClassVar[int]  # of a group, as files have them
    held_bits: ClassVar[float] = 16  # of a group in planes, with its share of factors
    strategy: ClassVar[str] = "group"  # as compressed-tensors names groups of inputs with such scales
    told: ClassVar[dict[str, str]] = {}  # what compressed-tensors says of them besides
    shared: ClassVar[bool] = False  # weights that are multiplied together have one factor
    shift: ClassVar[int] = 0  # factors count 2^-shift

    def fit(self, scales: Tensor, largest: Tensor) -> tuple[Tensor, Tensor | None]:
        """(scales, factor) nearest to scales float32 > 0. `largest` is the largest one of all that share a factor."""
        raise NotImplementedError

    def plain(self, scales: Tensor, factor: Tensor | None) -> Tensor:
        """The scales as numbers of their own."""
        raise NotImplementedError

    def spacing(self, factor: Tensor | None) -> Spacing:
        """The scales that weights of up to 4 bits may have beside this factor."""
        raise NotImplementedError

    def stored(self, scales: Tensor, factor: Tensor | None) -> Tensor:
        """What `plain` makes these scales of, float32 and of `spacing`."""
        raise NotImplementedError

    def offsets(self, zeros: Tensor, factor: Tensor | None) -> Tensor:
        """What stands in the place of zeros, offsets as numbers of their own."""
        return zeros

    @property
    def kept(self) -> Scales:
        """The kind of scales that kernels have for this one."""
        return NUMBERS

    def like(self, scales: Tensor, zeros: Tensor) -> tuple[Tensor, Tensor | None]:
        """(zeros or offsets, factor) beside such scales; offsets are given as floats. For kinds that are `kept`."""
        return zeros, None


class Numbers(_Kind, frozen=True, tag="numbers"):
    """A float16, bfloat16 or float32 for each group."""

    bits: ClassVar[int] = 16

    def fit(self, scales: Tensor, largest: Tensor) -> tuple[Tensor, Tensor | None]:
        return scales, None

    def plain(self, scales: Tensor, factor: Tensor | None) -> Tensor:
        return scales

    def spacing(self, factor: Tensor | None) -> Spacing:
        return Spacing(11, HALF.smallest_normal, HALF.max)

    def stored(self, scales: Tensor, factor: Tensor | None) -> Tensor:
        return scales.to(torch.float16)


class Exponents(_Kind, frozen=True, tag="exponents"):
    """A power of two for each group (e8m0 of OCP Microscaling Formats 1.0): uint8, 2^(byte - 127). 255 is NaN."""

    bits: ClassVar[int] = 8
    told: ClassVar[dict[str, str]] = {"scale_dtype": "torch.uint8"}

    def fit(self, scales: Tensor, largest: Tensor) -> tuple[Tensor, Tensor | None]:
        """The next powers of two that are not smaller, so that nothing saturates."""
        return (scales.log2().ceil().clamp(-127, 127) + 127).to(torch.uint8), None

    def plain(self, scales: Tensor, factor: Tensor | None) -> Tensor:
        ones = torch.ones(scales.shape, device=scales.device)
        return torch.ldexp(ones, scales.to(torch.int32) - 127)

    def spacing(self, factor: Tensor | None) -> Spacing:
        return Spacing(1, 2.0**-126, 2.0**126)

    def stored(self, scales: Tensor, factor: Tensor | None) -> Tensor:
        return (scales.frexp().exponent + 126).to(torch.uint8)


class TwoLevel(_Kind, frozen=True, tag="two_level"):
    """A float8 e4m3 for each group times the factor; `divided`: the factor divides it."""

    bits: ClassVar[int] = 8
    told: ClassVar[dict[str, str]] = {"scale_dtype": "torch.float8_e4m3fn"}
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

    def spacing(self, factor: Tensor | None) -> Spacing:
        assert factor is not None
        number = float(factor)
        return Spacing(4, SMALLEST_E4M3, E4M3.max, SMALLEST_E4M3, 1 / number if self.divided else number)

    def stored(self, scales: Tensor, factor: Tensor | None) -> Tensor:
        assert factor is not None
        return (scales * factor if self.divided else scales / factor).to(torch.float8_e4m3fn)


class SuperGroups(_Kind, frozen=True, tag="super_groups"):
    """An int8 for each group times the factor of its super-group of so many groups: float16 [out, super-groups, 1], in
    units of 2^-shift. Offsets (codes.Shifted) are int8 too, and their factors make the last dimension 2. Such weights
    are only read."""

    bits: ClassVar[int] = 8
    strategy: ClassVar[str] = "super_group"

    groups: int
    shift: int = 0  # type: ignore[misc]

    @property
    def held_bits(self) -> float:  # type: ignore[override]
        return 8 + 16 / self.groups

    def fit(self, scales: Tensor, largest: Tensor) -> tuple[Tensor, Tensor | None]:
        raise UnsupportedError("weights with scales of super-groups are read, and not written")

    def plain(self, scales: Tensor, factor: Tensor | None) -> Tensor:
        return self.numbers(scales, factor, 0)

    def offsets(self, zeros: Tensor, factor: Tensor | None) -> Tensor:
        has_offsets = factor is not None and factor.shape[-1] == 2
        return self.numbers(zeros, factor, 1) if has_offsets else zeros

    def numbers(self, stored: Tensor, factor: Tensor | None, which: int) -> Tensor:
        """int8 [out, groups] times the factors [..., which], float32."""
        assert factor is not None
        factors = factor[..., which].float() * 2.0**-self.shift
        return factors.repeat_interleave(self.groups, -1) * stored.float()

    @property
    def kept(self) -> Scales:
        return self

    def like(self, scales: Tensor, zeros: Tensor) -> tuple[Tensor, Tensor | None]:
        shifted = zeros.is_floating_point()
        factor = torch.zeros(len(scales), scales.shape[1] // self.groups, 2 if shifted else 1, dtype=torch.float16)
        return zeros.to(torch.int8) if shifted else zeros, factor


NUMBERS = Numbers()
EXPONENTS = Exponents()
Scales = Numbers | Exponents | TwoLevel | SuperGroups
