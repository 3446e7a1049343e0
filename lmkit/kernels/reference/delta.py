"""Gated delta-rule linear attention in torch."""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from lmkit.kernels import ops
from lmkit.kernels.delta import DeltaWeights, heads_of
from lmkit.kernels.ops import BatchGeometry
from lmkit.kernels.recurrent import RecurrentStates
from lmkit.kernels.registry import implements


@implements(ops.gated_delta, "reference", device="any")
def gated_delta(
    y: Tensor, gates: Tensor, weights: DeltaWeights, states: RecurrentStates, rows: Tensor, geometry: BatchGeometry
) -> Tensor:
    out = [gates.new_zeros(0, heads_of(states)[1] * heads_of(states)[3])]
    starts = geometry.query_start.tolist()
    for b, (row, source, snapshot, after, replayed, drafts) in enumerate(rows.tolist()):
        state = State(*(x[source].clone() if source >= 0 else torch.zeros_like(x[row]) for x in states.parts))
        tokens = slice(starts[b], starts[b + 1])
        given = [_inputs(*pair, weights, states) for pair in zip(y[tokens].float(), gates[tokens], strict=True)]
        known = [_Inputs.of(states.drafted[row, i], states) for i in range(replayed)] + given
        for count, inputs in enumerate(known, 1):
            if count > len(known) - drafts:
                states.drafted[row, count - 1 - len(known) + drafts] = inputs.kept()
            result, state = _token(inputs, weights, states, state)
            if count > replayed:
                out.append(result)
            if snapshot >= 0 and count == after:
                _keep(state, states, snapshot)
            if count == len(known) - drafts:
                _keep(state, states, row)
    return torch.cat(out).to(y.dtype)


class _Inputs(NamedTuple):
    """What a token gives."""

    channels: Tensor  # float32 [C]
    b: Tensor  # [Hv]
    a: Tensor  # [Hv D]
    z: Tensor  # [Hv, Dv]

    @classmethod
    def of(cls, kept: Tensor, states: RecurrentStates) -> _Inputs:
        _, heads, _, dim = heads_of(states)
        channels = states.conv.shape[1]
        channels, b, a = kept.split((channels, heads, kept.numel() - channels - heads))
        return cls(channels, b, a, kept.new_zeros(heads, dim))

    def kept(self) -> Tensor:
        return torch.cat([self.channels, self.b, self.a]).detach()


def _inputs(wide: Tensor, narrow: Tensor, weights: DeltaWeights, states: RecurrentStates) -> _Inputs:
    key_heads, value_heads, key_dim, value_dim = heads_of(states)
    shared = value_heads // key_heads
    groups = 1 if weights.flat else key_heads  # of the parts of a row
    sizes = [part * key_heads // groups for part in (key_dim, key_dim, shared * value_dim, shared * value_dim)]
    *qkv, z = wide.view(groups, -1).split(sizes, dim=1)
    of_b = value_heads // groups
    b, a = (x.flatten() for x in narrow.view(groups, -1).split((of_b, of_b * weights.decays), dim=1))
    return _Inputs(torch.cat([x.flatten() for x in qkv]), b, a, z.reshape(value_heads, value_dim))


class State(NamedTuple):
    """The state of a sequence. Each token has a new one, so that gradients can pass."""

    conv: Tensor
    matrix: Tensor


def _keep(state: State, states: RecurrentStates, row: int) -> None:
    for part, kept in zip(state, states.parts, strict=True):
        kept[row] = part.detach()


def _token(inputs: _Inputs, weights: DeltaWeights, states: RecurrentStates, before: State) -> tuple[Tensor, State]:
    key_heads, value_heads, key_dim, value_dim = heads_of(states)
    shared = value_heads // key_heads
    window = torch.cat([before.conv, inputs.channels[:, None]], dim=1)
    mixed = F.silu((window * weights.conv).sum(1))
    q, k, v = mixed.split((key_heads * key_dim, key_heads * key_dim, value_heads * value_dim))
    q, k = (_unit(x.view(key_heads, key_dim)).repeat_interleave(shared, 0) for x in (q, k))
    state = before.matrix * _decay(inputs.a + weights.dt_bias, weights)
    change = (v.view(value_heads, value_dim) - torch.einsum("hkv,hk->hv", state, k)) * (
        weights.rate * inputs.b.sigmoid()
    )[:, None]
    state = state + k[:, :, None] * change[:, None]
    o = torch.einsum("hkv,hk->hv", state, q * key_dim**-0.5)
    o = o * torch.rsqrt(o.square().mean(1, keepdim=True) + weights.eps) * weights.norm
    gate = inputs.z.sigmoid() if weights.sigmoid else F.silu(inputs.z)
    return (o * gate).flatten()[None], State(window[:, 1:], state)


def _decay(a: Tensor, weights: DeltaWeights) -> Tensor:
    """a [Hv D] -> what each head's rows are multiplied with, [Hv, D, 1]."""
    a, speed = a.view(-1, weights.decays, 1), weights.a_log.exp()[:, None, None]
    return (weights.floor * (speed * a).sigmoid() if weights.floor else -speed * F.softplus(a)).exp()


def _unit(x: Tensor) -> Tensor:
    return x * torch.rsqrt(x.square().sum(1, keepdim=True) + ops.UNIT_EPS)
