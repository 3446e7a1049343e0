"""Attention over blocked keys and values: what computes SelfAttentionSpec, and what latent attention shares with it.

x --norm--> q k v --qk norm, RoPE, append--> attention over blocked KV --attn.o-->
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch
from torch import Tensor

from lmkit.attention_spec import AttentionSpec
from lmkit.kernels import ops, query_ops
from lmkit.kernels.cuda.module import tensor_device
from lmkit.kernels.ops import Norm
from lmkit.kernels.registry import Implementation
from lmkit.layers.batch import Projected
from lmkit.layers.block import At, Forward, Parts
from lmkit.layers.blocks.attention import QKV, SelfAttentionSpec
from lmkit.layers.blocks.base import Heads
from lmkit.layers.linear import MergedLinear
from lmkit.layers.rope_spec import RopeSpec


class Attending(Forward):
    """Attention between its linears. A subclass gives `queries_keys_values`, and may change `outputs`."""

    out: MergedLinear
    has_norms = False  # inside the block
    norms_turned = False  # queries are normalized after RoPE

    def __init__(self, parts: Parts, heads: Heads, scores: AttentionSpec, rope: RopeSpec, *, shared: bool) -> None:
        self.parts, self.weights, self.dtype, self.scores = parts, parts.weights, parts.dtype, scores
        device = parts.device
        self.out = MergedLinear(("attn.o",), parts.weights, device)
        self.observe_queries: Callable[[Tensor], None] | None = None  # sees q [T, num_heads, head_dim] before RoPE
        shape = {"head_dim": heads.dim, "num_heads": heads.queries, "num_kv_heads": heads.kv, "latent": shared}
        self.rms_norm = ops.rms_norm.select(device)
        self.attention_op = ops.rope_paged_attention.select(device, rotary_dim=rope.rotary_dim, **shape)
        self.append_op = ops.rope_append.select(device, rotary_dim=rope.rotary_dim, **shape)
        self.paged_attention = ops.paged_attention.select(device, **shape)
        self.gather = ops.embedding.select(device)

    def queries_keys_values(self, x: Tensor, norm: Norm | None = None) -> Projected:
        """What attention reads of x [T, hidden], normalized if `norm` is None."""
        raise NotImplementedError

    def grown(self, q: Tensor, positions: Tensor) -> Tensor:
        """q [T, num_heads, head_dim], multiplied by what its positions int32 [T] say."""
        return q

    def turned(self, q: Tensor) -> Tensor:
        """q [T, num_heads, head_dim] after RoPE -> what meets the keys."""
        return q

    def outputs(self, out: Tensor, gates: Tensor | None) -> Tensor:
        """The output of the attention op [T, num_heads, head_dim] -> the input of attn.o."""
        return out.view(len(out), -1)

    def inner(self, x: Tensor, norm: Norm | None = None, at: At | None = None) -> Tensor:
        """See Forward. Appends keys and values."""
        assert at is not None
        return self.attend(self.queries_keys_values(x, norm), at)

    def attend(self, projected: Projected, at: At) -> Tensor:
        """The input of attn.o, [T, num_heads * head_dim]. Overwrites q and k, and appends to the KV blocks."""
        (q, k, v, gates), (batch, rope, kv) = projected, at
        if self.observe_queries is not None:
            self.observe_queries(q)
        q = self.grown(q, batch.positions)
        sinks, geometry = self.weights.get("attn.sinks"), batch.geometries[kv.group]
        if batch.is_causal(self.scores) and not self.norms_turned:
            out: Tensor = self.attention_op(q, k, v, *rope, kv.k, kv.v, geometry, self.scores, sinks, batch.positions)
            return self.outputs(out, gates)
        self.append_op(q, k, v, *rope, kv.k, kv.v, geometry.slots, batch.positions)
        q = self.turned(q)
        out = self.paged_attention(q, kv.k, kv.v, geometry, self.scores, sinks)
        if not batch.is_causal(self.scores):
            for rows, alone, scores in batch.alone(kv.group, self.scores):
                out[rows] = self.paged_attention(q[rows], kv.k, kv.v, alone, scores, sinks)
        return self.outputs(out, gates)

    def logit_rows(self, x: Tensor, norm: Norm | None, at: At, stream: Tensor) -> tuple[Tensor, Tensor]:
        """See Forward. Of the other tokens only keys and values are computed."""
        (q, k, v, gates), (batch, rope, kv) = self.queries_keys_values(x, norm), at
        rows, q = batch.logit_rows, self.grown(q, batch.positions)
        self.append_op(q, k, v, *rope, kv.k, kv.v, batch.geometries[kv.group].slots, batch.positions)
        q = self.turned(q)
        if not len(rows):  # a chunk that ends before its prompt does
            return stream[:0], stream[:0]
        if gates is not None:
            gates = self.gather(gates, rows)
        wanted = self.gather(q.flatten(1), rows).to(q.dtype).view(len(rows), *q.shape[1:])
        geometry, sinks = batch.logit_geometry(kv.group), self.weights.get("attn.sinks")
        out: Tensor = self.paged_attention(wanted, kv.k, kv.v, geometry, self.scores, sinks)
        return self.outputs(out, gates), self.gather(stream, rows)

    def captured(self) -> Iterator[tuple[str, Implementation]]:
        """See Forward."""
        yield "attention", self.attention_op
        if self.has_norms:
            yield "norms", self.rms_norm


class Attention(Attending):
    """Keys and values of each head."""

    def __init__(self, spec: SelfAttentionSpec, parts: Parts) -> None:
        super().__init__(parts, spec.heads, spec.attention, spec.rope, shared=False)
        self.spec, self.has_norms = spec, spec.qk_norm or spec.unit_qk_norm
        self.inputs = MergedLinear(spec.inputs, parts.weights, parts.device)
        has_unit = spec.value_norm or spec.unit_qk_norm or spec.late_qk_norm
        self.unit = torch.ones(spec.head_dim, device=tensor_device(parts.device)) if has_unit else None
        self.missing = spec.head_dim - spec.v_dim  # elements of a value, for which zeros are stored
        self.norms_turned, self._late_norm = spec.late_qk_norm, torch.empty(0)
        self.multiply_gates = ops.multiply_gates.select(parts.device)
        self.grown_queries = query_ops.grown_queries.select(parts.device)

    @property
    def linears(self) -> tuple[MergedLinear, ...]:
        return self.inputs, self.out

    def queries_keys_values(self, x: Tensor, norm: Norm | None = None) -> Projected:
        """See Attending."""
        spec, num_tokens = self.spec, x.shape[0]
        y = self.inputs(x, norm)
        if len(spec.inputs) < len(QKV):
            return self._few(y)
        q_size, kv_size = spec.q_size, spec.kv_size
        q, k, v, gates = y.split((q_size, kv_size, spec.v_size, y.shape[1] - q_size - kv_size - spec.v_size), -1)
        q, k = (part.view(num_tokens, -1, spec.head_dim) for part in (q, k))
        v = v.view(num_tokens, -1, spec.v_dim)
        if self.missing:
            v = torch.nn.functional.pad(v, (0, self.missing))
        if self.inputs.packed is None and spec.rope.interleaved:
            q, k = (x[..., list(spec.pair_order)] for x in (q, k))
        if spec.late_qk_norm:
            k = self.unit_heads(k)
        elif spec.qk_norm:
            q, k = self.normed_heads("attn.q_norm", q), self.normed_heads("attn.k_norm", k)
        if spec.unit_qk_norm:
            q, k = self.unit_heads(q), self.unit_heads(k)
        return Projected(q, k, self.normed_values(v), gates if spec.gated else None)

    def _few(self, y: Tensor) -> Projected:
        """As `queries_keys_values`, without attn.v, or without keys and values. y: what the linears give."""
        spec = self.spec
        parts = y.split((spec.q_size, y.shape[1] - spec.q_size), -1)
        q, k = (part.view(len(y), part.shape[1] // spec.head_dim, spec.head_dim) for part in parts)
        q = self.normed_heads("attn.q_norm", q)
        if spec.kv_from is not None:
            return Projected(q, k, k)
        return Projected(q, self.normed_heads("attn.k_norm", k), self.normed_values(k))

    def normed_values(self, v: Tensor) -> Tensor:
        """v [T, heads, head_dim], normalized in each head if the model does that."""
        return self.unit_heads(v) if self.spec.value_norm else v

    def unit_heads(self, x: Tensor) -> Tensor:
        """x [T, heads, head_dim], normalized in each head without a factor."""
        assert self.unit is not None
        normed: Tensor = self.rms_norm(x, Norm(self.unit, self.parts.eps, None, self.dtype))
        return normed

    def normed_heads(self, role: str, x: Tensor) -> Tensor:
        """x [T, heads, head_dim], normalized in each head, or all heads together."""
        joint = self.spec.joint_qk_norm
        y: Tensor = self.rms_norm(x.reshape(len(x), -1) if joint else x, self.parts.norm(role))
        return y.view(x.shape)

    def turned(self, q: Tensor) -> Tensor:
        """See Attending. Norms keep their value under RoPE, but for their factors: those of keys are the queries'."""
        if not self.norms_turned:
            return q
        if self.inputs.packed is None or not len(self._late_norm):
            self._late_norm = (self.parts.vector("attn.q_norm") * self.parts.vector("attn.k_norm")).float()
        normed: Tensor = self.rms_norm(q, Norm(self._late_norm, self.parts.eps, None, self.dtype))
        return normed

    def grown(self, q: Tensor, positions: Tensor) -> Tensor:
        """See Attending."""
        if self.spec.growth is None:
            return q
        larger: Tensor = self.grown_queries(q, positions, self.spec.growth)
        return larger

    def captured(self) -> Iterator[tuple[str, Implementation]]:
        """See Forward."""
        yield from super().captured()
        if self.spec.growth is not None:
            yield "queries", self.grown_queries

    def outputs(self, out: Tensor, gates: Tensor | None) -> Tensor:
        """See Attending."""
        if self.missing:
            out = out[..., : self.spec.v_dim].contiguous()
        if gates is None:
            return out.view(len(out), -1)
        gated: Tensor = self.multiply_gates(out.view(len(out), -1), gates, "sigmoid")
        return gated


def attending(block: Forward) -> Attending:
    """The attention that the block is, or that is a part of it."""
    return next(part for part in block.members if isinstance(part, Attending))
