"""Latent attention over the keys that an indexer chooses for each query (DeepSeek-V3.2, arXiv 2512.02556).

    x --wk--norm--RoPE--> a key of the indexer, stored beside the row of latent attention
    latent of queries --wq_b--RoPE--> queries of several small heads;   x --weights_proj--> a weight for each head
    score = sum over heads of weight * relu(q . k); the query sees the `top_k` keys with the greatest scores

The model's factors on scores are left out: all scores of a query have the same ones. Each row is then a sequence of its
own for the attention op, with a table of single tokens in place of blocks. If no context of a step can be longer than
`top_k`, rows see all keys, and nothing is chosen.
"""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from lmkit.kernels import index_ops, ops
from lmkit.kernels.ops import BatchGeometry, KVTensor, Norm
from lmkit.layers.block import At, Parts
from lmkit.layers.blocks.latent import EPS, LatentSpec
from lmkit.layers.latent import LatentAttention, LatentParts


class SparseLatentAttention(LatentAttention):
    """Latent attention with an indexer, or with the choice of an earlier layer's."""

    def __init__(self, spec: LatentSpec, parts: Parts) -> None:
        super().__init__(spec, parts)
        assert spec.indexer is not None
        self.indexer = spec.indexer
        shape = {"head_dim": self.indexer.head_dim, "num_heads": self.indexer.num_heads, "num_kv_heads": 1}
        self.append_index = ops.rope_append.select(parts.device, rotary_dim=spec.rope.rotary_dim, latent=True, **shape)
        self.chosen_keys = index_ops.chosen_keys.select(parts.device)

    def inner(self, x: Tensor, norm: Norm | None = None, at: At | None = None) -> Tensor:
        """See Forward."""
        assert at is not None
        found = self.parts_and_rows(x, norm)
        geometry = at.batch.geometries[at.kv.group]
        if (seen := self._seen(found, at, geometry)) is None:
            return self.attend(self.projected(found), at)
        return self.values(self._over(self._appended(found, at), at, seen))

    def logit_rows(self, x: Tensor, norm: Norm | None, at: At, stream: Tensor) -> tuple[Tensor, Tensor]:
        """See Forward."""
        found, rows = self.parts_and_rows(x, norm), at.batch.logit_rows
        geometry = at.batch.logit_geometry(at.kv.group)
        seen = self._seen(found, at, geometry, rows)
        q = self._appended(found, at)[rows]
        if not len(rows):
            return stream[:0], stream[:0]
        if seen is None:
            out = self.paged_attention(q, at.kv.k, at.kv.v, geometry, self.scores)
        else:
            out = self._over(q, at, seen)
        return self.values(out), self.gather(stream, rows)

    def _appended(self, found: LatentParts, at: At) -> Tensor:
        """The queries [T, heads, row_dim] of the tokens, whose rows are appended."""
        q, row, _, _ = self.projected(found)
        slots = at.batch.geometries[at.kv.group].slots
        self.append_op(q, row, row, *at.rope, at.kv.k, at.kv.v, slots, at.batch.positions)
        return q

    def _over(self, q: Tensor, at: At, seen: BatchGeometry) -> Tensor:
        out: Tensor = self.paged_attention(q, by_token(at.kv.k), by_token(at.kv.v), seen, self.scores)
        return out

    def _seen(
        self, found: LatentParts, at: At, geometry: BatchGeometry, rows: Tensor | None = None
    ) -> BatchGeometry | None:
        """The keys that rows see, as sequences of single tokens; None: all. Appends the tokens' keys of the indexer.
        `rows`: some of the step's tokens, in sequences as `geometry` has them; None: all."""
        made = None if self.indexer.shared else self._append(found, at)
        if geometry.block_tables.shape[1] * at.kv.k.block_size <= self.indexer.top_k:
            return None
        choice = at.batch.choice
        if made is None and choice.seen is None:  # a layer alone, while it is calibrated
            assert int(geometry.context_lens.max()) <= self.indexer.top_k
            return None
        if made is None:
            assert choice.seen is not None
            return choice.seen if rows is None else _some(choice.seen, rows)
        q, weights = made if rows is None else (part[rows] for part in made)
        slots, lengths = self.chosen_keys(q, weights, at.kv.index, geometry, self.indexer.top_k)
        choice.seen = BatchGeometry(_singles(slots), lengths, slots, geometry.slots)
        return choice.seen

    def _append(self, found: LatentParts, at: At) -> tuple[Tensor, Tensor]:
        """(queries float32 [T, heads, dim], weights [T, heads]) of the indexer, whose keys are appended."""
        (of_queries, of_x), index, kv = found.read, self.indexer, at.kv
        assert kv.index is not None
        q = of_queries.float().view(len(of_x), index.num_heads, index.head_dim)
        k, weights = of_x.split((index.head_dim, index.num_heads), dim=1)
        k = self.rms_norm(k.contiguous(), self._layer_norm()).float()[:, None]
        if index.interleaved:
            turned = self.spec.qk_rope_head_dim
            q, k = (torch.cat([self._halves(y[..., :turned]), y[..., turned:]], dim=-1) for y in (q, k))
        q = q.contiguous()
        slots = at.batch.geometries[kv.group].slots
        self.append_index(q, k, k, *at.rope, kv.index, kv.index, slots, at.batch.positions)
        return q, weights

    def _layer_norm(self) -> Norm:
        weight, bias = (self.parts.vector(f"attn.index_k_norm{part}") for part in ("", ".bias"))
        return Norm(weight, EPS, None, self.dtype, bias)


def by_token(cache: KVTensor) -> KVTensor:
    """Blocks of one KV head as blocks of one token."""
    data, params = (
        part.view(-1, 1, 1, part.shape[-1]) if part.numel() else part for part in (cache.data, cache.params)
    )
    return replace(cache, data=data, params=params)


def _singles(slots: Tensor) -> Tensor:
    """Where rows begin that are sequences of their own."""
    return torch.arange(len(slots) + 1, dtype=torch.int32, device=slots.device)


def _some(seen: BatchGeometry, rows: Tensor) -> BatchGeometry:
    slots = seen.block_tables[rows]
    return BatchGeometry(_singles(slots), seen.context_lens[rows], slots, seen.slots)
