"""Reference attention: a sequence's blocks are gathered, then one product and one softmax."""

from __future__ import annotations

import torch
from torch import Tensor

from lmkit.attention_spec import AttentionSpec
from lmkit.kernels import ops
from lmkit.kernels.ops import BatchGeometry, KVTensor
from lmkit.kernels.reference.elementwise import accepts_rope, rope_append
from lmkit.kernels.reference.kv import (
    accepts_heads,
    left_out_vectors,
    read_blocks,
    stored_vectors,
    turned_queries,
)
from lmkit.kernels.registry import implements
from lmkit.kv_dtype import INT4, KVDtype

SMALL_QUERY = 127  # the largest code of a query that meets int4 keys


def small_query_limit(dim: int, dtype: KVDtype = INT4) -> int:
    """L in ops.paged_attention, for keys of this type."""
    return min(SMALL_QUERY, 32767 // (2 * dtype.largest * -(-dim // 32)))


def rounded_queries(x: Tensor, dtype: KVDtype = INT4) -> Tensor:
    """float32 x [..., D], rounded as queries that meet short codes are."""
    step = x.abs().amax(-1, keepdim=True) / small_query_limit(x.shape[-1], dtype)
    inverse = torch.where(step > 2.0**-120, 1 / step, 0.0)
    return (x * inverse).round() * step


def _scores(queries: Tensor, k_cache: KVTensor, blocks: Tensor, length: int) -> Tensor:
    """float32 [num_heads, n, length] of queries float32 [num_heads, n, D], which are already scaled."""
    group = len(queries) // k_cache.data.shape[1]
    if not k_cache.dtype.has_short_codes:
        keys = read_blocks(k_cache, blocks, length).repeat_interleave(group, dim=0)
        return queries @ keys.transpose(1, 2)
    keys = stored_vectors(k_cache, blocks, length).repeat_interleave(group, dim=0)
    scores = rounded_queries(turned_queries(queries, k_cache), k_cache.dtype) @ keys.transpose(1, 2)
    if (left_out := left_out_vectors(k_cache, length)) is None:
        return scores
    return scores + queries @ left_out.repeat_interleave(group, dim=0).transpose(1, 2)


@implements(ops.paged_attention, "reference", device="any", accepts=accepts_heads)
def paged_attention(
    q: Tensor,
    k_cache: KVTensor,
    v_cache: KVTensor,
    geometry: BatchGeometry,
    spec: AttentionSpec,
    sink_logits: Tensor | None = None,
) -> Tensor:
    out = q.new_empty(*q.shape[:2], v_cache.dim)
    group = q.shape[1] // k_cache.data.shape[1]
    starts = geometry.query_start.tolist()
    for b, length in enumerate(geometry.context_lens.tolist()):
        blocks = geometry.block_tables[b, : -(-length // k_cache.block_size)]
        values = read_blocks(v_cache, blocks, length).repeat_interleave(group, dim=0)
        rows = slice(starts[b], starts[b + 1])
        position = torch.arange(length - (rows.stop - rows.start), length, device=q.device)[:, None]
        key = torch.arange(length, device=q.device)
        visible: Tensor = key <= position
        if spec.window:
            visible &= (key > position - spec.window) | (key < spec.sinks)
        scores = _scores(q[rows].float().transpose(0, 1) * spec.scale, k_cache, blocks, length)
        if spec.softcap:
            scores = spec.softcap * (scores / spec.softcap).tanh()
        values = values.masked_fill(~visible.any(0)[:, None], 0)  # 0 * NaN would be NaN
        scores = scores.masked_fill(~visible, -torch.inf)
        if sink_logits is None:
            weights = scores.softmax(-1)
        else:
            of_sink = sink_logits.float()[:, None, None].expand(*scores.shape[:2], 1)
            weights = torch.cat([scores, of_sink], dim=-1).softmax(-1)[..., :-1]
        out[rows] = (weights @ values).transpose(0, 1).to(q.dtype)
    return out


@implements(ops.rope_paged_attention, "reference", device="any", accepts=accepts_rope)
def rope_paged_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cos: Tensor,
    sin: Tensor,
    k_cache: KVTensor,
    v_cache: KVTensor,
    geometry: BatchGeometry,
    spec: AttentionSpec,
    sink_logits: Tensor | None = None,
    positions: Tensor | None = None,
) -> Tensor:
    rope_append(q, k, v, cos, sin, k_cache, v_cache, geometry.slots, positions)
    out: Tensor = paged_attention(q, k_cache, v_cache, geometry, spec, sink_logits)
    return out
