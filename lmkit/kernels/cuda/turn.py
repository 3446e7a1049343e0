"""Queries of keys that are balanced, or stored without a vector at position 0: csrc/turn.cu."""

from __future__ import annotations

from functools import cache
from typing import NamedTuple

import torch
from torch import Tensor

from lmkit.kernels.cuda.append import leaves_out, strided
from lmkit.kernels.cuda.module import Kernel
from lmkit.kernels.ops import KVTensor
from lmkit.kv_dtype import BFLOAT16

THREADS, ROWS = 128, 32


class Queries(NamedTuple):
    """Queries as attention takes them."""

    rows: Tensor  # [T, num_heads, D], in the type of products with the keys if there are shares
    shares: Tensor | None = None  # float32 [T, num_heads, 2 * pairs of the key mean + 1]: csrc/turn.cu


def turned(q: Tensor, k_cache: KVTensor, v_cache: KVTensor) -> Queries:
    """Queries [T, num_heads, D], rotated, for these caches: q itself if what attention undoes is in its own kernel."""
    if not leaves_out(k_cache, v_cache):
        return Queries(q)
    (num_tokens, num_heads, dim), kv_heads, mean = q.shape, k_cache.data.shape[1], k_cache.mean
    number = torch.bfloat16 if k_cache.dtype == BFLOAT16 else torch.float16
    pairs = 0 if mean is None else mean.pairs.shape[1]
    rows = q.new_empty(q.shape, dtype=number)
    shares = q.new_empty(num_tokens, num_heads, 2 * pairs + 1, dtype=torch.float32)
    matrices = None if k_cache.balance is None else k_cache.balance.queries
    assert matrices is None or matrices.is_contiguous()
    means = (None, None, 0, 0) if mean is None else (mean.vector, mean.pairs, len(mean.table), pairs)
    group = num_heads // kv_heads
    args = [*strided(q), matrices, *means, k_cache.first, rows, shares, num_tokens, group]
    grid = -(-num_tokens * group // ROWS), kv_heads, dim // columns(dim)
    kernel = turn_kernel(dim, number == torch.bfloat16, q.dtype == torch.bfloat16)
    kernel(grid, THREADS, args, shared=4 * ROWS * (dim + 4))
    return Queries(rows, shares)


def columns(dim: int) -> int:
    """COLUMNS of csrc/turn.cu."""
    return next(count for count in (64, 32, 16) if dim % count == 0)


@cache
def turn_kernel(dim: int, bf16_keys: bool, bf16: bool) -> Kernel:
    return Kernel("turn.cu", "turn", DIM=dim, BF16_KEYS=int(bf16_keys), **({"LM_BF16": 1} if bf16 else {}))
