"""SignRound (arXiv 2309.05516): the rounding of a whole layer's weights tuned by the signs of gradients.

What is tuned is an offset of each weight before it is rounded and a factor on each end of each group's range; the loss
is the squared error of the layer's output. It starts from codes that another rounder chose, and what is returned has a
loss on rows that were not tuned on that is at most theirs.

The layer is computed once more here, in torch operations that have gradients; `layer_output` equals
models.decoder.DecoderLayer on whole sequences.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional

from lmkit.models.decoder import CosSin
from lmkit.models.layer_spec import LayerSpec
from lmkit.qtensor import QTensor, dequantize

CHECKS = 10  # times that the loss on the rows kept aside is looked at
MARGIN = 0.49  # how far from its code a weight may start, in steps
RANGE = (0.5, 1.5)  # of the factors on the ends of a group's range
_SMALLEST_SCALE = torch.finfo(torch.float16).smallest_normal

Batch = tuple[Tensor, Tensor]  # (hidden states, targets) float32 [rows, seq_len, hidden]


@dataclass
class Tuned:
    """`losses`: mean squared error on the rows kept aside, before tuning and of `weights`."""

    weights: dict[str, QTensor]
    losses: tuple[float, float]


class TunedWeight:
    """One linear's parameters. `values` float32 [out, groups, group_size] are weights in steps of the first scales."""

    def __init__(self, weight: Tensor, start: QTensor) -> None:
        self.scheme = start.scheme
        grouped = (*start.scales.shape, -1)
        self.scales, self.zeros = start.scales.float().unsqueeze(-1), start.zeros.float().unsqueeze(-1)
        steps = start.codes.float().view(grouped) - self.zeros
        values = weight.view(grouped) / self.scales
        self.values = steps + (values - steps).clamp(-MARGIN, MARGIN)
        self.offset = torch.zeros_like(steps, requires_grad=True)
        self.low = torch.ones_like(self.scales, requires_grad=True)
        self.high = torch.ones_like(self.scales, requires_grad=True)

    @property
    def parameters(self) -> tuple[Tensor, ...]:
        return self.offset, self.low, self.high

    def parts(self) -> tuple[Tensor, Tensor, Tensor]:
        """(codes [out, groups, group_size], scales, zeros [out, groups, 1]), float32 with gradients, as stored."""
        top = self.scheme.max_code
        if self.scheme.symmetric:
            scales, zeros = self.scales * self.high, self.zeros
        else:
            below = self.zeros * self.low
            scales = self.scales * ((top - self.zeros) * self.high + below) / top
        scales = _straight(scales, scales.to(torch.float16).float()).clamp_min(_SMALLEST_SCALE)
        if not self.scheme.symmetric:
            zeros = below * self.scales / scales
            zeros = _straight(zeros, zeros.round()).clamp(0, top)
        codes = self.values * self.scales / scales + self.offset
        return (_straight(codes, codes.round()) + zeros).clamp(0, top), scales, zeros

    def dense(self) -> Tensor:
        codes, scales, zeros = self.parts()
        return ((codes - zeros) * scales).flatten(1)

    def stored(self) -> QTensor:
        codes, scales, zeros = (part.detach() for part in self.parts())
        return QTensor(
            codes.flatten(1).to(torch.uint8),
            scales[..., 0].to(torch.float16),
            zeros[..., 0].to(torch.uint8),
            self.scheme,
        )

    @torch.no_grad()
    def step(self, rate: float) -> None:
        for parameter in self.parameters:
            if parameter.grad is not None:
                parameter -= rate * parameter.grad.sign()
                parameter.grad = None
        for factor in (self.low, self.high):
            factor.clamp_(*RANGE)


def tune(
    forward: Callable[[Mapping[str, Tensor], Tensor], Tensor],
    weights: dict[str, Tensor],
    start: dict[str, QTensor],
    batch: Callable[[int], Batch],
    kept_aside: Batch,
    iters: int,
) -> Tuned:
    """Tune the linears `start`, whose unrounded float32 weights are `weights`.

    `forward(weights by role, hidden)` computes the layer; `batch(i)` gives the rows of iteration i.
    """
    with torch.inference_mode(False), torch.enable_grad():
        linears = {role: TunedWeight(weights[role].clone(), _cloned(q)) for role, q in start.items()}
        best, first = dict(start), _loss(forward, start, kept_aside)
        lowest = first
        for i in range(iters):
            hidden, target = (part.clone() for part in batch(i))
            output = forward({role: linear.dense() for role, linear in linears.items()}, hidden)
            functional.mse_loss(output, target).backward()
            for linear in linears.values():
                linear.step((1 - i / iters) / iters)
            if (i + 1) % max(1, iters // CHECKS) == 0 or i + 1 == iters:
                stored = {role: linear.stored() for role, linear in linears.items()}
                if (loss := _loss(forward, stored, kept_aside)) < lowest:
                    best, lowest = stored, loss
    return Tuned(best, (first, lowest))


@torch.no_grad()
def _loss(
    forward: Callable[[Mapping[str, Tensor], Tensor], Tensor], weights: Mapping[str, QTensor], batch: Batch
) -> float:
    output = forward({role: dequantize(q) for role, q in weights.items()}, batch[0].clone())
    return float(functional.mse_loss(output, batch[1]))


def _cloned(q: QTensor) -> QTensor:
    """Made anew where gradients are allowed."""
    return QTensor(q.codes.clone(), q.scales.clone(), q.zeros.clone(), q.scheme)


def _straight(x: Tensor, value: Tensor) -> Tensor:
    """`value` with the gradient of x."""
    return x + (value - x).detach()


def layer_output(spec: LayerSpec, weights: Mapping[str, Tensor], rope: CosSin, hidden: Tensor) -> Tensor:
    """A dense layer on whole sequences: hidden float32 [rows, seq_len, hidden] -> the same behind the layer.
    `rope`: cos and sin [seq_len, rotary_dim / 2]."""
    hidden = hidden + _attention(spec, weights, rope, _norm(hidden, weights["norm.attn"], spec.norm_eps))
    x = _norm(hidden, weights["norm.mlp"], spec.norm_eps)
    gated = functional.silu(_linear(x, weights, "mlp.gate")) * _linear(x, weights, "mlp.up")
    return hidden + _linear(gated, weights, "mlp.down")


def _attention(spec: LayerSpec, weights: Mapping[str, Tensor], rope: CosSin, x: Tensor) -> Tensor:
    rows, length, _ = x.shape
    q, k, v = (_linear(x, weights, f"attn.{name}").view(rows, length, -1, spec.head_dim) for name in "qkv")
    if spec.qk_norm:
        q, k = _norm(q, weights["attn.q_norm"], spec.norm_eps), _norm(k, weights["attn.k_norm"], spec.norm_eps)
    q, k = _rotate(q, rope), _rotate(k, rope)
    position = torch.arange(length)
    visible = position[None, :] <= position[:, None]
    if window := spec.attention.window:
        visible &= position[None, :] > position[:, None] - window
    out = functional.scaled_dot_product_attention(
        q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2), attn_mask=visible, enable_gqa=True
    )
    return _linear(out.transpose(1, 2).flatten(2), weights, "attn.o")


def _rotate(x: Tensor, rope: CosSin) -> Tensor:
    cos, sin = (part[:, None, :] for part in rope)
    half = cos.shape[-1]
    first, second, rest = x[..., :half], x[..., half : 2 * half], x[..., 2 * half :]
    return torch.cat([first * cos - second * sin, second * cos + first * sin, rest], dim=-1)


def _norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + eps) * weight


def _linear(x: Tensor, weights: Mapping[str, Tensor], role: str) -> Tensor:
    return functional.linear(x, weights[role], weights.get(role + ".bias"))
