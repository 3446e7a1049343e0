"""Gated delta-rule linear attention in torch."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from lmkit.kernels import ops
from lmkit.kernels.delta import DeltaStates, DeltaWeights
from lmkit.kernels.ops import BatchGeometry
from lmkit.kernels.registry import implements


@implements(ops.gated_delta, "reference", device="any")
def gated_delta(y: Tensor, weights: DeltaWeights, states: DeltaStates, rows: Tensor, geometry: BatchGeometry) -> Tensor:
    out = [y.new_zeros(0, states.heads[1] * states.heads[3])]
    starts = geometry.query_start.tolist()
    for b, (row, source, snapshot, after) in enumerate(rows.tolist()):
        for state in (states.conv, states.matrix):
            state[row] = state[source] if source >= 0 else 0
        for count, token in enumerate(y[starts[b] : starts[b + 1]], 1):
            out.append(_token(token, weights, states, row))
            if snapshot >= 0 and count == after:
                for state in (states.conv, states.matrix):
                    state[snapshot] = state[row]
    return torch.cat(out)


def _token(token: Tensor, weights: DeltaWeights, states: DeltaStates, row: int) -> Tensor:
    key_heads, value_heads, key_dim, value_dim = states.heads
    shared = value_heads // key_heads
    wide, narrow = token.split((len(token) - 2 * value_heads, 2 * value_heads))
    sizes = (key_dim, key_dim, shared * value_dim, shared * value_dim)
    *qkv, z = wide.view(key_heads, -1).split(sizes, dim=1)
    b, a = (x.flatten() for x in narrow.view(key_heads, -1).split(shared, dim=1))
    window = torch.cat([states.conv[row], torch.cat([x.flatten() for x in qkv])[:, None]], dim=1)
    states.conv[row] = window[:, 1:]
    mixed = F.silu((window * weights.conv).sum(1))
    q, k, v = mixed.split((key_heads * key_dim, key_heads * key_dim, value_heads * value_dim))
    q, k = (_unit(x.view(key_heads, key_dim)).repeat_interleave(shared, 0) for x in (q, k))
    decay = (-weights.a_log.exp() * F.softplus(a + weights.dt_bias)).exp()
    state = states.matrix[row] * decay[:, None, None]
    change = (v.view(value_heads, value_dim) - torch.einsum("hkv,hk->hv", state, k)) * b.sigmoid()[:, None]
    state = state + k[:, :, None] * change[:, None]
    states.matrix[row] = state
    o = torch.einsum("hkv,hk->hv", state, q * key_dim**-0.5)
    o = o * torch.rsqrt(o.square().mean(1, keepdim=True) + weights.eps) * weights.norm
    return (o * F.silu(z.reshape(value_heads, value_dim))).flatten()[None]


def _unit(x: Tensor) -> Tensor:
    return x * torch.rsqrt(x.square().sum(1, keepdim=True) + ops.UNIT_EPS)
