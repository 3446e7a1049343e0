"""What is tuned of a finished layer: a factor on each scale of its quantized linears, on its norms, and its biases.

All numbers are changes, which start at 0: a factor of 1 + change on a scale or on an element of a norm, and an addition
of change * spread to an element of a bias, where the spread is that of the linear's outputs for inputs of variance 1.
Codes and zeros stay. Weights are those that the file will hold: scales in float16, vectors in the checkpoint's dtype.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from lmkit.layers.blocks.moe import SCORE_BIAS
from lmkit.layers.linear import Weights
from lmkit.qtensor import SMALLEST_SCALE, QTensor, dequantize

FIXED = (SCORE_BIAS, "attn.sinks")  # vectors that are not tuned
Changes = dict[str, Tensor]  # role -> float32, of the shape of the scales or of the vector


def no_changes(weights: Weights) -> Changes:
    """The changes of a layer before it is tuned."""
    changes = {}
    for role, weight in weights.items():
        if isinstance(weight, QTensor):
            changes[role] = torch.zeros(weight.scales.shape)
        elif weight.ndim == 1 and role not in FIXED:
            changes[role] = torch.zeros(weight.shape)
    return changes


@dataclass(frozen=True)
class TunedLayer:
    """A layer's stored `weights` with `changes`. `read_back(role, vector)` is the vector as the file will give it."""

    weights: Weights
    changes: Mapping[str, Tensor]
    read_back: Callable[[str, Tensor], Tensor]

    def changed(self) -> Weights:
        """The weights that the file will hold."""
        return {role: self._changed(role) if role in self.changes else w for role, w in self.weights.items()}

    def _changed(self, role: str) -> Tensor | QTensor:
        weight, change = self.weights[role], self.changes[role]
        if isinstance(weight, QTensor):
            scales = (weight.scales.float() * (1 + change.to(weight.scales.device))).to(torch.float16)
            return replace(weight, scales=scales.clamp_min(SMALLEST_SCALE))
        return self.read_back(role, weight + change.to(weight.device) * self._unit(role))

    def _unit(self, role: str) -> Tensor:
        """The change of a vector's elements that 1 stands for."""
        weight = self.weights[role]
        assert isinstance(weight, Tensor)
        if not role.endswith(".bias"):
            return weight
        linear = self.weights[role.removesuffix(".bias")]
        dense = dequantize(linear) if isinstance(linear, QTensor) else linear
        if dense.ndim == 1:  # a LayerNorm's
            return dense
        spread: Tensor = torch.linalg.vector_norm(dense, dim=1).mean()
        return spread

    def leaves(self) -> dict[str, Tensor]:
        """The changed weights, dense, as float32. Those that are tuned take gradients."""
        dense = {}
        for role, weight in self.changed().items():
            dense[role] = dequantize(weight) if isinstance(weight, QTensor) else weight.float().clone()
            dense[role].requires_grad_(role in self.changes)
        return dense

    def gradients(self, leaves: Mapping[str, Tensor]) -> Changes:
        """The gradients of the changes from those of the weights. A weight without one, as an expert's that no token
        met, is left out."""
        found = {}
        for role in self.changes:
            gradient, weight = leaves[role].grad, self.weights[role]
            if gradient is None:
                continue
            if isinstance(weight, QTensor):
                unit = dequantize(weight)
                found[role] = (gradient * unit).view(*weight.scales.shape, -1).sum(-1).cpu()
            else:
                found[role] = (gradient * self._unit(role)).cpu()
        return found
