"""Reference norms, rotary embedding and gated activation. Formulas and shapes: lmkit.kernels.ops."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from lmkit.kernels import ops
from lmkit.kernels.registry import implements


@implements(ops.rms_norm, "reference", device="any")
def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    wide = x.float()
    return (wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps) * weight.float()).to(x.dtype)


@implements(ops.add_rms_norm, "reference", device="any")
def add_rms_norm(x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    total = x + residual
    return rms_norm(total, weight, eps), total


def accepts_rope(*, rotary_dim: int, head_dim: int, **traits: Any) -> str | None:
    return None if rotary_dim % 2 == 0 and rotary_dim <= head_dim else f"rotary_dim {rotary_dim} of {head_dim}"


@implements(ops.rope, "reference", device="any", accepts=accepts_rope)
def rope(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> None:
    half = cos.shape[-1]
    cos, sin = cos[:, None, :], sin[:, None, :]
    for x in (q, k):
        first, second = x[..., :half].float(), x[..., half : 2 * half].float()
        rotated = torch.cat([first * cos - second * sin, second * cos + first * sin], dim=-1)  # before x changes
        x[..., : 2 * half] = rotated.to(x.dtype)


@implements(ops.silu_mul, "reference", device="any")
def silu_mul(gate_up: Tensor) -> Tensor:
    gate, up = gate_up.float().chunk(2, dim=-1)
    return (torch.nn.functional.silu(gate) * up).to(gate_up.dtype)
