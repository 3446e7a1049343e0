"""A prompt in one step, and in chunks and single tokens: the same storage, bit for bit, and nearly the same results."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise

import pytest
import torch
from torch import Tensor

from lmkit.attention_spec import AttentionSpec
from lmkit.kernels import ops
from lmkit.kernels.cuda import attention
from lmkit.kernels.ops import Balance, BatchGeometry
from lmkit.kv_dtype import BFLOAT16, FLOAT16, FP8, INT4, INT8, KVDtype
from lmkit.layers.batch import allocate_kv
from tests.kernels.cases import balance, geometry, key_mean

HEADS, KV_HEADS, DIM, BLOCK = 4, 2, 64, 16
BOUNDS = (0, 40, 67, 68, 69, 70)  # of the steps' tokens: two chunks, then one token at a time


def run(
    types: tuple[KVDtype, KVDtype], qkv: tuple[Tensor, ...], keys: str, bounds: tuple[int, ...]
) -> tuple[Tensor, ...]:
    """(results of all tokens, the storage of keys, of values)."""
    device, total = qkv[0].device, len(qkv[0])
    kv = allocate_kv(total // BLOCK + 2, KV_HEADS, BLOCK, DIM, types, str(device))
    for part in (kv.k.data, kv.k.params, kv.v.data, kv.v.params):
        part.view(torch.uint8).fill_(0xFF)  # NaN; not whatever the memory held, for what is stored is compared
    k_cache = replace(kv.k, hadamard="hadamard" in keys)
    angles = torch.arange(total)[:, None] / 1e4 ** (torch.arange(DIM // 2) / (DIM // 2))
    cos, sin = angles.cos(), angles.sin()
    if "mean" in keys:
        mean = key_mean(KV_HEADS, DIM, DIM, total)
        table = torch.stack([cos.T, sin.T], dim=1).contiguous()
        k_cache = replace(k_cache, mean=replace(mean, vector=mean.vector.to(device), pairs=mean.pairs.to(device),
                                                table=table.to(device)))  # fmt: skip
    v_cache = kv.v
    if "balance" in keys:
        balanced, (key, value) = balance(KV_HEADS, DIM), torch.randn(2, KV_HEADS, DIM)
        balanced = Balance(balanced.keys.to(device), balanced.queries.to(device))
        k_cache, v_cache = (
            replace(k_cache, balance=balanced, first=key.to(device)),
            replace(kv.v, first=value.to(device)),
        )
    blocks = torch.arange(total // BLOCK + 1).flip(0).int()
    tokens = torch.arange(total)
    slots = (blocks[tokens // BLOCK] * BLOCK + tokens % BLOCK).int()
    results = []
    for begin, end in pairwise(bounds):
        step = [x[begin:end].clone() for x in qkv]
        of_step = [x[begin:end].to(device) for x in (cos, sin)]
        batch = geometry([0, end - begin], [end], blocks[None], slots[begin:end])
        batch = BatchGeometry(*(x.to(device) for x in vars(batch).values()))
        args = k_cache, v_cache, batch, AttentionSpec(DIM**-0.5), None, tokens[begin:end].int().to(device)
        results.append(attention.rope_paged_attention(*step, *of_step, *args))
    return torch.cat(results), *(x for cache in (k_cache, v_cache) for x in (cache.data, cache.params))


@pytest.mark.parametrize(
    ("types", "dtype", "keys"),
    [
        ((FLOAT16, FLOAT16), torch.float16, ""),
        ((BFLOAT16, BFLOAT16), torch.bfloat16, ""),
        ((INT8, INT8), torch.bfloat16, "mean"),
        ((INT4, FP8), torch.float16, "mean hadamard"),
        ((INT8, INT4), torch.float16, ""),
        ((INT4, INT4), torch.bfloat16, "mean balance"),
    ],
)
def test_chunks_and_tokens_give_what_a_prompt_gives(
    device: str, types: tuple[KVDtype, KVDtype], dtype: torch.dtype, keys: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ops.rope_paged_attention, "fall_back", None)  # kernels do it
    torch.manual_seed(8)
    q, k, v = (torch.randn(BOUNDS[-1], heads, DIM).to(dtype).to(device) for heads in (HEADS, KV_HEADS, KV_HEADS))
    state = torch.get_rng_state()
    whole, *stored = run(types, (q, k, v), keys, (0, BOUNDS[-1]))
    torch.set_rng_state(state)  # the same mean
    steps, *stored_by_steps = run(types, (q, k, v), keys, BOUNDS)
    for a, b in zip(stored, stored_by_steps, strict=True):
        assert torch.equal(a.view(torch.uint8), b.view(torch.uint8))
    error = float((steps.float() - whole.float()).abs().max() / whole.float().abs().max())
    assert error < (2e-3 if dtype == torch.float16 else 1e-2)
