"""Linear attention by the gated delta rule: a block that keeps one state for each sequence (see kernels.delta)."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from lmkit.kernels import ops
from lmkit.kernels.delta import DeltaWeights
from lmkit.kernels.ops import Norm
from lmkit.layers.block import At, Parts
from lmkit.layers.blocks.delta import CONVS, HIGH, LOW, DeltaSpec
from lmkit.layers.linear import MergedLinear
from lmkit.layers.recurrent import Recurrence


class GatedDelta(Recurrence):
    """The weights have the roles of DeltaSpec."""

    use = "linear attention"
    out: MergedLinear

    def __init__(self, spec: DeltaSpec, parts: Parts) -> None:
        weights, device = parts.weights, parts.device
        super().__init__(parts, ops.gated_delta.select(device, key_dim=spec.key_dim, kernel=spec.kernel))
        self.spec, self.eps = spec, parts.eps if spec.norm_eps is None else spec.norm_eps
        # Made once: nothing but kernels runs in captured steps.
        self._conv = torch.cat([self.vector(role).flatten(1) for role in CONVS]) if spec.apart else None
        self.inputs = MergedLinear(spec.inputs, weights, device)
        self.gates = MergedLinear(spec.gates[:1] if spec.rank else spec.gates, weights, device)
        # Through few numbers: the linears to them, that to decays, and that to output gates.
        through: tuple[tuple[str, ...], ...] = (LOW, HIGH[:1], HIGH[1:]) if spec.rank else ()
        self.through = tuple(MergedLinear(roles, weights, device) for roles in through)
        self.out = MergedLinear(("attn.o",), weights, device)

    @property
    def linears(self) -> tuple[MergedLinear, ...]:
        return self.inputs, self.gates, *self.through, self.out

    def projected(self, x: Tensor, norm: Norm | None = None) -> tuple[Tensor, Tensor]:
        """What ops.gated_delta reads, [T, ...] each, the latter in float32. A residual of the norm is added once."""
        y = self.inputs(x, norm)
        if norm is not None and norm.residual is not None:
            x, norm = norm.residual, replace(norm, residual=None)
        gates = self.gates.float32(x, norm)
        if not self.through:
            return y, gates
        low, decays, outputs = self.through
        of_decays, of_outputs = (part.contiguous() for part in low(x, norm).chunk(2, dim=1))
        return torch.cat([y, outputs(of_outputs)], 1), torch.cat([gates, decays.float32(of_decays)], 1)

    def inner(self, x: Tensor, norm: Norm | None = None, at: At | None = None) -> Tensor:
        """See Forward: [T, value heads * value_dim]. Advances the states."""
        y, gates = self.projected(x, norm)
        conv = self.vector("attn.conv").flatten(1) if self._conv is None else self._conv
        a_log, dt_bias, of_norm = (self.vector(role) for role in ("attn.a_log", "attn.dt_bias", "attn.delta_norm"))
        spec = self.spec
        weights = DeltaWeights(conv, a_log, dt_bias, of_norm, self.eps, spec.flat, spec.rate, spec.floor, spec.by_row)
        out: Tensor = self.advance(y, gates, weights, *self.states(at))
        return out
