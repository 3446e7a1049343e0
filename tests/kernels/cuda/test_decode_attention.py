"""Decode attention against float32 attention over what the cache reads back as, and append-then-attend in one launch.

Tolerance, of the largest result: weights and codes are F16 (2^-11), the result Half: 2^-9 of bfloat16, where bfloat16
values also want bfloat16 weights (2^-9 each, of which the average counts).
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from lmkit.kernels import ops
from lmkit.kernels.cuda import attention, emulation, module
from lmkit.kernels.ops import KVTensor
from lmkit.kernels.reference.kv import read_blocks
from tests.kernels.cases import filled_cache, key_mean

TOLERANCE = {torch.float16: 1e-3, torch.bfloat16: 4e-3}
LENGTHS = (1, 700, 64, 0, 65, 33, 290)


def oracle(
    q: Tensor,
    k_cache: KVTensor,
    v_cache: KVTensor,
    tables: Tensor,
    lengths: Tensor,
    scale: float,
    window: int,
    sinks: int,
) -> Tensor:
    """float32 [B, heads, D]: one query a sequence; zeros for an empty one."""
    out, group = torch.zeros(q.shape), q.shape[1] // k_cache.data.shape[1]
    for b, length in enumerate(lengths.tolist()):
        if length == 0:
            continue
        blocks = tables[b, : -(-length // k_cache.block_size)]
        keys, values = (read_blocks(cache, blocks, length).repeat_interleave(group, 0) for cache in (k_cache, v_cache))
        positions = torch.arange(length)
        seen = (positions >= length - window) | (positions < sinks) if window else positions >= 0
        scores = torch.einsum("hd,hnd->hn", q[b].float(), keys) * scale
        weights = scores.masked_fill(~seen, -torch.inf).softmax(-1)
        out[b] = torch.einsum("hn,hnd->hd", weights, values.masked_fill(~seen[None, :, None], 0))
    return out


def case(
    types: tuple[str, str], heads: tuple[int, int], dim: int, block_size: int, dtype: torch.dtype,
    lengths: tuple[int, ...] = LENGTHS,
) -> tuple[Any, ...]:  # fmt: skip
    """(q, k cache, v cache, tables, query_start, lengths); every token that no sequence has is a NaN."""
    num_heads, kv_heads = heads
    kv, tables = filled_cache(types, kv_heads, dim, block_size, [max(n, 1) for n in lengths])
    used = torch.zeros(len(kv.k.data), block_size, dtype=torch.bool)
    for row, length in zip(tables, lengths, strict=True):
        t = torch.arange(length)
        used[row[t // block_size].long(), t % block_size] = True
    for cache in (kv.k, kv.v):
        unused = ~used[:, None, :].expand(cache.data.shape[:3])
        if cache.dtype in ops.KV_CODED:
            cache.data[unused], cache.params[unused] = 0x7F, torch.nan
        else:
            cache.data[unused] = torch.nan
    starts = torch.arange(len(lengths) + 1).int()
    q = (torch.randn(len(lengths), num_heads, dim) * 2).to(dtype)
    return q, kv.k, kv.v, tables, starts, torch.tensor(lengths).int()


def moved(args: tuple[Any, ...], device: str) -> tuple[Any, ...]:
    def move(x: Any) -> Any:
        if isinstance(x, KVTensor):
            mean = x.mean and replace(x.mean, **{name: part.to(device) for name, part in vars(x.mean).items()})
            return replace(x, data=x.data.to(device), params=x.params.to(device), mean=mean)
        return x.to(device)

    return tuple(map(move, args))


def decode(
    args: tuple[Any, ...], window: int, sinks: int, device: str, new: tuple[Tensor, ...] | None = None
) -> Tensor:
    """The kernel's result on poisoned memory; `new`: k, v, cos, sin, slots."""
    q, k_cache, v_cache, tables, starts, lengths = moved(args, device)
    out = torch.full_like(q, torch.nan)
    fused: Any = None if new is None else moved(new, device)
    scale = q.shape[2] ** -0.5
    attention.decode_attention(q, fused, k_cache, v_cache, tables, starts, lengths, scale, window, sinks, out)
    assert not bool(module.counters(device).any())
    return out.cpu().float()


def error(got: Tensor, expected: Tensor) -> float:
    assert bool(got.isfinite().all())
    return float((got - expected).abs().max() / expected.abs().max())


TYPES = (
    (("float16", "float16"), torch.float16),
    (("bfloat16", "bfloat16"), torch.bfloat16),
    (("int8", "int8"), torch.float16),
    (("int8", "int8"), torch.bfloat16),
    (("int4", "int4"), torch.float16),
    (("fp8", "fp8"), torch.bfloat16),
    (("int8", "int4"), torch.bfloat16),
    (("float16", "fp8"), torch.float16),
    (("int4", "bfloat16"), torch.bfloat16),
)


@pytest.mark.parametrize(("types", "dtype"), TYPES)
@pytest.mark.parametrize(("window", "sinks"), [(0, 0), (100, 7)])
def test_types(device: str, types: tuple[str, str], dtype: torch.dtype, window: int, sinks: int) -> None:
    torch.manual_seed(1)
    args = case(types, (4, 2), 64, 32, dtype)
    expected = oracle(*args[:4], args[5], 64**-0.5, window, sinks)
    assert error(decode(args, window, sinks, device), expected) < TOLERANCE[dtype]
