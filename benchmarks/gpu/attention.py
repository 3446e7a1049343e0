"""Section "attention": decoding against the bandwidth of reading KV, prompts against the bfloat16 matmul.

There are 8 KV heads of 128 with 4 queries each, as in Llama-3-8B. Blocks lie in random order. The KV of several layers
is used in turn, and together it is larger than a cache. A decode step also rotates, quantizes and appends its token:
the op does it all.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

import lmkit.kernels  # noqa: F401  (registers)
from benchmarks.gpu.context import Context
from benchmarks.gpu.roofline import LLAMA_3_8B
from benchmarks.gpu.timing import copies_for, seconds_of
from lmkit.attention_spec import AttentionSpec
from lmkit.kernels import latent_ops, ops
from lmkit.kernels.ops import BatchGeometry
from lmkit.kv_dtype import kv_dtype
from lmkit.layers.batch import KVLayer, allocate_kv
from lmkit.layers.blocks.latent import LatentSpec
from lmkit.layers.latent_cost import heads_at_once

BLOCK = 64
STORAGES = ("float16", "int8", "int4", "int3", "fp8")
DECODE = ((1, 1024), (1, 8192), (16, 1024), (16, 8192), (64, 1024), (64, 4096), (256, 1024))
PREFILL = ((1, 512, 512), (1, 2048, 2048), (1, 8192, 8192), (8, 1024, 1024), (1, 512, 8192))  # sequences, new, context


def run(context: Context) -> None:
    decode: Sequence[tuple[int, int]] = DECODE
    prefill: Sequence[tuple[int, int, int]] = PREFILL
    storages: Sequence[str] = STORAGES
    if context.rehearsal:
        decode, prefill, storages = ((2, 70),), ((1, 20, 20),), ("float16", "int4")
    elif context.quick:
        decode, prefill = ((16, 8192),), ((1, 2048, 2048),)
    for storage in storages:
        for batch, length in decode:
            _attempt(context, "decode", storage, batch, 1, length)
    for storage in storages[:2]:
        for batch, new, length in prefill:
            _attempt(context, "prefill", storage, batch, new, length)
    with context.attempt("latent prompt"):
        _latent_prompt(context)


def _attempt(context: Context, what: str, storage: str, batch: int, new: int, length: int) -> None:
    values = {"kv": storage, "batch": batch, "new": new, "context": length}
    if context.is_over:
        context.row(what, **values, error="no time left")
        return
    with context.attempt(what, **values):
        _measure(context, what, storage, batch, new, length)


def _measure(context: Context, what: str, storage: str, batch: int, new: int, length: int) -> None:
    shape = LLAMA_3_8B
    num_bytes = batch * length * shape.kv_bytes(storage) / shape.layers
    flops = batch * new * shape.attention_flops(length - new / 2) / shape.layers
    copies = min(8, copies_for(int(num_bytes), context.device))
    blocks = batch * -(-length // BLOCK)
    layers = [_random_layer(blocks, storage, context.device) for _ in range(copies)]
    attend, name = attention(context, batch, new, length)
    seconds = seconds_of([_call(attend, layer) for layer in layers], context.device)
    peak = context.peak()
    bound = peak.seconds(num_bytes, flops)
    share = context.share(bound, seconds, f"{what}, {storage} KV")
    context.row(
        what, kernel=name, kv=storage, batch=batch, new=new, context=length, seconds=seconds, bound=bound,
        share=share, bytes_per_s=num_bytes / seconds, of_bandwidth=num_bytes / seconds / peak.bytes_per_s,
        flops=flops / seconds, of_matmul=flops / seconds / peak.flops,
    )  # fmt: skip


def _latent_prompt(context: Context) -> None:
    """A chunk of DeepSeek-V3's shape: over the latent, and over plain keys and values of each head."""
    spec, heads, new, length = LatentSpec(512, 64, 128, 128), 128, 512, 4096
    if context.rehearsal:
        spec, heads, new, length = LatentSpec(32, 32, 32, 32), 2, 20, 64
    attend, alone, absorb, read, expand = (
        ops.paged_attention.select("cuda", head_dim=spec.row_dim, num_heads=heads, num_kv_heads=1, latent=True),
        ops.paged_attention.select("cuda", head_dim=spec.query_dim, num_heads=heads, num_kv_heads=heads),
        ops.linear_heads.select("cuda"),
        latent_ops.kv_rows.select("cuda", head_dim=spec.row_dim, dtype=torch.float16),
        latent_ops.plain_heads.select("cuda"),
    )

    def random(*shape: int) -> Tensor:
        return torch.randn(*shape, device=context.device).half()

    keys = random(heads, spec.kv_lora_rank, spec.qk_nope_head_dim) / 20
    values = random(heads, spec.v_head_dim, spec.kv_lora_rank) / 20
    float16 = kv_dtype("float16")
    cache = allocate_kv(length // BLOCK, 1, BLOCK, spec.row_dim, (float16, float16), context.device).k
    cache.data.normal_()
    table = torch.arange(length // BLOCK, dtype=torch.int32, device=context.device)[None]
    start, lens = table.new_tensor([0, new]), table.new_tensor([length])
    q, scale = random(new, heads, spec.query_dim), AttentionSpec(spec.query_dim**-0.5)

    def over_latent() -> Tensor:
        turned, plain = q.split((spec.qk_rope_head_dim, spec.qk_nope_head_dim), dim=2)
        queries = torch.cat([turned, absorb(plain, keys)], dim=2)
        y = attend(queries, cache, cache, BatchGeometry(start, lens, table, start), scale)
        result: Tensor = absorb(y[..., spec.qk_rope_head_dim :], values)
        return result

    def over_heads() -> Tensor:
        rows, out = read(cache, table[0], length, torch.float16), q.new_empty(new, heads, spec.v_head_dim)
        geometry, step = BatchGeometry(start, lens, table[:, :1], start), heads_at_once(length, spec, heads)
        for first in range(0, heads, step):
            part = slice(first, first + step)
            out[:, part] = alone(q[:, part], *expand(rows, keys[part], values[part]), geometry, scale)
        return out

    for way, call in (("latent", over_latent), ("plain heads", over_heads)):
        seconds = seconds_of([call] * 2, context.device)
        context.row("latent prompt", way=way, heads=heads, new=new, context=length, seconds=seconds)


def _call(attend: Callable[[KVLayer], Any], layer: KVLayer) -> Callable[[], Any]:
    return lambda: attend(layer)


def _random_layer(blocks: int, storage: str, device: str) -> KVLayer:
    """KV with codes of any value. The scales keep the decoded values near 1."""
    dtype = kv_dtype(storage)
    layer = allocate_kv(blocks, LLAMA_3_8B.kv_heads, BLOCK, LLAMA_3_8B.head_dim, (dtype, dtype), device)
    for kv in (layer.k, layer.v):
        if not kv.params.numel():
            kv.data.normal_()
            continue
        kv.data.random_(0, 120 if storage == "fp8" else 256)  # 127 is float8's NaN
        scale_and_minimum = {"int8": (1 / 64, -2), "int4": (1 / 4, -2), "int3": (1 / 4,), "fp8": (1 / 448, 0)}[storage]
        kv.params[:] = torch.tensor(scale_and_minimum)
    return layer


def attention(context: Context, batch: int, new: int, length: int) -> tuple[Callable[[KVLayer], Any], str]:
    """(the op over a layer's KV, the name of its implementation), for `batch` sequences of `new` tokens each."""
    shape, device = LLAMA_3_8B, context.device
    heads, kv_heads, dim = shape.heads, shape.kv_heads, shape.head_dim
    impl = ops.rope_paged_attention.select("cuda", rotary_dim=dim, head_dim=dim, num_heads=heads, num_kv_heads=kv_heads)
    per_sequence = -(-length // BLOCK)
    tables = torch.randperm(batch * per_sequence, device=device).view(batch, per_sequence).int()
    positions = torch.arange(length - new, length, device=device)
    slots = (tables[:, positions // BLOCK] * BLOCK + positions % BLOCK).int().flatten()
    starts = torch.arange(batch + 1, device=device).int() * new
    lens = torch.full((batch,), length, dtype=torch.int32, device=device)
    qkv = torch.randn(batch * new, (heads + 2 * kv_heads) * dim, device=device).half()
    q, k, v = (part.view(batch * new, -1, dim) for part in qkv.split((heads * dim, kv_heads * dim, kv_heads * dim), 1))
    inverse = torch.arange(dim // 2, device=device) / -(dim // 2)
    angles = positions.repeat(batch)[:, None] * 500000.0**inverse
    cos, sin = angles.cos(), angles.sin()

    geometry = BatchGeometry(starts, lens, tables, slots)

    def attend(layer: KVLayer) -> Any:
        return impl(q, k, v, cos, sin, layer.k, layer.v, geometry, AttentionSpec(dim**-0.5))

    return attend, impl.name
