"""Blocks that read the same input, and whose outputs are added: what computes ParallelSpec."""

from __future__ import annotations

from collections.abc import Iterator

from torch import Tensor

from lmkit.kernels import ops
from lmkit.kernels.ops import Norm
from lmkit.kernels.registry import Implementation
from lmkit.layers.block import At, Forward, Parts
from lmkit.layers.linear import MergedLinear
from lmkit.layers.ranks import Ranks


class Parallel(Forward):
    """The input is normalized once. There is no single last linear: what both give is summed first."""

    def __init__(self, mixer: Forward, beside: Forward, parts: Parts, *, recurs: bool) -> None:
        """`recurs`: the second block keeps a state, too."""
        self.mixer, self.beside, self.recurs = mixer, beside, recurs
        self._rms_norm = ops.rms_norm.select(parts.device)
        self._gather = ops.embedding.select(parts.device)

    @property
    def members(self) -> tuple[Forward, ...]:
        return self.mixer, self.beside

    @property
    def linears(self) -> tuple[MergedLinear, ...]:
        return (*self.mixer.linears, *self.beside.linears)

    def __call__(self, x: Tensor, norm: Norm | None = None, at: At | None = None) -> Tensor:
        """See Forward."""
        x = x if norm is None else self._rms_norm(x, norm)
        return self.mixer(x, None, at) + self.beside(x, None, at)

    def logit_rows(self, x: Tensor, norm: Norm | None, at: At, stream: Tensor) -> tuple[Tensor, Tensor]:
        """See Forward. It gives the contribution itself, which `project` passes on."""
        x = x if norm is None else self._rms_norm(x, norm)
        other = self.beside.logit_rows(x, None, at, stream)[0] if self.recurs else None
        inner, stream = self.mixer.logit_rows(x, None, at, stream)
        if not len(stream):
            return stream, stream
        if other is None:
            rows = self._gather(x, at.batch.logit_rows).to(x.dtype)
            return self.mixer.project(inner) + self.beside(rows, None, at), stream
        return self.mixer.project(inner) + self.beside.project(other), stream

    def project(self, inner: Tensor) -> Tensor:
        """See `logit_rows`."""
        return inner

    def join(self, ranks: Ranks, split: Ranks | None) -> Ranks | None:
        """See Forward. The ranks add up the sum."""
        for member in self.members:
            member.join(ranks, split)
        return split

    def captured(self) -> Iterator[tuple[str, Implementation]]:
        """See Forward."""
        for member in self.members:
            yield from member.captured()
        yield "norms", self._rms_norm
