"""Blocked KV storage: tokens are written, and read back as float32."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from lmkit.kernels import ops
from lmkit.kernels.ops import FP8_MAX, KeyMean, KVTensor
from lmkit.kernels.registry import implements
from lmkit.kv_dtype import FP8, INT4, KVDtype

FLOAT16_MAX = 65504.0


def accepts_heads(*, num_heads: int, num_kv_heads: int, head_dim: int, **traits: Any) -> str | None:
    if num_heads % num_kv_heads:
        return f"{num_heads} query heads do not share {num_kv_heads} KV heads evenly"
    return f"odd head_dim {head_dim}" if head_dim % 2 else None


@implements(ops.kv_append, "reference", device="any", accepts=accepts_heads)
def kv_append(
    k: Tensor, v: Tensor, k_cache: KVTensor, v_cache: KVTensor, slots: Tensor, positions: Tensor | None = None
) -> None:
    kept = slots >= 0
    slots = slots[kept].long()
    at_zero = torch.zeros_like(kept[kept]) if positions is None else positions[kept] == 0
    for x, cache in ((k[kept], k_cache), (v[kept], v_cache)):
        block, offset = slots // cache.block_size, slots % cache.block_size
        if cache.first is not None:
            x = x.float() - at_zero[:, None, None] * cache.first
        x = turned_keys(x, cache)
        if cache.dtype.coded:
            codes, params = quantize_vectors(x, cache.dtype, cache.scales)
            cache.data[block, :, offset] = packed_codes(codes, cache.dtype)
            cache.params[block, :, offset] = params
        else:
            cache.data[block, :, offset] = x.to(cache.data.dtype)


def packed_codes(codes: Tensor, dtype: KVDtype) -> Tensor:
    """Codes uint8 [..., D] as `ops` lays them out: uint8 [..., D * bits / 8]."""
    if dtype == INT4:
        half = codes.shape[-1] // 2
        return codes[..., :half] | codes[..., half:] << 4
    if not dtype.levels:
        return codes
    pairs = codes.unflatten(-1, (-1, 4, 8)) & 3
    planes = [pairs[..., 0, :] | pairs[..., 1, :] << 2 | pairs[..., 2, :] << 4 | pairs[..., 3, :] << 6]
    if dtype.bits == 3:
        bits = codes.unflatten(-1, (-1, 4, 8)) >> 2
        planes.append((bits << torch.arange(8, dtype=torch.uint8, device=bits.device)).sum(-1, dtype=torch.uint8))
    return torch.cat(planes, dim=-1).flatten(-2)


def numbers_of_codes(data: Tensor, dtype: KVDtype) -> Tensor:
    """The numbers [..., D] that stored codes stand for, uint8 like `data`: the inverse of `packed_codes`."""
    if dtype == INT4:
        return torch.cat([data & 15, data >> 4], dim=-1)
    if not dtype.levels:
        return data
    units = data.unflatten(-1, (-1, dtype.columns(dtype.unit)))
    codes = torch.stack([units[..., :8] >> shift & 3 for shift in (0, 2, 4, 6)], dim=-2)  # [..., units, 4, 8]
    if dtype.bits == 3:
        bits = units[..., 8:, None] >> torch.arange(8, dtype=torch.uint8, device=data.device) & 1
        codes = codes | bits << 2
    levels = torch.tensor(dtype.levels, dtype=torch.uint8, device=data.device)
    return levels[codes.flatten(-3).long()]


def _nearest_levels(x: Tensor, dtype: KVDtype) -> tuple[Tensor, Tensor]:
    """`quantize_vectors` for a type with levels; float16 [..., heads, 1]."""
    levels = torch.tensor(dtype.levels, device=x.device, dtype=torch.float32) - dtype.largest / 2
    bounds = (levels[1:] + levels[:-1]) / 2
    power = x.square().mean(-1, keepdim=True).sqrt()
    codes = torch.stack([(x[..., None] > power[..., None] * (bounds * unit)).sum(-1) for unit in dtype.units])
    chosen = levels[codes]
    product, square = (x * chosen).sum(-1, keepdim=True), chosen.square().sum(-1, keepdim=True)
    best = (product * product / square).argmax(0, keepdim=True)  # with the best scale, the error is |x|^2 - this
    codes, scale = codes.gather(0, best.expand_as(codes[:1]))[0], (product / square).gather(0, best)[0]
    return codes.to(torch.uint8), scale.half()


def quantize_vectors(x: Tensor, dtype: KVDtype, scales: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """(codes uint8 [..., heads, D], float16 [..., heads, params] = scale, minimum) of x, as ops.kv_append defines them;
    `scales` float32 [heads]."""
    wide = x.float().clamp(-FLOAT16_MAX, FLOAT16_MAX)
    if dtype.levels:
        return _nearest_levels(wide, dtype)
    low, high = wide.amin(-1, keepdim=True), wide.amax(-1, keepdim=True)
    fixed = None if scales is None else scales[:, None].expand_as(low)
    if dtype == FP8:
        scale = (torch.maximum(high, -low) / FP8_MAX).half().float() if fixed is None else fixed
        steps = (wide / torch.where(scale > 0, scale, 1.0)).clamp(-FP8_MAX, FP8_MAX)
        codes = torch.where(scale > 0, steps, 0.0).to(torch.float8_e4m3fn).view(torch.uint8)
        return codes, torch.cat([scale, torch.zeros_like(scale)], dim=-1).half()
    max_code = (1 << dtype.bits) - 1
    if fixed is None:
        minimum = low.half().float()
        scale = ((high - minimum) / max_code).clamp(0, FLOAT16_MAX).half().float()
        scale = torch.where(high > low, scale, 0.0)
    else:
        minimum, scale = -(max_code + 1) // 2 * fixed, fixed
    steps = (wide - minimum) / torch.where(scale > 0, scale, 1.0)
    codes = torch.where(scale > 0, steps.round().clamp(0, max_code), 0.0).to(torch.uint8)
    return codes, torch.cat([scale, minimum], dim=-1).half()


def hadamard(x: Tensor) -> Tensor:
    """x H / sqrt(D) of float32 x [..., D], D a power of two. The transform is its own inverse."""
    dim, step = x.shape[-1], 1
    while step < dim:
        pairs = x.view(*x.shape[:-1], -1, 2, step)
        first, second = pairs[..., 0, :], pairs[..., 1, :]
        x = torch.stack([first + second, first - second], dim=-2).view(x.shape)
        step *= 2
    turned: Tensor = x * dim**-0.5
    return turned


def turned_keys(x: Tensor, cache: KVTensor) -> Tensor:
    """Keys [T, heads, D] as they are stored, before rounding."""
    if cache.hadamard:
        return hadamard(x.float())
    return x if cache.balance is None else torch.einsum("thd,hde->the", x.float(), cache.balance.keys)


def turned_queries(q: Tensor, cache: KVTensor) -> Tensor:
    """Queries float32 [num_heads, T, D] as they meet the stored keys."""
    if cache.hadamard:
        return hadamard(q)
    if cache.balance is None:
        return q
    return q @ cache.balance.queries.repeat_interleave(len(q) // len(cache.balance.queries), dim=0)


def read_blocks(cache: KVTensor, blocks: Tensor, length: int) -> Tensor:
    """The first `length` tokens of a block table, float32 [num_kv_heads, length, D]."""
    values = stored_vectors(cache, blocks, length)
    if cache.hadamard:
        values = hadamard(values)
    if cache.balance is not None:
        values = values @ cache.balance.queries.transpose(1, 2)
    if (left_out := left_out_vectors(cache, length)) is not None:
        values = values + left_out
    return values


def left_out_vectors(cache: KVTensor, length: int) -> Tensor | None:
    """What the stored vectors of positions 0 .. length - 1 lack, float32 [num_kv_heads, length, D]; None: nothing."""
    if cache.first is None:
        return None if cache.mean is None else mean_keys(cache.mean, length)
    others = cache.first.new_zeros(*cache.first.shape)[:, None].expand(-1, length - 1, -1)
    first = torch.cat([cache.first[:, None], others], dim=1)
    return first if cache.mean is None else first + mean_keys(cache.mean, length)


def stored_vectors(cache: KVTensor, blocks: Tensor, length: int) -> Tensor:
    """As read_blocks, but as they are stored: turned, and without what was subtracted."""
    data = numbers_of_codes(cache.data[blocks.long()], cache.dtype)  # [blocks, heads, block_size, D]
    values = data.view(torch.float8_e4m3fn).float() if cache.dtype == FP8 else data.float()
    if cache.dtype.coded:
        scale, *minimum = cache.params[blocks.long()].float().unbind(-1)
        lowest = minimum[0] if minimum else scale * (-cache.dtype.largest / 2)
        values = values * scale[..., None] + lowest[..., None]
    return values.transpose(0, 1).flatten(1, 2)[:, :length]


def mean_keys(mean: KeyMean, length: int) -> Tensor:
    """RoPE_t(b) of positions 0 .. length - 1, float32 [num_kv_heads, length, D]."""
    half = len(mean.table)
    cos, sin = mean.table[:, 0, :length].T, mean.table[:, 1, :length].T
    vector = mean.vector[:, None, :]
    first, second = vector[..., :half], vector[..., half : 2 * half]
    turned = torch.cat([first * cos - second * sin, second * cos + first * sin], dim=-1)
    padded: Tensor = torch.nn.functional.pad(turned, (0, vector.shape[-1] - 2 * half))
    return padded
