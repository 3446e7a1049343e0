"""Copies of whole blocks within a KV cache, all parts in one launch: csrc/copy.cu."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from lmkit.kernels.cuda.module import Kernel

THREADS, THREAD_BYTES = 256, 16
_COPY = Kernel("copy.cu", "copy_blocks")


class BlockCopier:
    """Copies blocks in `parts`: uint8 [num_blocks, bytes of a block], contiguous, on one device."""

    def __init__(self, parts: Sequence[Tensor]) -> None:
        device = parts[0].device
        self._parts = parts  # keeps the memory behind these addresses alive
        self._bases = torch.tensor([part.data_ptr() for part in parts], device=device)
        self._sizes = torch.tensor([part.shape[1] for part in parts], device=device)
        self._grid = -(-max(part.shape[1] for part in parts) // (THREADS * THREAD_BYTES)), len(parts)

    def copy(self, pairs: Sequence[tuple[int, int]]) -> None:
        """Copy blocks (from, to), one pair after the other: a later pair may read a block that an earlier one wrote."""
        if pairs:
            on_cuda = self._bases.is_cuda  # from pinned memory, so that the host need not wait for the device
            here = torch.tensor(pairs, dtype=torch.int32, pin_memory=on_cuda)
            there = here.to(self._bases.device, non_blocking=on_cuda)
            _COPY(self._grid, THREADS, [self._bases, self._sizes, there, len(pairs)])
