"""The gated MLP: a whole one, or one expert of many."""

from __future__ import annotations

import torch
from torch import Tensor

from lmkit.kernels import ops
from lmkit.kernels.ops import Norm
from lmkit.layers.linear import MergedLinear, Weights
from lmkit.layers.mlp_spec import MLPSpec
from lmkit.layers.ranks import Ranks


def part_of_sum(linear: MergedLinear, x: Tensor) -> Tensor:
    """The product of x as float32 [T, out], to be added up over the ranks. A CPU computes in float32 anyway."""
    return linear(x) if x.dtype == torch.float32 else linear.float32(x)


class GatedMLP:
    """An MLP as an MLPSpec describes it. `weights` has `<role>.gate` if it is gated, `<role>.up` and `<role>.down`."""

    def __init__(self, role: str, spec: MLPSpec, weights: Weights, device: str = "cpu") -> None:
        roles = tuple(f"{role}.{part}" for part in spec.inputs)
        is_gated = len(roles) == 2
        self.gate_up = MergedLinear(roles, weights, device, activation=spec.activation if is_gated else None)
        self.activation = spec.activation
        self.activate = None if is_gated else ops.ungated_activation.select(device)
        self.down = MergedLinear((f"{role}.down",), weights, device)
        self.is_part = False  # whether other ranks have the rest: sums over ranks are of float32 parts

    @property
    def linears(self) -> tuple[MergedLinear, ...]:
        return self.gate_up, self.down

    def join(self, ranks: Ranks, split: Ranks | None) -> Ranks | None:
        """Compute together with other ranks; `split` are those among which linears are split. Returns the ranks that
        add up the MLP's outputs."""
        self.is_part = split is not None
        return split

    def __call__(self, x: Tensor, norm: Norm | None = None) -> Tensor:
        """x [T, hidden], normalized if `norm` is None -> the MLP's contribution [T, hidden]."""
        inner = self.inner(x, norm)
        return part_of_sum(self.down, inner) if self.is_part else self.down(inner)

    def inner(self, x: Tensor, norm: Norm | None = None) -> Tensor:
        """The input of `down` [T, intermediate size]."""
        y = self.gate_up(x, norm)
        return y if self.activate is None else self.activate(y, self.activation)

    def add_to(self, stream: Tensor, x: Tensor, norm: Norm) -> tuple[Tensor, Tensor | None]:
        """Add the MLP of x to `stream` float32 [T, hidden]; returns a pair as MergedLinear.add_to does."""
        return self.down.add_to(stream, self.inner(x, norm))
