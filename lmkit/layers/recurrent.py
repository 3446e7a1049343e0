"""What blocks that keep a state for each sequence have in common (see kernels.recurrent)."""

from __future__ import annotations

from collections.abc import Iterator

from torch import Tensor

from lmkit.kernels import ops
from lmkit.kernels.ops import BatchGeometry, Norm
from lmkit.kernels.recurrent import RecurrentStates
from lmkit.kernels.registry import Implementation
from lmkit.layers.block import At, Forward, Parts
from lmkit.layers.ranks import Ranks


class Recurrence(Forward):
    """Its op `advance` takes the tokens of each sequence in order, and moves the states on."""

    use: str  # a name of the block, for messages

    def __init__(self, parts: Parts, advance: Implementation) -> None:
        self.parts, self.advance = parts, advance
        self._gather = ops.embedding.select(parts.device)

    def vector(self, role: str) -> Tensor:
        """A small weight, float32."""
        return self.parts.vector(role).float()

    @staticmethod
    def states(at: At | None) -> tuple[RecurrentStates, Tensor, BatchGeometry]:
        """The last three arguments of such an op."""
        assert at is not None
        assert at.kv.states is not None
        return at.kv.states, at.batch.state_rows, at.batch.geometries[at.kv.group]

    def logit_rows(self, x: Tensor, norm: Norm | None, at: At, stream: Tensor) -> tuple[Tensor, Tensor]:
        """See Forward. The states take all tokens."""
        inner, rows = self.inner(x, norm, at), at.batch.logit_rows
        return self._gather(inner, rows).to(inner.dtype), self._gather(stream, rows)

    def join(self, ranks: Ranks, split: Ranks | None) -> Ranks | None:
        """See Forward. Each rank has all of it."""
        return None

    def captured(self) -> Iterator[tuple[str, Implementation]]:
        """See Forward."""
        yield self.use, self.advance
