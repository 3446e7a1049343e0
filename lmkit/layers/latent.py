"""Latent attention as attention over one shared KV head, whose row is both key and value.

    row of a token = turned key part [rope] | latent c [rank]             stored once, normalized latent
    score of head h = q_rope . turned part + q_nope . (K_h c) = q_rope . turned part + (K_h^T q_nope) . c
    output of h     = V_h (sum of p c)                                    K_h and V_h are rows of kv_b

So K_h moves to the query, and V_h after attention: nothing that is kept for a token depends on the number of heads.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from lmkit.kernels import ops
from lmkit.kernels.ops import Norm
from lmkit.kernels.registry import Implementation
from lmkit.layers.attention import Attending
from lmkit.layers.batch import Projected
from lmkit.layers.block import At, Parts
from lmkit.layers.blocks.latent import EPS, LatentSpec
from lmkit.layers.linear import MergedLinear


class ChunkAttention(Protocol):
    """See layers.latent_prompts.PlainHeads."""

    @property
    def runs(self) -> bool: ...
    def __call__(self, x: Tensor, norm: Norm | None, at: At) -> Tensor: ...


class LatentParts(NamedTuple):
    """What linears make of a step's tokens, before RoPE."""

    turned: Tensor  # [T, heads, rope], the part of queries that RoPE turns
    plain: Tensor  # [T, heads, nope], the other part
    rows: Tensor  # [T, 1, row_dim]
    read: tuple[Tensor, Tensor]  # [T, ...] of the latent of queries and of x: an indexer's inputs, or a gate's


class LatentAttention(Attending):
    """What latent attention computes before and after the attention op. `weights` has the roles of LatentSpec.

    Once the linears are packed, each head's parts of kv_b are packed too, in `dtype`, at the first call.
    """

    has_norms = True

    def __init__(self, spec: LatentSpec, parts: Parts) -> None:
        super().__init__(parts, spec.heads, spec.attention, spec.rope, shared=True)
        weights, device = parts.weights, parts.device
        self.spec, self.num_heads, self.interleaved = spec, spec.num_heads, spec.rope.interleaved
        self.inputs = MergedLinear(spec.inputs, weights, device)
        self.q_b = MergedLinear(spec.query_inputs, weights, device) if spec.q_lora_rank else None
        self.plain_heads: ChunkAttention | None = None  # computes chunks of prompts on a GPU
        self.linear_heads = ops.linear_heads.select(device)
        self.multiply_gates = ops.multiply_gates.select(device)
        self._heads: tuple[Any, Any] | None = None

    @property
    def linears(self) -> tuple[MergedLinear, ...]:
        return (self.inputs, self.out) if self.q_b is None else (self.inputs, self.q_b, self.out)

    def inner(self, x: Tensor, norm: Norm | None = None, at: At | None = None) -> Tensor:
        """See Forward."""
        if self.plain_heads is not None and at is not None and at.batch.prompts is not None:
            return self.plain_heads(x, norm, at)
        return super().inner(x, norm, at)

    def queries_keys_values(self, x: Tensor, norm: Norm | None = None) -> Projected:
        """See Attending. A row is both k and v, in the same memory: it is stored after RoPE has turned it in place."""
        return self.projected(self.parts_and_rows(x, norm))

    def projected(self, parts: LatentParts) -> Projected:
        """What attention reads of the parts."""
        gates = parts.read[1] if self.spec.gated else None
        return Projected(self.absorbed(parts.turned, parts.plain), parts.rows, parts.rows, gates)

    def outputs(self, out: Tensor, gates: Tensor | None) -> Tensor:
        """See Attending."""
        return self.gated(self.values(out), gates)

    def gated(self, values: Tensor, gates: Tensor | None) -> Tensor:
        """values [T, heads * v_head_dim], times the sigmoid of each head's number in gates [T, heads]."""
        if gates is None:
            return values
        wide = gates.repeat_interleave(self.spec.v_head_dim, 1)
        product: Tensor = self.multiply_gates(values, wide, "sigmoid")
        return product

    def captured(self) -> Iterator[tuple[str, Implementation]]:
        """See Forward."""
        yield from super().captured()
        yield "latent products", self.linear_heads

    def absorbed(self, turned: Tensor, plain: Tensor) -> Tensor:
        """The parts of queries [T, heads, ...] that RoPE turns and does not turn -> queries [T, heads, row_dim]."""
        return torch.cat([turned, self._each(plain, 0)], dim=2)

    def parts_and_rows(self, x: Tensor, norm: Norm | None) -> LatentParts:
        """The parts of x [T, hidden], normalized if `norm` is None."""
        spec = self.spec
        y = self.inputs(x, norm)
        width = spec.q_lora_rank or self.num_heads * spec.query_dim
        sizes = width, spec.kv_lora_rank, spec.qk_rope_head_dim, y.shape[1] - width - spec.row_dim
        queries, latent, turned, of_x = y.split(sizes, dim=1)
        if self.q_b is not None:
            queries = self.q_b(queries.contiguous(), self._norm("attn.q_a_norm"))
        width = self.num_heads * spec.query_dim
        queries, of_queries = queries.split((width, queries.shape[1] - width), dim=1)
        heads = queries.view(len(x), self.num_heads, spec.query_dim)
        plain, rotary = heads.split((spec.qk_nope_head_dim, spec.qk_rope_head_dim), dim=2)
        latent = self.rms_norm(latent.contiguous(), self._norm("attn.kv_a_norm"))
        rows = torch.cat([self._halves(turned), latent], dim=1)[:, None]
        return LatentParts(self._halves(rotary), plain, rows, (of_queries, of_x))

    def values(self, attended: Tensor) -> Tensor:
        """The output of attention over rows [T, heads, row_dim] -> [T, heads * v_head_dim]."""
        return self._each(attended[..., self.spec.qk_rope_head_dim :], 1).flatten(1)

    def _norm(self, role: str) -> Norm:
        weight = self.weights[role]
        assert isinstance(weight, Tensor)
        return Norm(weight, EPS, None, self.dtype)

    def _halves(self, x: Tensor) -> Tensor:
        """x [..., rope] with the elements of a pair half of them apart, as ops.rope_append has them."""
        return x.unflatten(-1, (-1, 2)).transpose(-1, -2).flatten(-2) if self.interleaved else x

    def _parts(self) -> tuple[Tensor, Tensor]:
        """K_h transposed [heads, rank, nope] and V_h [heads, v, rank] of all heads."""
        weight = self.weights["attn.kv_b"]
        assert isinstance(weight, Tensor)
        keys, values = (
            weight.float()
            .unflatten(0, (self.num_heads, -1))
            .split((self.spec.qk_nope_head_dim, self.spec.v_head_dim), dim=1)
        )
        return keys.transpose(1, 2).contiguous(), values.contiguous()

    def _each(self, x: Tensor, which: int) -> Tensor:
        """x [T, heads, in] times each head's part `which` of kv_b -> [T, heads, out]. The kernels give a row the same
        bits whatever rows stand beside it."""
        if self.inputs.packed is None:
            return torch.einsum("thi,hoi->tho", x, self._parts()[which])
        y: Tensor = self.linear_heads(x, self.packed_parts()[which])
        return y

    def packed_parts(self) -> tuple[Any, Any]:
        """The parts of kv_b as `linear_heads` has packed them."""
        if self._heads is None:
            keys, values = (self.linear_heads.pack(part.to(self.dtype)) for part in self._parts())
            self._heads = keys, values
            del self.weights["attn.kv_b"]
        return self._heads
