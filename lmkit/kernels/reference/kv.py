"""Blocked KV storage: how tokens are written, and read back as float32."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from lmkit.kernels import ops
from lmkit.kernels.ops import KV_BITS, KVTensor
from lmkit.kernels.registry import implements

FLOAT16_MAX = 65504.0


def accepts_heads(*, num_heads: int, num_kv_heads: int, head_dim: int, **traits: Any) -> str | None:
    if num_heads % num_kv_heads:
        return f"{num_heads} query heads do not share {num_kv_heads} KV heads evenly"
    return f"odd head_dim {head_dim}" if head_dim % 2 else None


@implements(ops.kv_append, "reference", device="any", accepts=accepts_heads)
def kv_append(k: Tensor, v: Tensor, k_cache: KVTensor, v_cache: KVTensor, slots: Tensor) -> None:
    kept = slots >= 0
    slots = slots[kept].long()
    for x, cache in ((k[kept], k_cache), (v[kept], v_cache)):
        block, offset = slots // cache.block_size, slots % cache.block_size
        if cache.dtype in ("int8", "int4"):
            codes, params = quantize_vectors(x, KV_BITS[cache.dtype])
            if cache.dtype == "int4":
                half = codes.shape[-1] // 2
                codes = codes[..., :half] | codes[..., half:] << 4
            cache.data[block, :, offset] = codes
            cache.params[block, :, offset] = params
        else:
            cache.data[block, :, offset] = x.to(cache.data.dtype)


def quantize_vectors(x: Tensor, bits: int) -> tuple[Tensor, Tensor]:
    """(codes uint8 [..., D], float16 [..., 2] = scale, minimum) of x [..., D], as ops.kv_append defines them."""
    wide, max_code = x.float().clamp(-FLOAT16_MAX, FLOAT16_MAX), (1 << bits) - 1
    low, high = wide.amin(-1, keepdim=True), wide.amax(-1, keepdim=True)
    minimum = low.half().float()
    scale = ((high - minimum) / max_code).clamp(0, FLOAT16_MAX).half().float()
    scale = torch.where(high > low, scale, 0.0)
    steps = (wide - minimum) / torch.where(scale > 0, scale, 1.0)
    codes = torch.where(scale > 0, steps.round().clamp(0, max_code), 0.0).to(torch.uint8)
    return codes, torch.cat([scale, minimum], dim=-1).half()


def read_blocks(cache: KVTensor, blocks: Tensor, length: int) -> Tensor:
    """The first `length` tokens of a block table, float32 [num_kv_heads, length, D]."""
    data = cache.data[blocks.long()]  # [blocks, heads, block_size, D or D/2]
    if cache.dtype == "int4":
        data = torch.cat([data & 15, data >> 4], dim=-1)
    values = data.float()
    if cache.dtype in ("int8", "int4"):
        scale, minimum = cache.params[blocks.long()].float().unbind(-1)
        values = values * scale[..., None] + minimum[..., None]
    return values.transpose(0, 1).flatten(1, 2)[:, :length]
