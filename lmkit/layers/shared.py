"""Attention and an MLP that several layers share, before Mamba-2: what computes SharedSpec."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from lmkit.kernels import ops
from lmkit.kernels.ops import Norm
from lmkit.kernels.registry import Implementation
from lmkit.layers.attention import Attention
from lmkit.layers.block import At, Forward, Parts
from lmkit.layers.blocks.shared import SharedSpec
from lmkit.layers.linear import MergedLinear
from lmkit.layers.mamba import Mamba
from lmkit.layers.mlp import GatedMLP
from lmkit.layers.ranks import Ranks
from lmkit.layers.recurrent import Recurrence


class Shared(Recurrence):
    """Its state is that of Mamba-2."""

    out: MergedLinear

    def __init__(self, spec: SharedSpec, parts: Parts) -> None:
        self.mamba = Mamba(spec.mamba, parts)
        super().__init__(parts, self.mamba.advance)
        self.attention = Attention(spec.attention, parts)
        self.mlp = GatedMLP("mlp", spec.mlp, parts.weights, parts.device)
        self.last = MergedLinear(("shared.out",), parts.weights, parts.device)
        self.out = self.mamba.out
        self.ranks: Ranks | None = None  # which add up what attention and the MLP give
        self._rms_norm = ops.rms_norm.select(parts.device)

    @property
    def members(self) -> tuple[Forward, ...]:
        return self.attention, self.mlp, self.mamba

    @property
    def linears(self) -> tuple[MergedLinear, ...]:
        return (*self.attention.linears, *self.mlp.linears, self.last, *self.mamba.linears)

    def inner(self, x: Tensor, norm: Norm | None = None, at: At | None = None) -> Tensor:
        """See Forward. x is the stream."""
        assert at is not None
        assert at.batch.per_layer is not None
        wide = torch.cat([x, at.batch.per_layer.to(x.dtype)], dim=1)
        y = self._whole(self.attention(self._rms_norm(wide, self.parts.norm("norm.attn")), None, at), x)
        y = self.last(self._whole(self.mlp(y, self.parts.norm("norm.mlp")), x))
        return self.mamba.inner(x + y, self.parts.norm("norm.mamba"), at)

    def _whole(self, y: Tensor, x: Tensor) -> Tensor:
        """The result of a part whose linears ranks share, in the dtype of x."""
        return y if self.ranks is None else self.ranks.sum(y).to(x.dtype)

    def join(self, ranks: Ranks, split: Ranks | None) -> Ranks | None:
        """See Forward. Each rank has all of Mamba-2."""
        self.ranks = split
        for member in (self.attention, self.mlp):
            member.join(ranks, split)
        return None

    def searched(self, x: Tensor, at: At) -> Tensor:
        """See Forward: what attention gives."""
        return self.attention(x, None, at)

    def captured(self) -> Iterator[tuple[str, Implementation]]:
        """See Forward."""
        for member in self.members:
            yield from member.captured()
        yield "norms", self._rms_norm
