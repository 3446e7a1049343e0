"""What blocks of GGUF's quantized types hold, and how bits are taken out of their bytes."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor


class Coded(NamedTuple):
    """w = scales * codes - offsets."""

    codes: Tensor  # int8 [blocks, groups, weights of a group]
    scales: Tensor  # float32 [blocks, groups], or int8 if there are factors
    offsets: Tensor | None = None  # as scales
    factors: Tensor | None = None  # float32 [blocks, 1], or [blocks, 2] with offsets: what scales and offsets are times

    def numbers(self) -> tuple[Tensor, Tensor | None]:
        """(scales, offsets) as float32."""
        if self.factors is None:
            return self.scales, self.offsets
        offsets = None if self.offsets is None else self.factors[:, 1:] * self.offsets.float()
        return self.factors[:, :1] * self.scales.float(), offsets


def unpack(packed: Tensor, bits: int, width: int) -> Tensor:
    """uint8 [blocks, bytes] -> int8 [blocks, values]. Of each `width` bytes, the lowest `bits` come first."""
    shifts = torch.arange(0, 8, bits, dtype=torch.uint8)
    found = packed.reshape(len(packed), -1, 1, width) >> shifts[:, None] & ((1 << bits) - 1)
    return found.reshape(len(packed), -1).view(torch.int8)


def half(blocks: Tensor, at: int) -> Tensor:
    """The float16 at a byte of each block, float32 [blocks, 1]."""
    return blocks[:, at : at + 2].contiguous().view(torch.float16).float()


def groups(codes: Tensor, size: int) -> Tensor:
    return codes.view(len(codes), -1, size)
