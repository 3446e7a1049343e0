"""Latent attention of a step with chunks over plain heads (layers.latent_cost)."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor

from lmkit.kernels import latent_ops, ops
from lmkit.kernels.ops import BatchGeometry, Norm
from lmkit.layers.batch import KVLayer
from lmkit.layers.block import At, Forward
from lmkit.layers.latent import LatentAttention
from lmkit.layers.latent_cost import Prompt, heads_at_once
from lmkit.layers.prompts import Prompts


def plain_heads(blocks: Iterable[Forward]) -> PlainHeads | None:
    """Those of the first block with latent attention; all are alike."""
    found = (block.plain_heads for block in blocks if isinstance(block, LatentAttention))
    return next((plain for plain in found if isinstance(plain, PlainHeads)), None)


class PlainHeads:
    """Latent attention in which the chunks of BatchInputs.prompts have plain keys and values, a group of heads at a
    time. Other sequences of the step are computed over the latent. Both append the same rows."""

    def __init__(self, latent: LatentAttention, device: str) -> None:
        self.latent, self.attention = latent, latent.spec.attention
        spec, heads, rotary_dim = latent.spec, latent.num_heads, latent.spec.rope.rotary_dim
        plain = {"head_dim": spec.query_dim, "num_heads": heads, "num_kv_heads": heads}
        rows = {"head_dim": spec.row_dim, "num_heads": heads, "num_kv_heads": 1, "latent": True}
        self.turn = ops.rope_append.select(device, rotary_dim=rotary_dim, latent=True, **plain)
        self.append = ops.rope_append.select(device, rotary_dim=rotary_dim, **rows)
        self.attend = ops.paged_attention.select(device, **plain)
        self.attend_rows = ops.paged_attention.select(device, **rows)
        self.kv_rows = latent_ops.kv_rows.select(device, head_dim=spec.row_dim, dtype=latent.dtype)
        self.plain_heads = latent_ops.plain_heads.select(device)

    @property
    def runs(self) -> bool:
        """Whether kernels compute all of it."""
        used = self.turn, self.append, self.attend, self.attend_rows, self.kv_rows, self.plain_heads
        return all(implementation.is_kernel for implementation in used) and self.latent.spec.v_head_dim % 16 == 0

    def __call__(self, x: Tensor, norm: Norm | None, at: At) -> Tensor:
        """x [T, hidden], normalized if `norm` is None -> the input of attn.o [T, heads * v_head_dim]. Appends to the
        KV blocks."""
        batch, rope, kv = at
        prompts, geometry, spec = batch.prompts, batch.geometries[kv.group], self.latent.spec
        assert prompts is not None
        turned, plain, rows, (_, of_x) = self.latent.parts_and_rows(x, norm)
        q = torch.cat([turned, plain], dim=2)
        self.turn(q, q[:, :0], q[:, :0], *rope, kv.k, kv.v, geometry.slots)
        self.append(rows[:, :0], rows, rows, *rope, kv.k, kv.v, geometry.slots)
        out = q.new_empty(len(q), q.shape[1], spec.v_head_dim)
        for chunk, starts in zip(prompts.chunks, prompts.starts, strict=True):
            self._attend_chunk(q, kv, geometry, prompts, chunk, starts, out)
        if prompts.rows is not None:
            others = q[prompts.rows].split((spec.qk_rope_head_dim, spec.qk_nope_head_dim), dim=2)
            attended = self.attend_rows(
                self.latent.absorbed(*others), kv.k, kv.v, prompts.geometries[kv.group], self.attention
            )
            out[prompts.rows] = self.latent.values(attended).view(-1, *out.shape[1:])
        return self.latent.gated(out.flatten(1), of_x if spec.gated else None)

    def _attend_chunk(
        self,
        q: Tensor,
        kv: KVLayer,
        geometry: BatchGeometry,
        prompts: Prompts,
        chunk: Prompt,
        starts: Tensor,
        out: Tensor,
    ) -> None:
        """Write the chunk's part of `out` [T, heads, v_head_dim]."""
        b, rows = chunk.sequence, slice(chunk.start, chunk.start + chunk.tokens)
        latents = self.kv_rows(kv.k, geometry.block_tables[b], chunk.length, q.dtype)
        keys, values = self.latent.packed_parts()
        alone = BatchGeometry(starts, geometry.context_lens[b : b + 1], prompts.block, geometry.slots)
        step = heads_at_once(chunk.length, self.latent.spec, q.shape[1])
        for first in range(0, q.shape[1], step):
            heads = slice(first, first + step)
            k, v = self.plain_heads(latents, keys[heads], values[heads])
            out[rows, heads] = self.attend(q[rows, heads], k, v, alone, self.attention)
