"""What a decoder may work together with: other stages, and readers of its residual streams."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol

from torch import Tensor


class StageLink(Protocol):
    """The place of a decoder with some of the layers among the others (models.stage). They stand in a ring: the first
    has the embedding and the head, and gets what the last one sends."""

    @property
    def is_first(self) -> bool: ...

    def receive(self, num_rows: int) -> Tensor:
        """The residual stream float32 [num_rows, hidden] from the stage before. It may be overwritten."""

    def place(self, num_rows: int) -> Tensor:
        """float32 [num_rows, hidden], from which `send` takes the residual stream."""

    def send(self, num_rows: int) -> None:
        """Send what lies in `place` to the next stage."""


# Where the residual stream float32 [most tokens of a step, hidden] before some layers is kept, for what reads it
# after a step (runners.streams). The number of the layers stands for the stream after the last one, which the last
# layer then computes for all tokens.
Kept = Mapping[int, Tensor]
