"""Writing tokens into blocked KV storage: ops.rope_append and ops.kv_append."""

from __future__ import annotations

from functools import cache
from typing import Any

import numpy as np
import torch
from torch import Tensor

from lmkit.kernels import ops
from lmkit.kernels.cuda import elementwise
from lmkit.kernels.cuda.module import HALVES, Kernel
from lmkit.kernels.cuda.switches import off
from lmkit.kernels.ops import KVTensor
from lmkit.kernels.reference.elementwise import accepts_rope
from lmkit.kernels.reference.kv import accepts_heads
from lmkit.kernels.registry import implements
from lmkit.kv_dtype import BFLOAT16, FLOAT16, FP8, INT2, INT3, INT4, INT8, KVDtype

STORAGE = {FLOAT16: 0, BFLOAT16: 1, INT8: 2, FP8: 3, INT4: 4, INT3: 5, INT2: 6}  # StorageType of csrc/kv.cuh
MAX_HEAD_DIM, MAX_ROW_DIM = 256, 1024  # of all kernels, and of wide_attention.cu
HEADS_PER_BLOCK = 8


def accepts(*, head_dim: int, latent: bool = False, **traits: Any) -> str | None:
    if (reason := elementwise.accepts() or head_dim_problem(head_dim, are_one=latent)) is not None:
        return reason
    check = accepts_rope if "rotary_dim" in traits else accepts_heads
    return check(head_dim=head_dim, **traits)


def problem(rows: tuple[Tensor, ...], caches: tuple[KVTensor, KVTensor]) -> str | None:
    """Why kernels cannot take these tensors, or None. They take rows [T, heads, D] of one 16-bit type that 16-byte
    loads can read, with D as in the caches, and caches stored in one of `STORAGE`."""
    dtype, dim = rows[0].dtype, rows[0].shape[2]
    if dtype not in HALVES or any(x.dtype != dtype for x in rows):
        return elementwise.dtypes_of(*rows)
    if (reason := head_dim_problem(dim, are_one=are_one(*caches))) is not None:
        return reason
    if dim > MAX_HEAD_DIM and (leaves_out(*caches) or any(cache.hadamard for cache in caches)):
        return f"rows of {dim} that are turned"
    if other := {cache.dtype for cache in caches} - set(STORAGE):
        return f"KV stored as {other.pop()}"
    if all(x.stride(2) == 1 and x.stride(0) % 8 == x.stride(1) % 8 == 0 and x.data_ptr() % 16 == 0 for x in rows):
        return None
    return "rows that loads of 16 bytes cannot read"


def are_one(k_cache: KVTensor, v_cache: KVTensor) -> bool:
    """Whether rows are keys and values at once, as of latent attention."""
    return k_cache.data is v_cache.data


def leaves_out(k_cache: KVTensor, v_cache: KVTensor) -> bool:
    """Whether keys are balanced, or vectors of position 0 lack a part. Their kernels are variants of their own, and
    turn.py prepares their queries."""
    return any(x is not None for x in (k_cache.balance, k_cache.first, v_cache.first))


def head_dim_problem(head_dim: int, *, are_one: bool) -> str | None:
    step = 32 if are_one or head_dim > MAX_HEAD_DIM else 16
    if head_dim % step or head_dim > MAX_ROW_DIM:
        return f"head_dim {head_dim}: multiples of {step} up to {MAX_ROW_DIM}"
    return None


def _accepts(**traits: Any) -> str | None:
    return off("append.cu") or accepts(**traits)


@cache
def append_kernel(dim: int, keys: KVDtype, values: KVDtype, bf16: bool, *, balanced: bool = False) -> Kernel:
    defines = ({"LM_BF16": 1} if bf16 else {}) | ({"BALANCED": 1} if balanced else {})
    return Kernel("append.cu", "append", DIM=dim, KEYS=STORAGE[keys], VALUES=STORAGE[values], **defines)


@implements(ops.rope_append, "cuda", device="cuda", accepts=_accepts, priority=20)
def rope_append(
    q: Tensor, k: Tensor, v: Tensor, cos: Tensor, sin: Tensor, k_cache: KVTensor, v_cache: KVTensor, slots: Tensor,
    positions: Tensor | None = None,
) -> None:  # fmt: skip
    if (reason := off("append.cu") or problem((q, k, v), (k_cache, v_cache))) is not None:
        ops.rope_append.fall_back("reference", reason)(q, k, v, cos, sin, k_cache, v_cache, slots, positions)
        return
    mean = None if k_cache.mean is None else k_cache.mean.vector
    angles = (cos.contiguous(), sin.contiguous(), cos.shape[1], mean)
    values = strided(None if are_one(k_cache, v_cache) else v)  # a row that is both is stored once, as a key
    _append((*strided(q), *strided(k), *values, *angles), k, q.shape[1], k_cache, v_cache, slots, positions)


@implements(ops.kv_append, "cuda", device="cuda", accepts=_accepts, priority=20)
def kv_append(
    k: Tensor, v: Tensor, k_cache: KVTensor, v_cache: KVTensor, slots: Tensor, positions: Tensor | None = None
) -> None:
    if (reason := off("append.cu") or problem((k, v), (k_cache, v_cache))) is not None:
        ops.kv_append.fall_back("reference", reason)(k, v, k_cache, v_cache, slots, positions)
        return
    no_queries, no_angles = strided(None), (None, None, 0, None)
    _append((*no_queries, *strided(k), *strided(v), *no_angles), k, 0, k_cache, v_cache, slots, positions)


def _append(
    rows: tuple[Any, ...], k: Tensor, num_heads: int, k_cache: KVTensor, v_cache: KVTensor, slots: Tensor,
    positions: Tensor | None,
) -> None:  # fmt: skip
    """Launch the append kernel. `rows` are its arguments before the caches."""
    tokens, kv_heads, dim = k.shape
    assert positions is None or (positions.dtype == torch.int32 and positions.is_contiguous())
    matrices = None if k_cache.balance is None else k_cache.balance.keys
    assert matrices is None or matrices.is_contiguous()
    left_out = leaves_out(k_cache, v_cache)
    kernel = append_kernel(dim, k_cache.dtype, v_cache.dtype, k.dtype == torch.bfloat16, balanced=left_out)
    values = rows[6]  # None: a row that is both is no head of its own
    blocks = -(-tokens * (num_heads + (1 if values is None else 2) * kv_heads) // HEADS_PER_BLOCK)
    sizes = (tokens, num_heads, kv_heads, k_cache.block_size)
    of_position_0 = (positions, matrices, k_cache.first, v_cache.first) if left_out else ()
    packs = k_cache.dtype.levels or v_cache.dtype.levels
    shared = HEADS_PER_BLOCK * dim if packs else 0  # a byte for each code
    args = [*rows, *storage(k_cache), *storage(v_cache), slots, *sizes, *of_position_0]
    kernel(blocks, 128, args, shared=shared)


def strided(x: Tensor | None) -> tuple[Any, ...]:
    """A tensor [T, heads, D] and its first two strides, `long long`."""
    return (None, np.int64(0), np.int64(0)) if x is None else (x, np.int64(x.stride(0)), np.int64(x.stride(1)))


def storage(cache: KVTensor) -> tuple[Any, ...]:
    """A cache's arguments for csrc's kernels: data, params, fixed scales or null, whether `hadamard` is set."""
    assert cache.data.is_contiguous()
    assert cache.params.is_contiguous()
    return cache.data, cache.params, cache.scales, int(cache.hadamard)


def row_stride(dtype: KVDtype, dim: int) -> int:
    """STRIDE of csrc/kv.cuh: bytes of a token's row in shared memory, an odd number of 16-byte chunks."""
    return (-(-dim * (4 if dtype.levels else dtype.bits) // 256) * 2 + 1) * 16


def stored_bytes(dtype: KVDtype, dim: int) -> int:
    """STORED_STRIDE of csrc/kv.cuh: the same of a row that is not unpacked yet."""
    return dim * dtype.bits // 8 if dtype.levels else row_stride(dtype, dim)
