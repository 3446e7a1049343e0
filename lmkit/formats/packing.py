"""Eight 4-bit codes in an int32 word, in the interleaved order of AWQ's "gemm" layout.

Nibble i (bits 4i .. 4i+3) of a word holds column 8c + ORDER[i]. Words are made of codes, two to a byte, never of
re-rounded weights or by shifting into a signed integer: a code cannot spill into its neighbour, and the sign bit is
just the top bit of the last code. Words are viewed as bytes, which needs a little-endian machine, as PyTorch does.
"""

from __future__ import annotations

import torch
from torch import Tensor

ORDER = (0, 2, 4, 6, 1, 3, 5, 7)
INVERSE = (0, 4, 1, 5, 2, 6, 3, 7)


def pack_awq(codes: Tensor) -> Tensor:
    """Codes uint8 [rows, columns], each < 16, columns a multiple of 8 -> words int32 [rows, columns / 8]."""
    assert codes.dtype == torch.uint8
    assert codes.shape[1] % 8 == 0
    assert codes.numel() == 0 or int(codes.max()) < 16
    rows, columns = codes.shape
    nibbles = codes.reshape(rows, columns // 8, 8)[..., list(ORDER)]
    words = nibbles[..., 0::2] | (nibbles[..., 1::2] << 4)  # byte j of a word = nibbles 2j (low) and 2j + 1 (high)
    return words.contiguous().view(torch.int32).squeeze(-1)


def unpack_awq(words: Tensor) -> Tensor:
    """Words int32 [rows, columns / 8] -> codes uint8 [rows, columns]."""
    assert words.dtype == torch.int32
    packed = words.unsqueeze(-1).view(torch.uint8)
    nibbles = torch.stack((packed & 15, packed >> 4), dim=-1).flatten(-2)
    return nibbles[..., list(INVERSE)].flatten(-2)
