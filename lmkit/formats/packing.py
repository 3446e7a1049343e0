"""Codes of 2, 3, 4 or 8 bits in int32 words: in sequence, or in the interleaved order of AWQ's "gemm" layout.

In sequence, value i lies in bits b*i .. b*i + b-1 of a row. Values of 3 bits may lie in two words. In AWQ's order,
nibble i (bits 4i .. 4i+3) holds column 8c + ORDER[i]. Words are made of bytes, not of re-rounded weights and not by
shifts into a signed integer. A code therefore cannot spill into its neighbour, and the sign bit is only the top bit of
the last code. Words are viewed as bytes, which needs a little-endian machine; PyTorch needs one, too.
"""

from __future__ import annotations

import torch
from torch import Tensor

ORDER = (0, 2, 4, 6, 1, 3, 5, 7)
INVERSE = (0, 4, 1, 5, 2, 6, 3, 7)


def pack_words(codes: Tensor, bits: int) -> Tensor:
    """Codes uint8 [rows, columns], each < 2**bits -> words int32 [rows, ceil(columns * bits / 32)]. bits: 2, 3, 4 or 8.

    The last word is padded with 0.
    """
    assert codes.dtype == torch.uint8
    assert bits == 8 or codes.numel() == 0 or int(codes.max()) < 1 << bits
    if bits < 4:
        return _pack_small(codes, bits)
    padded = torch.nn.functional.pad(codes, (0, -codes.shape[1] % (32 // bits)))
    # Byte j of a word holds nibbles 2j (low) and 2j + 1 (high).
    packed = padded if bits == 8 else padded[:, 0::2] | (padded[:, 1::2] << 4)
    # Flat first: a single row counts as contiguous with any stride, and `view` to a wider type refuses some strides.
    return packed.flatten().view(torch.int32).view(len(packed), packed.shape[1] // 4)


def unpack_words(words: Tensor, bits: int, columns: int) -> Tensor:
    """Words int32 [rows, ceil(columns * bits / 32)] -> codes uint8 [rows, columns], of 2, 3, 4 or 8 bits."""
    assert words.dtype == torch.int32
    packed = words.reshape(-1).view(torch.uint8).view(len(words), 4 * words.shape[1])
    if bits < 4:
        return _unpack_small(packed, bits)[:, :columns].contiguous()
    codes = packed if bits == 8 else torch.stack((packed & 15, packed >> 4), dim=-1).flatten(-2)
    return codes[:, :columns].contiguous()


def _pack_small(codes: Tensor, bits: int) -> Tensor:
    """The inverse of `_unpack_small`, in words int32 [rows, ceil(columns * bits / 32)]."""
    rows, columns = codes.shape
    size, whole = 3 if bits == 3 else 1, -(-columns // 32)  # 32 codes fill `bits` words
    padded = torch.nn.functional.pad(codes, (0, 32 * whole - columns))
    shifts, places = torch.arange(0, 8 * size, bits), torch.arange(size) * 8
    units = (padded.view(rows, 4 * bits * whole // size, len(shifts)).int() << shifts).sum(-1)
    packed = (units[..., None] >> places & 255).to(torch.uint8)
    words = packed.flatten().view(torch.int32).view(rows, bits * whole)
    return words[:, : -(-columns * bits // 32)].clone(memory_format=torch.contiguous_format)  # with strides of its own


def _unpack_small(packed: Tensor, bits: int) -> Tensor:
    """Bytes uint8 [rows, columns] -> codes of 2 or 3 bits: 3 bytes hold 8 codes of 3, a byte holds 4 codes of 2."""
    size = 3 if bits == 3 else 1
    packed = torch.nn.functional.pad(packed, (0, -packed.shape[1] % size))
    places = torch.arange(size, dtype=torch.int32) * 8
    units = (packed.view(len(packed), packed.shape[1] // size, size).int() << places).sum(-1, dtype=torch.int32)
    shifts = torch.arange(0, 8 * size, bits, dtype=torch.int32)
    return (units[..., None] >> shifts & ((1 << bits) - 1)).to(torch.uint8).flatten(1)


def pack_awq(codes: Tensor) -> Tensor:
    """Codes uint8 [rows, columns], each < 16, columns a multiple of 8 -> words int32 [rows, columns / 8]."""
    rows, columns = codes.shape
    assert columns % 8 == 0
    return pack_words(codes.reshape(rows, columns // 8, 8)[..., list(ORDER)].flatten(1), 4)


def unpack_awq(words: Tensor) -> Tensor:
    """Words int32 [rows, columns / 8] -> codes uint8 [rows, columns]."""
    rows, num_words = words.shape
    nibbles = unpack_words(words, 4, 8 * num_words).view(rows, num_words, 8)
    return nibbles[..., list(INVERSE)].flatten(1)
