"""What a layer needs of the other ranks of its engine."""

from __future__ import annotations

from typing import Protocol

from torch import Tensor

from lmkit.kernels.ops import Places


class Ranks(Protocol):
    """The ranks of an engine whose layers several processes share (models.shard)."""

    def sum(self, x: Tensor) -> Tensor:
        """The sum of all ranks' float32 x [T, hidden], the same bits on each. It may be x itself, overwritten."""

    def side_by_side(self, x: Tensor) -> Tensor:
        """All ranks' float32 x [R, part] side by side on rank 0. Other ranks get no rows."""

    def agree(self, experts: Tensor) -> None:
        """Make the chosen experts int64 [T, k] those of rank 0, if the others may have chosen others."""

    def exchange(self, y: Tensor, places: Places) -> None:
        """Fill in the rows of float32 y [T * k, hidden] that belong to experts of other ranks. `places` has the same
        order on all ranks, and as `active` the experts of this one."""
