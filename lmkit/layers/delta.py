"""Linear attention by the gated delta rule: a block that keeps one state for each sequence (see kernels.delta)."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from lmkit.kernels import ops
from lmkit.kernels.delta import DeltaWeights
from lmkit.kernels.ops import Norm
from lmkit.layers.batch import BatchInputs, KVLayer
from lmkit.layers.delta_spec import DeltaSpec
from lmkit.layers.linear import MergedLinear, Weights


class GatedDelta:
    """What stands between the block's input and its output linear. `weights` has the roles of DeltaSpec."""

    def __init__(self, spec: DeltaSpec, eps: float, weights: Weights, device: str) -> None:
        self.spec, self.eps, self.weights = spec, eps, weights
        self.inputs = MergedLinear(spec.inputs, weights, device)
        self.gates = MergedLinear(spec.gates, weights, device)
        self.advance = ops.gated_delta.select(device, key_dim=spec.key_dim, kernel=spec.kernel)

    @property
    def linears(self) -> tuple[MergedLinear, ...]:
        return self.inputs, self.gates

    def projected(self, x: Tensor, norm: Norm | None = None) -> tuple[Tensor, Tensor]:
        """The results of `inputs` and `gates`, [T, ...] each, the latter in float32. A residual of the norm is added
        once."""
        y = self.inputs(x, norm)
        if norm is not None and norm.residual is not None:
            x, norm = norm.residual, replace(norm, residual=None)
        return y, self.gates.float32(x, norm)

    def __call__(self, y: Tensor, gates: Tensor, batch: BatchInputs, kv: KVLayer) -> Tensor:
        """What `projected` gives -> the input of attn.o [T, value heads * value_dim]. Advances the states."""
        assert kv.states is not None
        conv, a_log, dt_bias, norm = (self._plain(role) for role in ("conv", "a_log", "dt_bias", "delta_norm"))
        weights = DeltaWeights(conv.flatten(1), a_log, dt_bias, norm, self.eps, self.spec.flat)
        geometry, rows = batch.geometries[kv.group], batch.states
        if rows is None:
            fresh = [[b, -1, -1, 0, 0, 0] for b in range(len(geometry.context_lens))]
            rows = torch.tensor(fresh, dtype=torch.int32).to(y.device)
        out: Tensor = self.advance(y, gates, weights, kv.states, rows, geometry)
        return out

    def _plain(self, name: str) -> Tensor:
        weight = self.weights[f"attn.{name}"]
        assert isinstance(weight, Tensor)
        return weight
