"""Quantized weights in panels of `tile` outputs, so that a micro-kernel reads one contiguous stream:

    8 bits   uint8 [panels, K/4, tile, 4]: four inputs of one output side by side
    4 bits   uint8 [panels, K/8, tile, 4]: the low nibbles hold one quad of inputs, the high nibbles the next quad
    scales, zeros [panels, groups, tile]

K is padded to whole groups and N to whole panels. On ARM a quad may be eight inputs, and codes of 8 bits may be signed
(dots.py).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from lmkit.kernels.cpu import tiles
from lmkit.kernels.cpu.dots import BLOCK, dot_for
from lmkit.kernels.cpu.isa import Isa
from lmkit.kernels.cpu.panels import to_panels
from lmkit.qtensor import QTensor

QUADS = {4: torch.int32, 8: torch.int64}  # a type as wide as so many codes
SEGMENT = 512  # a whole-row group is computed as groups of this size with equal scales


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
    activation: str | None  # not None: panels of gates alternate with panels of up; out_features counts both

    @property
    def width(self) -> int:
        """Outputs of a panel."""
        return self.scales.shape[2]


def accepts(code_bits: int, /, *, group_size: int, bits: int | None = None, **traits: Any) -> str | None:
    if bits not in (None, code_bits):
        return f"{bits} bits"
    if group_size != -1 and (group_size < BLOCK or group_size % BLOCK):
        return f"group_size {group_size} is not a multiple of {BLOCK}"
    if max(group_size, SEGMENT) * 127 >= tiles.LARGEST_SUM:
        return f"group_size {group_size} overflows the sums of activations"
    return None


def pack(isa: Isa, weight: QTensor, activation: str | None = None) -> PackedWeight:
    """Rearrange codes, scales and zeros into panels of `isa.int_tile` outputs."""
    out_features, in_features = weight.codes.shape
    whole_row = weight.scheme.group_size == -1
    group = min(SEGMENT, -(-in_features // BLOCK) * BLOCK) if whole_row else weight.scheme.group_size
    groups = -(-in_features // group)
    width, dot = isa.int_tile, dot_for(isa, weight.scheme.bits)

    padded = torch.nn.functional.pad(weight.codes, (0, groups * group - in_features)) ^ dot.flipped
    quads = to_panels(padded.view(QUADS[dot.inputs]), width, activation is not None)
    codes = quads.view(torch.uint8)  # [panels, K/4, width * 4]
    if weight.scheme.bits == 4:
        codes = codes[:, 0::2] | codes[:, 1::2] << 4
    kept = weight.scales if weight.scales.dtype == torch.float16 else weight.scales.float()
    of_groups = (kept, weight.zeros ^ dot.flipped)
    scales, zeros = (to_panels(x.expand(-1, groups), width, activation is not None) for x in of_groups)
    return PackedWeight(codes, scales, zeros, out_features, in_features, group, whole_row, activation)
