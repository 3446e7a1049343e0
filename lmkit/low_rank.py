"""LowRank: what an adapter adds to one linear; LowRanks: what several add."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
MAX_RANK = 512
PANEL = 64  # columns of a matrix that a CPU's kernel takes at a time


@dataclass(frozen=True)
class LowRank:
    """An addition to a linear: scale * (x A^T) B^T (LoRA, arXiv 2106.09685).

    In panels, as a CPU reads them from start to end, a matrix [rank, n] is [ceil(n / PANEL), rank, PANEL], with zeros
    after its last column.
    """

    a: Tensor  # [rank, in], of DTYPES
    b: Tensor  # [rank, out] in the same dtype: the transpose of B
    scale: float

    def product(self) -> Tensor:
        """What it adds to the weight, float32 [out, in]."""
        return self.scale * (self.b.float().T @ self.a.float())

    def in_panels(self) -> LowRank:
        return LowRank(_panels(self.a), _panels(self.b), self.scale)


def _panels(matrix: Tensor) -> Tensor:
    if matrix.dim() == 3:
        return matrix
    padded = torch.nn.functional.pad(matrix, (0, -matrix.shape[1] % PANEL))
    return padded.view(len(matrix), -1, PANEL).transpose(0, 1).contiguous()


@dataclass(frozen=True)
class Columns:
    """`size` columns of a tensor, in groups of `width` whose starts lie `stride` apart."""

    start: int
    width: int
    stride: int
    size: int


class LowRanks:
    """The additions of several adapters to one linear, by the adapter's number. Kernels read `addresses`, and those of
    CPUs expect panels.
    """

    FIELDS = 5  # of an entry: A or 0, B, rank, number of the dtype, bits of the scale

    def __init__(self, count: int, device: str = "cpu") -> None:
        self.entries: list[LowRank | None] = [None] * count
        self.addresses = torch.zeros(count, self.FIELDS, dtype=torch.int64, device=device)

    def set(self, number: int, entry: LowRank | None) -> None:
        self.entries[number] = entry
        self.addresses[number] = 0
        if entry is not None:
            kind = DTYPES.index(entry.a.dtype)
            scale = int(torch.tensor(entry.scale, dtype=torch.float32).view(torch.int32))
            fields = [entry.a.data_ptr(), entry.b.data_ptr(), entry.a.shape[-2], kind, scale]
            self.addresses[number] = torch.tensor(fields)


Parts = Sequence[tuple[LowRanks, Columns]]  # linears of one input, and the places of their outputs
Add = Callable[[Tensor], None]  # adds what adapters add to the parts, to their outputs


class AdapterRows(NamedTuple):
    """The adapters of the rows of a step."""

    numbers: Tensor  # int32 [T], -1 = none
    order: Tensor | None = None  # int32 [T]: the rows by adapter, those with none last; None: no kernel asks for it
