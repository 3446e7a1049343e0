"""Weights of linears on exact activations, in panels of `width` outputs, so that a micro-kernel reads one contiguous
stream:

    float    [panels, K, width] float32 or float16
    bfloat16 [panels, K/2, width, 2]: two inputs of an output side by side, as instructions on bfloat16 want them
    4 bits   uint8 [panels, K/2, width]: an even input in the low nibble, the next in the high one
    8 bits   uint8 [panels, K, width]: integers, or the bits of float8 e4m3
    scales   float32 [panels, groups, width] of codes, and zeros of the same shape if they are integers
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from lmkit.kernels.cpu import tiles
from lmkit.kernels.cpu.isa import Isa
from lmkit.kernels.cpu.panels import padded, to_panels
from lmkit.qtensor import QTensor, plain

PAIRED_INPUTS = 32  # bfloat16 panels hold whole blocks of so many inputs
CODE_BITS = {tiles.CODES4: 4, tiles.CODES8: 8, tiles.FLOAT8: 8}
BFLOAT16 = "bfloat16"
KINDS = {torch.float32: "float32", torch.bfloat16: BFLOAT16, torch.float16: "float16"}


@dataclass(frozen=True)
class PackedDense:
    """Panels of one linear; see the module's docstring. `scales` and `zeros` belong to codes."""

    data: Tensor
    kind: str  # of KINDS, or of CODE_BITS
    out_features: int
    in_features: int
    activation: str | None  # not None: panels of gates alternate with panels of up; out_features counts both
    group_size: int = 1
    scales: Tensor | None = None
    zeros: Tensor | None = None

    @property
    def width(self) -> int:
        """Outputs of a panel."""
        return self.data.shape[2]

    @property
    def groups(self) -> int:
        """Groups in a row, or 0."""
        return 0 if self.scales is None else self.scales.shape[1]


def pack_dense(isa: Isa, weight: Tensor, activation: str | None = None) -> PackedDense:
    out_features, in_features = weight.shape
    kind, gated = KINDS[weight.dtype], activation is not None
    if kind != BFLOAT16:
        return PackedDense(to_panels(weight, isa.float_tile, gated), kind, out_features, in_features, activation)
    pairs = padded(weight, PAIRED_INPUTS).contiguous().view(torch.int32)
    panels = to_panels(pairs, isa.float_tile, gated).view(weight.dtype).unflatten(-1, (isa.float_tile, 2))
    return PackedDense(panels, kind, out_features, in_features, activation)


def pack_codes(isa: Isa, kind: str, weight: QTensor, activation: str | None = None) -> PackedDense:
    """Pack codes. `kind` is one of CODE_BITS."""
    weight = plain(weight)
    (out_features, in_features), group_size = weight.codes.shape, weight.scheme.group_size
    group, codes = in_features if group_size == -1 else group_size, weight.codes.view(torch.uint8)
    if kind == tiles.CODES4:
        codes = to_panels(padded(codes, 2), isa.float_tile, activation is not None)
        codes = codes[:, 0::2] | codes[:, 1::2] << 4
    else:
        codes = to_panels(codes, isa.float_tile, activation is not None)
    scales = to_panels(weight.scales.float(), isa.float_tile, activation is not None)
    zeros = None if kind == tiles.FLOAT8 else to_panels(weight.zeros.float(), isa.float_tile, activation is not None)
    return PackedDense(codes, kind, out_features, in_features, activation, group, scales, zeros)
