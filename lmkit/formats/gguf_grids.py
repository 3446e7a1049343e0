"""GGUF's types of 1 to 3 bits: places in a grid of 4 or 8 magnitudes each, and signs.

    IQ1_S IQ1_M         grids of -1, 0 and 1, to each of which 1/8 is added or taken away
    IQ2_XXS XS S        grids of 8, 25 and 43
    IQ3_XXS, IQ3_S      grids of 8 odd numbers times 4 (the last one is 62), or of 1, 3 ... 15

A weight is d (2 s + 1) / 2^shift times such a number, with a float16 d for 256 weights and an s of 3 or 4 bits for 16
or 32. So each of them is one of at most 16 codes, which kernels look up: no weight is rounded, and it takes 3 or 4 bits
in memory, not its share of a place. data/gguf_grids.bin has the grids one after the other as indices of their numbers,
the first one in the lowest bits of a byte.
"""

from __future__ import annotations

import functools
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from lmkit.formats.gguf_coded import Coded, groups, half, unpack
from lmkit.scales import SuperGroups

FILE = Path(__file__).parents[1] / "data" / "gguf_grids.bin"
DELTA = 8  # of IQ1: codes are eighths


class Grid(NamedTuple):
    start: int  # in the file
    entries: int
    width: int  # numbers of an entry
    bits: int  # of an index
    numbers: tuple[int, ...]

    @property
    def levels(self) -> tuple[int, ...]:
        """The codes of weights, ascending."""
        if 0 in self.numbers:
            return tuple(DELTA * number + sign for number in self.numbers for sign in (-1, 1))
        return (*(-number for number in reversed(self.numbers)), *self.numbers)


TWO, THREE = (8, 25, 43), (4, 12, 20, 28, 36, 44, 52, 62)
GRIDS = {
    "IQ2_XXS": Grid(0, 256, 8, 2, TWO),
    "IQ2_XS": Grid(512, 512, 8, 2, TWO),
    "IQ2_S": Grid(1536, 1024, 8, 2, TWO),
    "IQ3_XXS": Grid(3584, 256, 4, 4, THREE),
    "IQ3_S": Grid(4096, 512, 4, 4, tuple(range(1, 16, 2))),
    "IQ1": Grid(5120, 2048, 8, 2, (-1, 0, 1)),
}
SUPER = {
    "IQ1_S": SuperGroups(8, 3), "IQ1_M": SuperGroups(16, 3), "IQ2_XXS": SuperGroups(8, 3), "IQ2_XS": SuperGroups(16, 3),
    "IQ2_S": SuperGroups(16, 3), "IQ3_XXS": SuperGroups(8, 2), "IQ3_S": SuperGroups(8),
}  # fmt: skip


@functools.cache
def _grid(name: str) -> Tensor:
    """int8 [entries, width]."""
    grid = GRIDS[name]
    size = grid.entries * grid.width * grid.bits // 8
    raw = torch.frombuffer(bytearray(FILE.read_bytes()[grid.start : grid.start + size]), dtype=torch.uint8)
    indices = unpack(raw[None], grid.bits, 1).long()
    return torch.tensor(grid.numbers, dtype=torch.int8)[indices].view(grid.entries, grid.width)


def _coded(name: str, b: Tensor, magnitudes: Tensor, signs: Tensor, small: Tensor) -> Coded:
    """`signs` uint8 [blocks, 32]: a bit for each weight. `small` are the s of groups."""
    negative = unpack(signs.reshape(len(b), -1), 1, 1).view(len(b), -1)
    codes = magnitudes.view(len(b), -1) * (1 - 2 * negative)
    return _scaled(name, codes, small, half(b, 0))


def _scaled(name: str, codes: Tensor, small: Tensor, d: Tensor) -> Coded:
    scales = (2 * small + 1).to(torch.int8)
    return Coded(groups(codes, codes.shape[1] // scales.shape[1]), scales, factors=d * 2.0 ** -SUPER[name].shift)


def _words(b: Tensor, nbytes: int) -> Tensor:
    """uint8 [blocks, bytes] -> int64 [blocks, words], each of so many bytes, the lowest first."""
    parts = b.reshape(len(b), -1, nbytes).long()
    return sum((parts[..., i] << 8 * i for i in range(1, nbytes)), parts[..., 0])


def _with_parity(bits: Tensor) -> Tensor:
    """Seven signs -> uint8 with eight, of which an even number is negative."""
    odd = bits ^ bits >> 4
    odd = odd ^ odd >> 2
    return (bits | ((odd ^ odd >> 1) & 1) << 7).to(torch.uint8)


def _four_signs(words: Tensor) -> Tensor:
    """int64 [blocks, 8] with four times 7 signs -> uint8 [blocks, 8, 4]."""
    return _with_parity(words[..., None] >> torch.arange(0, 28, 7) & 127)


def _iq2_xxs(b: Tensor) -> Coded:
    both = _words(b[:, 2:66], 4).view(len(b), 8, 2)
    places = both[..., 0, None] >> torch.arange(0, 32, 8) & 255
    return _coded("IQ2_XXS", b, _grid("IQ2_XXS")[places], _four_signs(both[..., 1]), both[..., 1] >> 28)


def _iq2_xs(b: Tensor) -> Coded:
    both = _words(b[:, 2:66], 2)
    return _coded("IQ2_XS", b, _grid("IQ2_XS")[both & 511], _with_parity(both >> 9), unpack(b[:, 66:74], 4, 1))


def _iq2_s(b: Tensor) -> Coded:
    places = b[:, 2:34].long() | unpack(b[:, 66:74], 2, 1).long() << 8
    return _coded("IQ2_S", b, _grid("IQ2_S")[places], b[:, 34:66], unpack(b[:, 74:82], 4, 1))


def _iq3_xxs(b: Tensor) -> Coded:
    words = _words(b[:, 66:98], 4)
    return _coded("IQ3_XXS", b, _grid("IQ3_XXS")[b[:, 2:66].long()], _four_signs(words), words >> 28)


def _iq3_s(b: Tensor) -> Coded:
    places = b[:, 2:66].long() | unpack(b[:, 66:74], 1, 1).long() << 8
    return _coded("IQ3_S", b, _grid("IQ3_S")[places], b[:, 74:106], unpack(b[:, 106:110], 4, 1))


def _iq1_s(b: Tensor) -> Coded:
    words = _words(b[:, 34:50], 2)
    places = b[:, 2:34].long() | (words[..., None] >> torch.arange(0, 12, 3) & 7).flatten(1) << 8
    delta = 1 - 2 * (words >> 15).to(torch.int8)
    codes = DELTA * _grid("IQ1")[places].view(len(b), 8, 32) + delta[..., None]
    return _scaled("IQ1_S", codes.flatten(1), words >> 12 & 7, half(b, 0))


def _iq1_m(b: Tensor) -> Coded:
    """d stands in the highest 4 bits of the words of scales."""
    words = _words(b[:, 48:56], 2)
    d = sum((words[:, i] >> 12 << 4 * i for i in range(1, 4)), words[:, 0] >> 12)
    marks = unpack(b[:, 32:48], 4, 1).long()
    codes = DELTA * _grid("IQ1")[b[:, :32].long() | (marks & 7) << 8] + (1 - 2 * (marks >> 3).to(torch.int8))[..., None]
    small = (words[..., None] >> torch.arange(0, 12, 3) & 7).flatten(1)
    return _scaled("IQ1_M", codes.flatten(1), small, d[:, None].to(torch.int16).view(torch.float16).float())


GRIDDED = {
    "IQ1_S": _iq1_s, "IQ1_M": _iq1_m, "IQ2_XXS": _iq2_xxs, "IQ2_XS": _iq2_xs, "IQ2_S": _iq2_s,
    "IQ3_XXS": _iq3_xxs, "IQ3_S": _iq3_s,
}  # fmt: skip


def levels(name: str) -> tuple[int, ...]:
    """The codes of a type's weights, ascending."""
    return GRIDS["IQ1" if name.startswith("IQ1") else name].levels
