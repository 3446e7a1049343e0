"""Mamba-2: a block that keeps a matrix for each head of each sequence (see kernels.selective_scan)."""

from __future__ import annotations

import torch
from torch import Tensor

from lmkit.kernels import recurrent_ops
from lmkit.kernels.cuda.module import tensor_device
from lmkit.kernels.ops import Norm
from lmkit.kernels.selective_scan import ScanWeights
from lmkit.kernels.short_conv import ConvWeights
from lmkit.layers.block import At, Parts
from lmkit.layers.blocks.mamba import MambaSpec
from lmkit.layers.linear import MergedLinear
from lmkit.layers.recurrent import Recurrence

# x over the root of WIDE squared, times WIDE, is x: beside WIDE squared float32 sees no mean square of x.
WIDE = 2.0**20


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
        at = tensor_device(parts.device)
        self._unit = None if spec.normed else torch.full((spec.width,), WIDE, device=at)
        each = [torch.full((size,), factor, device=at) for size, factor in zip(spec.parts, spec.factors, strict=False)]
        self._factors = torch.cat(each) if each else None

    @property
    def linears(self) -> tuple[MergedLinear, ...]:
        return self.inputs, self.out

    def inner(self, x: Tensor, norm: Norm | None = None, at: At | None = None) -> Tensor:
        """See Forward: [T, width of all heads]. Advances the states."""
        spec, bias = self.spec, self.vector("ssm.taps.bias") if self.spec.conv_bias else None
        taps = ConvWeights(self.vector("ssm.taps").flatten(1), bias)
        a_log, dt_bias, d = (self.vector(role) for role in ("ssm.a_log", "ssm.dt_bias", "ssm.d"))
        inside, eps = (self.vector("norm.ssm"), spec.norm_eps) if self._unit is None else (self._unit, WIDE**2)
        weights = ScanWeights(taps, a_log, dt_bias, d, inside, eps, spec.num_groups, spec.limits)
        y = self.inputs(x, norm)
        if self._factors is not None:
            y = (y * self._factors).to(y.dtype)
        out: Tensor = self.advance(y, weights, *self.states(at))
        return out
