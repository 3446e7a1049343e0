"""A gated short convolution: a block that keeps its last inputs of each sequence (see kernels.short_conv)."""

from __future__ import annotations

from torch import Tensor

from lmkit.kernels import recurrent_ops
from lmkit.kernels.ops import Norm
from lmkit.kernels.short_conv import ConvWeights
from lmkit.layers.block import At, Parts
from lmkit.layers.blocks.short_conv import ShortConvSpec
from lmkit.layers.linear import MergedLinear
from lmkit.layers.recurrent import Recurrence


class ShortConv(Recurrence):
    """The weights have the roles of ShortConvSpec."""

    use = "short convolution"
    out: MergedLinear

    def __init__(self, spec: ShortConvSpec, parts: Parts) -> None:
        super().__init__(parts, recurrent_ops.short_conv.select(parts.device, kernel=spec.kernel))
        self.spec = spec
        self.inputs = MergedLinear(("conv.in",), parts.weights, parts.device)
        self.out = MergedLinear(("conv.out",), parts.weights, parts.device)

    @property
    def linears(self) -> tuple[MergedLinear, ...]:
        return self.inputs, self.out

    def inner(self, x: Tensor, norm: Norm | None = None, at: At | None = None) -> Tensor:
        """See Forward: [T, channels]. Advances the states."""
        bias = self.vector("conv.taps.bias") if self.spec.bias else None
        weights = ConvWeights(self.vector("conv.taps").flatten(1), bias)
        out: Tensor = self.advance(self.inputs(x, norm), weights, *self.states(at))
        return out
