"""What the codes of a quantized weight stand for: values that answer for their kind of code.

A new kind is a class here, a packer in formats and kernels that read it.
"""

from __future__ import annotations

from typing import ClassVar

import msgspec
import torch
from torch import Tensor

MAX_LOOKED_UP = 32  # the largest code that kernels look up with neighbours: see kernels.cpu.dots.PmaddNibbles


class Integers(msgspec.Struct, frozen=True, tag="integers"):
    """A uniform grid: w = (code - zero) * scale. A symmetric weight has the zero 2**(bits-1) everywhere."""

    element: ClassVar[torch.dtype] = torch.uint8  # of the tensor of codes
    type: ClassVar[str] = "int"  # as recipes and compressed-tensors name it
    inputs: ClassVar[str] = "int8"  # the type that inputs of such weights are rounded to for 8-bit products
    uniform: ClassVar[bool] = True  # codes have zeros
    stretch: ClassVar[float] = 1.0  # of the range of weights, the most that a grid may span
    levels: ClassVar[tuple[float, ...]] = ()  # steps that a code may stand for, ascending; none: all whole ones

    bits: int  # 2 to 8
    symmetric: bool = False
    values: tuple[int, ...] = ()  # the only codes that occur, if known: at most 16, which a kernel may number

    @property
    def in_planes(self) -> bool:
        """See QuantScheme.in_planes."""
        return self.bits not in (4, 8) or bool(self.values and self.symmetric and not close(self.values))

    def __str__(self) -> str:
        return f"int{self.bits}"

    @property
    def words(self) -> str:
        """What a message calls them."""
        return f"{self.bits}-bit integers"

    @property
    def middle(self) -> int:
        """The zero of a symmetric weight."""
        return 1 << (self.bits - 1)

    def suits(self, zeros: Tensor) -> bool:
        """Whether a weight with these zeros is symmetric."""
        return bool((zeros == self.middle).all())

    def made_symmetric(self) -> Integers:
        """The codes of a weight whose zeros are all in the middle."""
        return msgspec.structs.replace(self, symmetric=True)

    def zeros(self, groups: tuple[int, ...]) -> Tensor:
        """The zeros of a symmetric weight with scales [..., out, groups] of this shape."""
        return torch.full(groups, self.middle, dtype=torch.uint8)

    def weights(self, codes: Tensor, scales: Tensor, zeros: Tensor) -> Tensor:
        """The weights float32 [..., groups, inputs] of such codes, and of scales float32 and zeros [..., groups]."""
        return codes.float().sub_(zeros.float().unsqueeze(-1)).mul_(scales.unsqueeze(-1))

    def steps(self, codes: Tensor, zeros: Tensor) -> Tensor:
        """The weights of codes in units of their scale, float32, of the shape of `codes`. zeros float32 broadcast."""
        return codes.float() - zeros

    def nearest_steps(self, numbers: Tensor, zeros: Tensor) -> Tensor:
        """The steps nearest to float32 numbers in units of the scale."""
        return torch.minimum(torch.maximum(numbers.round(), -zeros), (1 << self.bits) - 1 - zeros)

    @property
    def largest(self) -> float:
        """The largest step of a symmetric grid."""
        return float(self.middle - 1)

    def of_steps(self, steps: Tensor, zeros: Tensor) -> Tensor:
        """The codes of steps; the inverse of `steps`."""
        return (steps + zeros).to(self.element)

    @property
    def plain(self) -> Integers:
        """The codes that kernels have for this kind."""
        return self

    def as_plain(self, codes: Tensor, scales: Tensor, zeros: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """The codes, scales and zeros of the same weight in `plain` codes."""
        return codes, scales, zeros


class Shifted(msgspec.Struct, frozen=True, tag="shifted"):
    """Codes with an offset for each group that is no multiple of the scale: w = code * scale - offset. The offsets, of
    the type of the scales, stand in the place of zeros. See Integers for what it answers."""

    element: ClassVar[torch.dtype] = torch.uint8
    type: ClassVar[str] = "int"
    inputs: ClassVar[str] = "int8"
    uniform: ClassVar[bool] = False
    in_planes: ClassVar[bool] = True
    symmetric: ClassVar[bool] = False
    values: ClassVar[tuple[int, ...]] = ()

    bits: int  # 2 to 5

    def __str__(self) -> str:
        return f"int{self.bits} with offsets"

    @property
    def words(self) -> str:
        return f"{self.bits}-bit codes with offsets"

    def suits(self, zeros: Tensor) -> bool:
        return False

    def made_symmetric(self) -> Shifted:
        return self

    def zeros(self, groups: tuple[int, ...]) -> Tensor:
        """Offsets of 0."""
        return torch.zeros(groups, dtype=torch.float16)

    def weights(self, codes: Tensor, scales: Tensor, zeros: Tensor) -> Tensor:
        return codes.float().mul_(scales.unsqueeze(-1)).sub_(zeros.float().unsqueeze(-1))

    @property
    def plain(self) -> Shifted:
        return self

    def as_plain(self, codes: Tensor, scales: Tensor, zeros: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        return codes, scales, zeros


class Float8(msgspec.Struct, frozen=True, tag="float8"):
    """float8 e4m3: w = code * scale. See Integers for what it answers."""

    element: ClassVar[torch.dtype] = torch.float8_e4m3fn
    type: ClassVar[str] = "float"
    inputs: ClassVar[str] = "fp8"
    uniform: ClassVar[bool] = False
    in_planes: ClassVar[bool] = False
    bits: ClassVar[int] = 8
    symmetric: ClassVar[bool] = True
    values: ClassVar[tuple[int, ...]] = ()

    def __str__(self) -> str:
        return "float8"

    @property
    def words(self) -> str:
        return "float8 weights"

    def suits(self, zeros: Tensor) -> bool:
        return True

    def made_symmetric(self) -> Float8:
        return self

    def zeros(self, groups: tuple[int, ...]) -> Tensor:
        return torch.zeros(0, dtype=torch.uint8)

    def weights(self, codes: Tensor, scales: Tensor, zeros: Tensor) -> Tensor:
        return codes.float().mul_(scales.unsqueeze(-1))

    @property
    def largest(self) -> float:
        """The largest number."""
        return torch.finfo(self.element).max

    def nearest(self, numbers: Tensor) -> Tensor:
        """The codes of the nearest numbers, those between two of the even one."""
        return numbers.clamp(-self.largest, self.largest).to(self.element)

    @property
    def plain(self) -> Float8:
        return self

    def as_plain(self, codes: Tensor, scales: Tensor, zeros: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        return codes, scales, zeros


class Codebook(msgspec.Struct, frozen=True, tag="codebook"):
    """Places in a table: w = table[code] * scale. The table is of integers times `unit`, which kernels of integers
    multiply, and look up in registers if there are 16 at most. See Integers for what it answers."""

    element: ClassVar[torch.dtype] = torch.uint8
    type: ClassVar[str] = "float"
    inputs: ClassVar[str] = "int8"
    uniform: ClassVar[bool] = False
    symmetric: ClassVar[bool] = True
    stretch: ClassVar[float] = 1.5  # numbers lie closer below the largest one: see awq_clip

    name: str
    integers: tuple[int, ...]  # of each code, -128 .. 127
    unit: float

    def __str__(self) -> str:
        return self.name

    @property
    def words(self) -> str:
        return f"{self.name} weights"

    @property
    def bits(self) -> int:
        return (len(self.integers) - 1).bit_length()

    @property
    def values(self) -> tuple[int, ...]:
        return self.plain.values

    @property
    def in_planes(self) -> bool:
        return self.plain.in_planes

    def suits(self, zeros: Tensor) -> bool:
        return True

    def made_symmetric(self) -> Codebook:
        return self

    def zeros(self, groups: tuple[int, ...]) -> Tensor:
        return torch.zeros(0, dtype=torch.uint8)

    def weights(self, codes: Tensor, scales: Tensor, zeros: Tensor) -> Tensor:
        numbers = torch.tensor(self.integers, dtype=torch.float32, device=codes.device).mul_(self.unit)
        return numbers[codes.int()].mul_(scales.unsqueeze(-1))

    @property
    def largest(self) -> float:
        return max(self.integers) * self.unit

    def nearest(self, numbers: Tensor) -> Tensor:
        """The codes of the nearest numbers, those between two of the even code."""
        order = sorted({value: place for place, value in reversed([*enumerate(self.integers)])}.items())
        values, places = (torch.tensor(part, device=numbers.device) for part in zip(*order, strict=True))
        between = (values[1:] + values[:-1]).float() * (self.unit / 2)
        below, above = (places[torch.bucketize(numbers, between, right=right)] for right in (False, True))
        return torch.where(below % 2 == 0, below, above).to(self.element)

    @property
    def levels(self) -> tuple[float, ...]:
        return tuple(value * self.unit for value in sorted(set(self.integers)))

    def steps(self, codes: Tensor, zeros: Tensor) -> Tensor:
        return torch.tensor(self.integers, dtype=torch.float32, device=codes.device).mul_(self.unit)[codes.int()]

    def nearest_steps(self, numbers: Tensor, zeros: Tensor) -> Tensor:
        levels = torch.tensor(self.levels, device=numbers.device)
        return levels[torch.bucketize(numbers, (levels[1:] + levels[:-1]) / 2)]

    def of_steps(self, steps: Tensor, zeros: Tensor) -> Tensor:
        return self.nearest(steps)

    @property
    def plain(self) -> Integers:
        return Integers(8, symmetric=True, values=tuple(value + 128 for value in self.integers))

    def as_plain(self, codes: Tensor, scales: Tensor, zeros: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        values = torch.tensor(self.plain.values, dtype=torch.uint8, device=codes.device)
        zeros = self.plain.zeros(tuple(scales.shape)).to(scales.device)
        return values[codes.int()], scales.float() * self.unit, zeros


def close(values: tuple[int, ...]) -> bool:
    """Whether codes lie so close together that their products, four at a time, fit 16 bits once they are looked up."""
    return max(values) - min(values) <= MAX_LOOKED_UP


FLOAT8 = Float8()
# A sign and one of 0, 0.5, 1, 1.5, 2, 3, 4, 6: float4 of MXFP4 and NVFP4.
E2M1 = Codebook("e2m1", (0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12), 0.5)
Codes = Integers | Shifted | Float8 | Codebook
Stepped = Integers | Codebook  # codes that stand for steps: what GPTQ and clipping choose


def stepped(codes: Codes) -> Stepped:
    """Codes that stand for steps."""
    assert isinstance(codes, Stepped)
    return codes
