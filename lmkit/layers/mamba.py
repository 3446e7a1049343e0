"""Mamba-2: a block that keeps a matrix for each head of each sequence (see kernels.selective_scan)."""

from __future__ import annotations

from torch import Tensor

from lmkit.kernels import recurrent_ops
from lmkit.kernels.ops import Norm
from lmkit.kernels.selective_scan import ScanWeights
from lmkit.kernels.short_conv import ConvWeights
from lmkit.layers.block import At, Parts
from lmkit.layers.blocks.mamba import MambaSpec
from lmkit.layers.linear import MergedLinear
from lmkit.layers.recurrent import Recurrence


class Mamba(Recurrence):
    """The weights have the roles of MambaSpec."""

    use = "Mamba-2"
    out: MergedLinear

    def __init__(self, spec: MambaSpec, parts: Parts) -> None:
        scan = recurrent_ops.selective_scan.select(parts.device, kernel=spec.kernel, state_size=spec.state_size)
        super().__init__(parts, scan)
        self.spec = spec
        self.inputs = MergedLinear(("ssm.in",), parts.weights, parts.device)
        self.out = MergedLinear(("ssm.out",), parts.weights, parts.device)

    @property
    def linears(self) -> tuple[MergedLinear, ...]:
        return self.inputs, self.out

    def inner(self, x: Tensor, norm: Norm | None = None, at: At | None = None) -> Tensor:
        """See Forward: [T, width of all heads]. Advances the states."""
        spec, bias = self.spec, self.vector("ssm.taps.bias") if self.spec.conv_bias else None
        taps = ConvWeights(self.vector("ssm.taps").flatten(1), bias)
        a_log, dt_bias, d, inside = (self.vector(role) for role in ("ssm.a_log", "ssm.dt_bias", "ssm.d", "norm.ssm"))
        weights = ScanWeights(taps, a_log, dt_bias, d, inside, spec.norm_eps, spec.num_groups, spec.limits)
        out: Tensor = self.advance(self.inputs(x, norm), weights, *self.states(at))
        return out
