"""Quantized weights in panels of `tile` outputs, so that a micro-kernel reads one contiguous stream:

    8 bits   uint8 [panels, K/4, tile, 4]: four inputs of one output side by side
    4 bits   uint8 [panels, K/8, tile, 4]: the low nibbles hold one quad of inputs, the high nibbles the next quad
    scales, zeros [panels, groups, tile]

K is padded to whole groups and N to whole panels. On ARM a quad may be eight inputs, and codes of 8 bits may be signed
(dots.py). Codes of 8 bits that lie close together, and are at most 16, are stored as their numbers in 4 bits.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from lmkit.codes import close
from lmkit.kernels.cpu import tiles
from lmkit.kernels.cpu.dots import BLOCK, LOOKED_UP, Dot, dot_for
from lmkit.kernels.cpu.isa import Isa
from lmkit.kernels.cpu.panels import padded, to_panels
from lmkit.kernels.cpu.plane_tiles import Planes
from lmkit.qtensor import QTensor, plain

QUADS = {4: torch.int32, 8: torch.int64}  # a type as wide as so many codes
SEGMENT = 512  # a whole-row group is computed as groups of this size with equal scales


class Stored(NamedTuple):
    """What micro-kernels of such a weight are compiled for; see plane_tiles.Planes."""

    bits: int  # of stored codes: 4 or 8
    half_scales: bool  # float16, else float32
    values: tuple[int, ...] = ()  # not empty: the codes that stored numbers of 4 bits stand for

    def dot(self, isa: Isa) -> Dot:
        return dot_for(isa, self.bits)


@dataclass(frozen=True)
class PackedWeight:
    """Panels of one linear; see the module's docstring."""

    codes: Tensor
    scales: Tensor
    zeros: Tensor
    out_features: int
    in_features: int
    group_size: int  # of the panels, a multiple of 32
    whole_row: bool  # one activation scale per row
    values: tuple[int, ...]  # not empty: the codes that the stored numbers stand for
    activation: str | None  # not None: panels of gates alternate with panels of up; out_features counts both
    form: Stored | Planes
    groups: int  # of a row
    width: int  # outputs of a panel


def accepts(
    code_bits: int, /, *, group_size: int, bits: int | None = None, values: tuple[int, ...] = (), **traits: Any
) -> str | None:
    if bits not in (None, code_bits):
        return f"{bits} bits"
    block = LOOKED_UP if _close(values) else BLOCK
    if group_size != -1 and (group_size < block or group_size % block):
        return f"group_size {group_size} is not a multiple of {block}"
    if max(group_size, SEGMENT) * 127 >= tiles.LARGEST_SUM:
        return f"group_size {group_size} overflows the sums of activations"
    return None


def pack(isa: Isa, weight: QTensor, activation: str | None = None) -> PackedWeight:
    """Rearrange codes, scales and zeros into panels of `isa.int_tile` outputs."""
    weight = plain(weight)
    out_features, in_features = weight.codes.shape
    whole_row = weight.scheme.group_size == -1
    group = min(SEGMENT, -(-in_features // BLOCK) * BLOCK) if whole_row else weight.scheme.group_size
    groups = -(-in_features // group)
    stored, zeros, values = weight.codes, weight.zeros, _close(weight.scheme.codes.values)
    if values:
        stored, zeros = numbers_of(stored, weight.scheme.codes.values), zeros - min(weight.scheme.codes.values)
    bits = 4 if values else weight.scheme.bits
    width, dot = isa.int_tile, dot_for(isa, bits)

    whole = padded(stored, group)
    flipped = whole ^ dot.flipped if dot.flipped else whole.contiguous()
    quads = to_panels(flipped.view(QUADS[dot.inputs]), width, activation is not None)
    codes = quads.view(torch.uint8)  # [panels, K/4, width * 4]
    if bits == 4:
        codes = codes[:, 0::2] | codes[:, 1::2] << 4
    kept = weight.scales if weight.scales.dtype == torch.float16 else weight.scales.float()
    of_groups = (kept, zeros ^ dot.flipped)
    scales, zeros = (to_panels(x.expand(-1, groups), width, activation is not None) for x in of_groups)
    form = Stored(bits, kept.dtype == torch.float16, values)
    return PackedWeight(
        codes, scales, zeros, out_features, in_features, group, whole_row, values, activation, form, groups, width
    )


def _close(values: tuple[int, ...]) -> tuple[int, ...]:
    """The codes less the smallest one, if they can be looked up. () if not, or if there are none."""
    return tuple(value - min(values) for value in values) if values and close(values) else ()


def numbers_of(codes: Tensor, values: tuple[int, ...]) -> Tensor:
    """The number of each code among `values`."""
    table = torch.zeros(256, dtype=torch.uint8)
    for number, value in reversed([*enumerate(values)]):
        table[value] = number
    return table[codes.int()]
