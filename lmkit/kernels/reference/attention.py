"""Reference attention: a sequence's blocks are gathered, one product, one softmax."""

from __future__ import annotations

import torch
from torch import Tensor

from lmkit.kernels import ops
from lmkit.kernels.ops import KVTensor
from lmkit.kernels.reference.kv import accepts_heads, read_blocks
from lmkit.kernels.registry import implements


@implements(ops.paged_attention, "reference", device="any", accepts=accepts_heads)
def paged_attention(
    q: Tensor,
    k_cache: KVTensor,
    v_cache: KVTensor,
    block_tables: Tensor,
    query_start: Tensor,
    context_lens: Tensor,
    scale: float,
    window: int,
    sinks: int = 0,
) -> Tensor:
    out = torch.empty_like(q, memory_format=torch.contiguous_format)
    group = q.shape[1] // k_cache.data.shape[1]
    starts = query_start.tolist()
    for b, length in enumerate(context_lens.tolist()):
        blocks = block_tables[b, : -(-length // k_cache.block_size)]
        keys = read_blocks(k_cache, blocks, length).repeat_interleave(group, dim=0)
        values = read_blocks(v_cache, blocks, length).repeat_interleave(group, dim=0)
        rows = slice(starts[b], starts[b + 1])
        position = torch.arange(length - (rows.stop - rows.start), length, device=q.device)[:, None]
        key = torch.arange(length, device=q.device)
        visible: Tensor = key <= position
        if window:
            visible &= (key > position - window) | (key < sinks)
        scores: Tensor = q[rows].float().transpose(0, 1) @ keys.transpose(1, 2) * scale
        values = values.masked_fill(~visible.any(0)[:, None], 0)  # 0 * NaN would be NaN
        weights = scores.masked_fill(~visible, -torch.inf).softmax(-1)
        out[rows] = (weights @ values).transpose(0, 1).to(q.dtype)
    return out
