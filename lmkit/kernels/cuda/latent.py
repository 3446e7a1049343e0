"""Rows of latent attention as plain keys and values: csrc/read_rows.cu, then one batched product for each."""

from __future__ import annotations

from functools import cache
from typing import Any

import torch
from torch import Tensor

from lmkit.kernels import latent_ops
from lmkit.kernels.cuda import elementwise
from lmkit.kernels.cuda.append import STORAGE
from lmkit.kernels.cuda.module import HALVES, Kernel
from lmkit.kernels.ops import KVTensor
from lmkit.kernels.reference.latent import stored
from lmkit.kernels.registry import implements
from lmkit.kv_dtype import KVDtype

THREADS, WIDTH = 256, 8  # WIDTH: elements of a thread


def _accepts_rows(*, head_dim: int, dtype: torch.dtype, **traits: Any) -> str | None:
    if head_dim % 32:
        return f"rows of {head_dim}: multiples of 32"
    return elementwise.accepts("read_rows.cu") or (None if dtype in HALVES else f"{dtype} is computed through torch")


@implements(latent_ops.kv_rows, "cuda", device="cuda", accepts=_accepts_rows, priority=20)
def kv_rows(cache: KVTensor, blocks: Tensor, length: int, dtype: torch.dtype) -> Tensor:
    if cache.dtype not in STORAGE:
        y: Tensor = latent_ops.kv_rows.fall_back("reference", f"KV stored as {cache.dtype}")(
            cache, blocks, length, dtype
        )
        return y
    out = torch.empty(-(-length // 16) * 16, cache.dim, dtype=dtype, device=cache.data.device)
    grid = -(-length * cache.dim // (WIDTH * THREADS))
    args = [cache.data, cache.params, blocks, cache.block_size, length, out]
    rows_kernel(cache.dim, cache.dtype, dtype == torch.bfloat16)(grid, THREADS, args)
    return out


@cache
def rows_kernel(dim: int, dtype: KVDtype, bf16: bool) -> Kernel:
    return Kernel("read_rows.cu", "read_rows", DIM=dim, STORED=STORAGE[dtype], **({"LM_BF16": 1} if bf16 else {}))


@implements(latent_ops.plain_heads, "cuda", device="cuda", accepts=elementwise.accepts, priority=20)
def plain_heads(rows: Tensor, keys: Tensor, values: Tensor) -> tuple[KVTensor, KVTensor]:
    turned, latent = rows.split((rows.shape[1] - keys.shape[1], keys.shape[1]), dim=1)
    k = rows.new_empty(len(keys), len(rows), turned.shape[1] + keys.shape[2])
    k[..., : turned.shape[1]] = turned
    _multiply(latent, keys, k[..., turned.shape[1] :])
    return stored(k), stored(
        _multiply(latent, values.transpose(1, 2), rows.new_empty(len(keys), len(rows), values.shape[1]))
    )


def _multiply(rows: Tensor, weights: Tensor, out: Tensor) -> Tensor:
    """rows [L, K] times each of weights [heads, K, N], into out [heads, L, N]."""
    each = rows.expand(len(weights), -1, -1)
    return torch.bmm(each, weights, out=out) if rows.is_cuda else out.copy_(each.float() @ weights.float())
