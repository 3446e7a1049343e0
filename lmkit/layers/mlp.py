"""The gated MLP: a whole one, or one expert of many."""

from __future__ import annotations

from torch import Tensor

from lmkit.kernels import ops
from lmkit.kernels.ops import Norm
from lmkit.layers.block import At, Forward
from lmkit.layers.blocks.mlp import APART, MLPSpec
from lmkit.layers.linear import MergedLinear, Weights


class GatedMLP(Forward):
    """An MLP as an MLPSpec describes it. `weights` has `<role>.gate` if it is gated, `<role>.up` and `<role>.down`."""

    def __init__(self, role: str, spec: MLPSpec, weights: Weights, device: str = "cpu") -> None:
        roles = tuple(f"{role}.{part}" for part in spec.inputs)
        is_gated, is_apart = len(roles) == 2, spec.activation in APART
        with_product = spec.activation if is_gated and not is_apart else None
        self.gate_up = MergedLinear(roles, weights, device, activation=with_product)
        self.activation = spec.activation
        self.activate = None if is_gated else ops.ungated_activation.select(device)
        self.multiply_gates = ops.multiply_gates.select(device) if is_apart else None
        self.out = self.down = MergedLinear((f"{role}.down",), weights, device)

    @property
    def linears(self) -> tuple[MergedLinear, ...]:
        return self.gate_up, self.down

    def inner(self, x: Tensor, norm: Norm | None = None, at: At | None = None) -> Tensor:
        """The input of `down` [T, intermediate size]."""
        return self.activated(self.gate_up(x, norm))

    def activated(self, y: Tensor) -> Tensor:
        """What `gate_up` gives -> the input of `down`. Most activations of gates are computed with the product."""
        if self.multiply_gates is not None:
            gate, up = y.chunk(2, -1)
            gated: Tensor = self.multiply_gates(up, gate, self.activation)
            return gated
        return y if self.activate is None else self.activate(y, self.activation)
