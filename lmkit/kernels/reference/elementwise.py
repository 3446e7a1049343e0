"""Reference norms, rotary embedding and gated activation. Formulas and shapes: lmkit.kernels.ops."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from lmkit.attention_spec import Growth
from lmkit.kernels import ops, query_ops
from lmkit.kernels.ops import KVTensor, Norm
from lmkit.kernels.reference.kv import accepts_heads, kv_append
from lmkit.kernels.registry import implements


@implements(ops.rms_norm, "reference", device="any")
def rms_norm(x: Tensor, norm: Norm) -> Tensor:
    if norm.residual is not None:
        x = norm.residual.add_(x)
    wide = x.float()
    if norm.bias is not None:
        wide = wide - wide.mean(-1, keepdim=True)
    normalized = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + norm.eps) * norm.weight.float()
    if norm.bias is not None:
        normalized += norm.bias.float()
    return normalized.to(norm.dtype or x.dtype)


@implements(ops.embedding, "reference", device="any")
def embedding(table: Tensor, rows: Tensor, scale: float = 1.0) -> Tensor:
    return table[rows].float() * scale


@implements(ops.gather_columns, "reference", device="any")
def gather_columns(x: Tensor, order: Tensor) -> Tensor:
    return x.index_select(1, order)


@implements(ops.add_positions, "reference", device="any")
def add_positions(x: Tensor, table: Tensor, positions: Tensor) -> None:
    x += table[positions.long()]


@implements(ops.keep, "reference", device="any")
def keep(x: Tensor, residual: Tensor | None, out: Tensor, scale: float = 1.0) -> None:
    if residual is None:
        out.copy_(x)
    else:
        torch.add(x, residual, out=out)
    if scale != 1:
        out *= scale


@implements(ops.ungated_activation, "reference", device="any")
def ungated_activation(x: Tensor, activation: str) -> Tensor:
    return x.copy_(UNGATED[activation](x.float()))


@implements(ops.multiply_gates, "reference", device="any")
def multiply_gates(x: Tensor, gates: Tensor, activation: str) -> Tensor:
    wide, factors = x.float(), gates.float()
    return GATES[activation](factors, wide).to(x.dtype)


@implements(query_ops.grown_queries, "reference", device="any")
def grown_queries(q: Tensor, positions: Tensor, growth: Growth) -> Tensor:
    steps = (positions + growth.shift).div(growth.length, rounding_mode="floor")
    return (q.float() * (1 + growth.rate * steps.float().log1p())[:, None, None]).to(q.dtype)


@implements(ops.softcap, "reference", device="any")
def softcap(x: Tensor, cap: float) -> Tensor:
    return x.div_(cap).tanh_().mul_(cap)


@implements(ops.known_tokens, "reference", device="any")
def known_tokens(token_ids: Tensor, last_token: Tensor) -> None:
    sampled = last_token[(-1 - token_ids).clamp_(min=0)]
    torch.where(token_ids < 0, sampled, token_ids, out=token_ids).clamp_(min=0)


@implements(ops.rope_angles, "reference", device="any")
def rope_angles(positions: Tensor, inv_freq: Tensor, magnitude: float) -> tuple[Tensor, Tensor]:
    angles = positions[:, None].float() * inv_freq
    return angles.cos() * magnitude, angles.sin() * magnitude


def accepts_rope(*, rotary_dim: int, head_dim: int, **traits: Any) -> str | None:
    if rotary_dim % 2 or rotary_dim > head_dim:
        return f"rotary_dim {rotary_dim} of {head_dim}"
    return accepts_heads(head_dim=head_dim, **traits)


@implements(ops.rope_append, "reference", device="any", accepts=accepts_rope)
def rope_append(
    q: Tensor, k: Tensor, v: Tensor, cos: Tensor, sin: Tensor, k_cache: KVTensor, v_cache: KVTensor, slots: Tensor,
    positions: Tensor | None = None,
) -> None:  # fmt: skip
    half = cos.shape[-1]
    if k_cache.mean is not None and k.shape[1]:
        k -= k_cache.mean.vector
    cos, sin = cos[:, None, :], sin[:, None, :]
    for x in (q, k):
        first, second = x[..., :half].float(), x[..., half : 2 * half].float()
        rotated = torch.cat([first * cos - second * sin, second * cos + first * sin], dim=-1)  # before x changes
        x[..., : 2 * half] = rotated.to(x.dtype)
    if k.shape[1]:
        kv_append(k, v, k_cache, v_cache, slots, positions)


def _clamped_swish(gate: Tensor, up: Tensor) -> Tensor:
    gate = gate.clamp(max=ops.CLAMP)
    return gate * torch.sigmoid(gate * ops.SWISH) * (up.clamp(-ops.CLAMP, ops.CLAMP) + 1)


ACTIVATIONS: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "silu": lambda gate, up: functional.silu(gate) * up,
    "gelu_tanh": lambda gate, up: functional.gelu(gate, approximate="tanh") * up,
    "clamped_swish": _clamped_swish,
}


GATES: dict[str, Callable[[Tensor, Tensor], Tensor]] = ACTIVATIONS | {
    "sigmoid": lambda gate, x: gate.sigmoid() * x,
    "gelu_exact": lambda gate, x: functional.gelu(gate) * x,
}


UNGATED: dict[str, Callable[[Tensor], Tensor]] = {
    "relu": functional.relu,
    "gelu": functional.gelu,
    "relu2": lambda x: functional.relu(x).square(),
}


@implements(ops.gated_activation, "reference", device="any")
def gated_activation(gate_up: Tensor, activation: str) -> Tensor:
    gate, up = gate_up.float().chunk(2, dim=-1)
    return ACTIVATIONS[activation](gate, up).to(gate_up.dtype)
