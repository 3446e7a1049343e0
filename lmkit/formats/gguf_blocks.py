"""GGUF's quantized types: what the bytes of a block hold. A weight is scale * code, minus an offset in some types.

    Q4_0 Q5_0 Q8_0      32 weights: float16 scale, codes of 4, 5 or 8 bits
    Q4_1 Q5_1           the same with a float16 minimum
    IQ4_NL              32 weights: float16 scale, 4-bit places in a table of 16 codes
    MXFP4               32 weights: an exponent, places in a table of twice the numbers of float4
    IQ4_XS              256 weights: float16 d, for each 32 a 6-bit s (scale = d s), 4-bit places in the same table
    Q3_K Q6_K           256 weights: float16 d, for each 16 a signed s of 6 or 8 bits, codes of 3 or 6 bits
    Q2_K                256 weights: float16 d and m, for each 16 two 4-bit factors: scale = d s, offset = m t
    Q4_K Q5_K           256 weights: float16 d and m, for each 32 two 6-bit factors: scale = d s, offset = m t
    TQ1_0 TQ2_0         256 weights: float16 scale, codes -1, 0 and 1 as digits of base 3, five to a byte, or of 2 bits
    IQ1 to IQ3          256 weights: gguf_grids.py

All arithmetic is that of llama.cpp, in float32 and in its order, so the values have the same bits.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from lmkit.formats.gguf_coded import Coded, groups, half, unpack
from lmkit.formats.gguf_grids import GRIDDED

CHUNK = 1 << 15  # blocks decoded at a time
FLOAT4 = (0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12)
IQ4 = (-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113)


def values(storage: str, raw: Tensor, nbytes: int) -> Tensor:
    """The weights float32 [n] of blocks of `nbytes`, uint8 [bytes]."""
    parts = []
    for part in raw.view(-1, nbytes).split(CHUNK):
        coded = CODED[storage](part)
        scales, offsets = coded.numbers()
        weights = scales[..., None] * coded.codes.float()
        parts.append((weights if offsets is None else weights - offsets[..., None]).flatten())
    return torch.cat(parts)


def _q4_0(b: Tensor) -> Coded:
    return Coded(groups(unpack(b[:, 2:], 4, 16) - 8, 32), half(b, 0))


def _q4_1(b: Tensor) -> Coded:
    return Coded(groups(unpack(b[:, 4:], 4, 16), 32), half(b, 0), -half(b, 2))


def _q5_0(b: Tensor) -> Coded:
    return Coded(groups(_five(b[:, 6:], b[:, 2:6]) - 16, 32), half(b, 0))


def _q5_1(b: Tensor) -> Coded:
    return Coded(groups(_five(b[:, 8:], b[:, 4:8]), 32), half(b, 0), -half(b, 2))


def _five(low: Tensor, high: Tensor) -> Tensor:
    return unpack(low, 4, 16) | unpack(high, 1, 1) << 4


def _q8_0(b: Tensor) -> Coded:
    return Coded(groups(b[:, 2:].contiguous().view(torch.int8), 32), half(b, 0))


def _q2_k(b: Tensor) -> Coded:
    both = groups(unpack(b[:, :16], 4, 1), 2)
    codes = groups(unpack(b[:, 16:80], 2, 32), 16)
    return Coded(codes, both[..., 0], both[..., 1], torch.cat([half(b, 80), half(b, 82)], 1))


def _q3_k(b: Tensor) -> Coded:
    codes = unpack(b[:, 32:96], 2, 32) + 4 * unpack(b[:, :32], 1, 32) - 4
    scales = (unpack(b[:, 96:104], 4, 8) | unpack(b[:, 104:108], 2, 4) << 4) - 32
    return Coded(groups(codes, 16), scales, factors=half(b, 108))


def _q4_k(b: Tensor) -> Coded:
    return Coded(groups(unpack(b[:, 16:], 4, 32), 32), *_six_bit_factors(b))


def _q5_k(b: Tensor) -> Coded:
    codes = unpack(b[:, 48:], 4, 32) | unpack(b[:, 16:48], 1, 32) << 4
    return Coded(groups(codes, 32), *_six_bit_factors(b))


def _six_bit_factors(b: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """(scales, offsets, factors) of 8 groups: of bytes 4 .. 15, the first four hold s 0 .. 3, the next t 0 .. 3, in 6
    bits. The last hold the low 4 bits of s and t 4 .. 7, whose high bits are above those of the first."""
    first, second, third = (b[:, at : at + 4].to(torch.int16) for at in (4, 8, 12))
    s = torch.cat([first & 63, third & 15 | first >> 2 & 48], dim=1)
    t = torch.cat([second & 63, third >> 4 | second >> 2 & 48], dim=1)
    return s.to(torch.int8), t.to(torch.int8), torch.cat([half(b, 0), half(b, 2)], 1)


def _q6_k(b: Tensor) -> Coded:
    codes = (unpack(b[:, :128], 4, 64) | unpack(b[:, 128:192], 2, 32) << 4) - 32
    return Coded(groups(codes, 16), b[:, 192:208].contiguous().view(torch.int8), factors=half(b, 208))


def _tq1_0(b: Tensor) -> Coded:
    parts = (b[:, :32], 32, 5), (b[:, 32:48], 16, 5), (b[:, 48:52], 4, 4)
    codes = torch.cat([_digits(*part) for part in parts], dim=1)
    return Coded(groups(codes - 1, 256), half(b, 52))


def _tq2_0(b: Tensor) -> Coded:
    return Coded(groups(unpack(b[:, :64], 2, 32) - 1, 256), half(b, 64))


def _digits(packed: Tensor, width: int, count: int) -> Tensor:
    """uint8 [blocks, bytes] -> int8 [blocks, values]: a byte is a fraction of 256, of `count` digits in base 3. Of each
    `width` bytes, the first digits come first."""
    powers = torch.tensor([3**i for i in range(count)], dtype=torch.uint8)
    rests = packed.reshape(len(packed), -1, 1, width) * powers[:, None]  # modulo 256
    return (rests.to(torch.int16) * 3 >> 8).to(torch.int8).reshape(len(packed), -1)


def _iq4_nl(b: Tensor) -> Coded:
    return Coded(groups(_from_table(b[:, 2:], IQ4), 32), half(b, 0))


def _iq4_xs(b: Tensor) -> Coded:
    scales = (unpack(b[:, 4:8], 4, 1) | unpack(b[:, 2:4], 2, 1) << 4) - 32
    return Coded(groups(_from_table(b[:, 8:], IQ4), 32), scales, factors=half(b, 0))


def _mxfp4(b: Tensor) -> Coded:
    """Of the exponents, 255 is no number; a scale is half of 2 ** (e - 127), as codes are twice the values."""
    exponents = b[:, :1].to(torch.int32)
    scales = torch.ldexp(torch.ones(exponents.shape), exponents - 128)
    return Coded(groups(_from_table(b[:, 1:], FLOAT4), 32), scales.where(exponents < 255, torch.nan))


def _from_table(packed: Tensor, table: tuple[int, ...]) -> Tensor:
    return torch.tensor(table, dtype=torch.int8)[unpack(packed, 4, 16).long()]


CODED: dict[str, Callable[[Tensor], Coded]] = {
    "Q4_0": _q4_0, "Q4_1": _q4_1, "Q5_0": _q5_0, "Q5_1": _q5_1, "Q8_0": _q8_0, "Q2_K": _q2_k, "Q3_K": _q3_k,
    "Q4_K": _q4_k, "Q5_K": _q5_k, "Q6_K": _q6_k, "IQ4_NL": _iq4_nl, "IQ4_XS": _iq4_xs,
    "MXFP4": _mxfp4, "TQ1_0": _tq1_0, "TQ2_0": _tq2_0, **GRIDDED,
}  # fmt: skip
