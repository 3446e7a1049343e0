"""LowRank: what an adapter adds to one linear."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
MAX_RANK = 512


@dataclass(frozen=True)
class LowRank:
    """An addition to a linear: scale * (x A^T) B^T (LoRA, arXiv 2106.09685)."""

    a: Tensor  # [rank, in], of DTYPES
    b: Tensor  # [rank, out] in the same dtype: the transpose of B
    scale: float

    def product(self) -> Tensor:
        """What it adds to the weight, float32 [out, in]."""
        return self.scale * (self.b.float().T @ self.a.float())
