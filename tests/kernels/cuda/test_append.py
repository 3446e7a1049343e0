"""Appended tokens have the reference's bits: codes, params, and what is written back of queries and keys."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from lmkit.kernels import ops
from lmkit.kernels.cuda import append
from lmkit.kernels.ops import KVTensor
from lmkit.kv_dtype import BFLOAT16, FLOAT16, FP8, INT2, INT3, INT4, INT8, KVDtype
from lmkit.layers.batch import allocate_kv
from tests.kernels.cases import edge_vectors, key_mean

TYPES = (FLOAT16, BFLOAT16, INT8, FP8, INT4)
BLOCK = 16


def caches(types: tuple[KVDtype, KVDtype], heads: int, dim: int, device: str) -> tuple[KVTensor, KVTensor]:
    """Room for 48 tokens, filled with a pattern that must survive where nothing is stored."""
    kv = allocate_kv(3, heads, BLOCK, dim, types, device)
    for cache in (kv.k, kv.v):
        cache.data.view(torch.uint8).fill_(0xA5)
        cache.params.fill_(-3.0)
    return kv.k, kv.v


def copied(cache: KVTensor) -> KVTensor:
    return replace(cache, data=cache.data.clone(), params=cache.params.clone())


def assert_same(got: KVTensor, expected: KVTensor) -> None:
    assert torch.equal(got.data.view(torch.uint8), expected.data.view(torch.uint8))
    assert torch.equal(got.params, expected.params)


def qkv(
    tokens: int, heads: tuple[int, int], dim: int, dtype: torch.dtype, device: str, largest: float
) -> tuple[Tensor, ...]:
    """q, k, v as views into one tensor, with edge vectors among keys and values."""
    num_heads, kv_heads = heads
    q, k, v = torch.randn(tokens, num_heads, dim), *(edge_vectors(tokens, kv_heads, dim) for _ in range(2))
    merged = torch.cat([x.flatten(1) for x in (q, k, v)], dim=1).clamp(-largest, largest).to(dtype).to(device)
    sizes = (num_heads * dim, kv_heads * dim, kv_heads * dim)
    return tuple(part.view(tokens, -1, dim) for part in merged.split(sizes, dim=1))


def some_slots(tokens: int, device: str) -> Tensor:
    slots = torch.randperm(3 * BLOCK)[:tokens].int()
    slots[-2] = -1
    return slots.to(device)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize(("index", "dim"), list(enumerate((128, 64, 80, 256, 16))))
def test_kv_append(device: str, index: int, dim: int, dtype: torch.dtype) -> None:
    """Each type meets each position once over the dimensions."""
    torch.manual_seed(dim)
    types = (TYPES[index], TYPES[(index + 2) % len(TYPES)])
    _, k, v = qkv(21, (3, 3), dim, dtype, device, 65504 if dtype == torch.float16 else 1e9)
    got, slots = caches(types, 3, dim, device), some_slots(21, device)
    expected = copied(got[0]), copied(got[1])
    append.kv_append(k, v, *got, slots)
    ops.kv_append.named("reference")(k, v, *expected, slots)
    for a, b in zip(got, expected, strict=True):
        assert_same(a, b)


@pytest.mark.parametrize(("types", "dim"), [((INT3, INT2), 96), ((INT2, INT3), 256)])
def test_levels(device: str, types: tuple[KVDtype, KVDtype], dim: int) -> None:
    """The bits of a CPU. Rows have words of parameters in common by two, and a row with a NaN is NaN alone."""
    torch.manual_seed(dim)
    _, k, v = qkv(21, (3, 3), dim, torch.float16, device, 65504)
    k[13, 1, 5] = torch.nan
    got, slots = caches(types, 3, dim, device), some_slots(21, device)
    expected = copied(got[0]), copied(got[1])
    append.kv_append(k, v, *got, slots)
    ops.kv_append.named("reference")(k, v, *expected, slots)
    block, offset = int(slots[13]) // BLOCK, int(slots[13]) % BLOCK
    for a, b in zip(got, expected, strict=True):
        assert torch.equal(a.params.isnan(), b.params.isnan())
        for cache in (a, b):
            cache.data[block, 1, offset] = 0
            cache.params[block, 1, offset] = 0
        assert_same(a, b)


@pytest.mark.parametrize(
    ("types", "dim", "rotary", "heads", "dtype", "keys"),
    [
        ((FLOAT16, FLOAT16), 64, 64, (4, 2), torch.float16, ""),
        ((BFLOAT16, INT8), 128, 64, (3, 1), torch.bfloat16, ""),
        ((INT8, INT8), 128, 128, (7, 1), torch.float16, "mean"),
        ((INT4, INT4), 64, 64, (2, 2), torch.float16, "hadamard"),
        ((INT4, FP8), 128, 128, (4, 2), torch.bfloat16, "mean hadamard"),
        ((INT3, INT4), 128, 128, (3, 1), torch.float16, "mean hadamard"),
        ((FP8, INT4), 80, 20, (5, 1), torch.bfloat16, "mean"),
        ((INT8, FP8), 96, 96, (3, 3), torch.float16, "scales"),
        ((INT4, INT8), 256, 256, (2, 1), torch.bfloat16, "hadamard scales"),
    ],
)
def test_rope_append(
    device: str,
    types: tuple[KVDtype, KVDtype],
    dim: int,
    rotary: int,
    heads: tuple[int, int],
    dtype: torch.dtype,
    keys: str,
) -> None:
    torch.manual_seed(dim + rotary)
    q, k, v = qkv(19, heads, dim, dtype, device, 3e4)  # what turns stays finite in float16
    k_cache, v_cache = caches(types, heads[1], dim, device)
    if "scales" in keys:
        scales = [(torch.rand(heads[1]) / 4 + 0.0625).half().float().to(device) if t.coded else None for t in types]
        k_cache, v_cache = replace(k_cache, scales=scales[0]), replace(v_cache, scales=scales[1])
    k_cache = replace(k_cache, hadamard="hadamard" in keys)
    if "mean" in keys:
        mean = key_mean(heads[1], dim, rotary, 1)
        k_cache = replace(k_cache, mean=replace(mean, vector=mean.vector.to(device)))
    angles = torch.rand(19, rotary // 2, device=device) * 7
    slots = some_slots(19, device)
    expected = [x.clone() for x in (q, k)], copied(k_cache), copied(v_cache)
    untouched = v.clone()
    append.rope_append(q, k, v, angles.cos(), angles.sin(), k_cache, v_cache, slots)
    ops.rope_append.named("reference")(*expected[0], untouched, angles.cos(), angles.sin(), *expected[1:], slots)
    for a, b in zip((q, k, v), (*expected[0], untouched), strict=True):
        assert torch.equal(a.view(torch.int16), b.view(torch.int16))
    assert_same(k_cache, expected[1])
    assert_same(v_cache, expected[2])


def test_other_types_take_the_reference(device: str) -> None:
    """float32 rows, and rows that 16-byte loads cannot read, give the same."""
    torch.manual_seed(0)
    wide = torch.randn(4, 2, 72, device=device)
    for k in (wide[:, :, :64], wide.half()[:, :, 3:67]):
        got = caches((INT8, INT8), 2, 64, device)
        expected = copied(got[0]), copied(got[1])
        slots = torch.arange(4, dtype=torch.int32, device=device)
        append.kv_append(k, k, *got, slots)
        ops.kv_append.named("reference")(k, k, *expected, slots)
        assert_same(got[0], expected[0])


@pytest.mark.parametrize(("head_dim", "rotary_dim"), [(72, 72), (272, 272), (64, 65)])
def test_refusals(head_dim: int, rotary_dim: int) -> None:
    assert append.accepts(num_heads=4, num_kv_heads=2, head_dim=head_dim, rotary_dim=rotary_dim)
