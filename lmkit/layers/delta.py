"""Linear attention by the gated delta rule: a block that keeps one state for each sequence (see kernels.delta)."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import torch
from torch import Tensor

from lmkit.kernels import ops
from lmkit.kernels.delta import DeltaWeights
from lmkit.kernels.ops import Norm
from lmkit.kernels.registry import Implementation
from lmkit.layers.block import At, Forward, Parts
from lmkit.layers.blocks.delta import DeltaSpec
from lmkit.layers.linear import MergedLinear


class GatedDelta(Forward):
    """The weights have the roles of DeltaSpec."""

    out: MergedLinear

    def __init__(self, spec: DeltaSpec, parts: Parts) -> None:
        self.spec, self.parts = spec, parts
        weights, device = parts.weights, parts.device
        self.inputs = MergedLinear(spec.inputs, weights, device)
        self.gates = MergedLinear(spec.gates, weights, device)
        self.out = MergedLinear(("attn.o",), weights, device)
        self.advance = ops.gated_delta.select(device, key_dim=spec.key_dim, kernel=spec.kernel)
        self._gather = ops.embedding.select(device)

    @property
    def linears(self) -> tuple[MergedLinear, ...]:
        return self.inputs, self.gates, self.out

    def projected(self, x: Tensor, norm: Norm | None = None) -> tuple[Tensor, Tensor]:
        """The results of `inputs` and `gates`, [T, ...] each, the latter in float32. A residual of the norm is added
        once."""
        y = self.inputs(x, norm)
        if norm is not None and norm.residual is not None:
            x, norm = norm.residual, replace(norm, residual=None)
        return y, self.gates.float32(x, norm)

    def inner(self, x: Tensor, norm: Norm | None = None, at: At | None = None) -> Tensor:
        """See Forward: [T, value heads * value_dim]. Advances the states."""
        assert at is not None
        assert at.kv.states is not None
        y, gates = self.projected(x, norm)
        roles = ("attn.conv", "attn.a_log", "attn.dt_bias", "attn.delta_norm")
        conv, a_log, dt_bias, of_norm = (self.parts.vector(role) for role in roles)
        weights = DeltaWeights(conv.flatten(1), a_log, dt_bias, of_norm, self.parts.eps, self.spec.flat)
        geometry, rows = at.batch.geometries[at.kv.group], at.batch.states
        if rows is None:
            fresh = [[b, -1, -1, 0, 0, 0] for b in range(len(geometry.context_lens))]
            rows = torch.tensor(fresh, dtype=torch.int32).to(y.device)
        out: Tensor = self.advance(y, gates, weights, at.kv.states, rows, geometry)
        return out

    def logit_rows(self, x: Tensor, norm: Norm | None, at: At, stream: Tensor) -> tuple[Tensor, Tensor]:
        """See Forward. The states take all tokens."""
        inner, rows = self.inner(x, norm, at), at.batch.logit_rows
        return self._gather(inner, rows).to(inner.dtype), self._gather(stream, rows)

    def captured(self) -> Iterator[tuple[str, Implementation]]:
        """See Forward."""
        yield "linear attention", self.advance
