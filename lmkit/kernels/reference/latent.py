"""Rows of latent attention as plain keys and values."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import pad

from lmkit.kernels import latent_ops
from lmkit.kernels.ops import KVTensor
from lmkit.kernels.reference.kv import read_blocks
from lmkit.kernels.registry import implements
from lmkit.kv_dtype import dense_kv_dtype


@implements(latent_ops.kv_rows, "reference", device="any")
def kv_rows(cache: KVTensor, blocks: Tensor, length: int, dtype: torch.dtype) -> Tensor:
    return pad(read_blocks(cache, blocks[: -(-length // cache.block_size)], length)[0], (0, 0, 0, -length % 16)).to(
        dtype
    )


@implements(latent_ops.plain_heads, "reference", device="any")
def plain_heads(rows: Tensor, keys: Tensor, values: Tensor) -> tuple[KVTensor, KVTensor]:
    turned, latent = rows.float().split((rows.shape[1] - keys.shape[1], keys.shape[1]), dim=1)
    k = torch.cat([turned.expand(len(keys), -1, -1), latent @ keys.float()], dim=2)
    return stored(k.to(rows.dtype)), stored((latent @ values.float().transpose(1, 2)).to(rows.dtype))


def stored(heads: Tensor) -> KVTensor:
    """heads [heads, L, D] as storage of one block."""
    return KVTensor(heads[None], heads.new_empty(0, dtype=torch.float16), dense_kv_dtype(heads.dtype))
