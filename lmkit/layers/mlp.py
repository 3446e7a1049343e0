"""The gated MLP: a whole one, or one expert of many."""

from __future__ import annotations

from torch import Tensor

from lmkit.kernels import ops
from lmkit.kernels.ops import Norm
from lmkit.layers.block import At, Forward
from lmkit.layers.blocks.mlp import MLPSpec
from lmkit.layers.linear import MergedLinear, Weights


class GatedMLP(Forward):
    """An MLP as an MLPSpec describes it. `weights` has `<role>.gate` if it is gated, `<role>.up` and `<role>.down`."""

    def __init__(self, role: str, spec: MLPSpec, weights: Weights, device: str = "cpu") -> None:
        roles = tuple(f"{role}.{part}" for part in spec.inputs)
        is_gated = len(roles) == 2
        self.gate_up = MergedLinear(roles, weights, device, activation=spec.activation if is_gated else None)
        self.activation = spec.activation
        self.activate = None if is_gated else ops.ungated_activation.select(device)
        self.out = self.down = MergedLinear((f"{role}.down",), weights, device)

    @property
    def linears(self) -> tuple[MergedLinear, ...]:
        return self.gate_up, self.down

    def inner(self, x: Tensor, norm: Norm | None = None, at: At | None = None) -> Tensor:
        """The input of `down` [T, intermediate size]."""
        return self.activated(self.gate_up(x, norm))

    def activated(self, y: Tensor) -> Tensor:
        """What `gate_up` gives -> the input of `down`. A gate's activation is computed with the product."""
        return y if self.activate is None else self.activate(y, self.activation)
