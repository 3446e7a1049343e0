"""The scan of Mamba-2 as kernels.selective_scan defines it, token by token. Gradients pass."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from lmkit.kernels import recurrent_ops
from lmkit.kernels.ops import BatchGeometry
from lmkit.kernels.recurrent import RecurrentStates
from lmkit.kernels.reference.short_conv import Parts, convolved, walk
from lmkit.kernels.registry import implements
from lmkit.kernels.selective_scan import ScanWeights


@implements(recurrent_ops.selective_scan, "reference", device="any")
def selective_scan(
    y: Tensor, weights: ScanWeights, states: RecurrentStates, rows: Tensor, geometry: BatchGeometry
) -> Tensor:
    _, heads, size, dim = states.matrix.shape
    inner, groups, channels = heads * dim, weights.groups, states.conv.shape[1]
    z, given = y.float().split((inner, channels + heads), dim=1)

    def token(given: Tensor, gate: Tensor | None, state: Parts) -> tuple[Tensor, Parts]:
        inputs, step = given.split((channels, heads))
        mixed, window = convolved(inputs, state[0], weights.taps)
        x, b, c = F.silu(mixed).split((inner, groups * size, groups * size))
        b, c = (part.view(groups, size).repeat_interleave(heads // groups, 0) for part in (b, c))
        x, step = x.view(heads, dim), F.softplus(step + weights.dt_bias).clamp(*weights.limits)
        decay = (-weights.a_log.exp() * step).exp()
        matrix = state[1] * decay[:, None, None] + torch.einsum("hn,hp->hnp", b, step[:, None] * x)
        o = torch.einsum("hnp,hn->hp", matrix, c) + weights.d[:, None] * x
        if gate is None:
            return o, (window, matrix)
        o = (o.flatten() * F.silu(gate)).view(groups, -1)
        o = o * torch.rsqrt(o.square().mean(1, keepdim=True) + weights.eps)
        return o.flatten() * weights.norm, (window, matrix)

    out = walk(given.unbind(), z.unbind(), token, states, rows, geometry)
    return (torch.stack(out) if out else torch.zeros_like(z)).to(y.dtype)
