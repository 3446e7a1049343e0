"""Ops of latent attention's prompts: rows of the cache become plain keys and values of each head.

A row has R turned elements and C of the latent. A head's key has the turned elements and N others, its value V.
"""

from __future__ import annotations

import torch
from torch import Tensor

from lmkit.kernels.ops import KVTensor
from lmkit.kernels.registry import op


@op
def kv_rows(cache: KVTensor, blocks: Tensor, length: int, dtype: torch.dtype) -> Tensor:
    """The first `length` rows of a sequence with the block table `blocks` (int32), read as ops.paged_attention reads
    keys: [length rounded up to a multiple of 16, D] in `dtype`. The added rows hold anything. `cache` has one KV head.
    """


@op
def plain_heads(rows: Tensor, keys: Tensor, values: Tensor) -> tuple[KVTensor, KVTensor]:
    """Rows [L, R + C] = turned | latent, keys [heads, C, N] and values [heads, V, C], all of one dtype, as storage in
    that dtype of one block of L tokens: keys turned | latent keys_h [1, heads, L, R + N], values latent values_h^T
    [1, heads, L, V].
    """
