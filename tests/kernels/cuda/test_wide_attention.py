"""Attention over wide rows, and over rows that are keys and values at once, against attention in float32 over what the
cache holds."""

from __future__ import annotations

import itertools
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from lmkit.attention_spec import AttentionSpec
from lmkit.kernels import ops
from lmkit.kernels.cuda import append, attention, module, wide
from lmkit.kernels.cuda.gpus import GPUS
from lmkit.kernels.cuda.wide import Shape, Storage
from lmkit.kernels.ops import KVTensor
from lmkit.kv_dtype import BFLOAT16, FLOAT16, FP8, INT3, INT4, INT8, KVDtype
from lmkit.layers.batch import allocate_kv
from tests.kernels.cases import filled_cache, geometry
from tests.kernels.cuda.test_append import assert_same, copied, some_slots
from tests.kernels.cuda.test_prefill_attention import BRAIN_TOLERANCE, TOLERANCE, Inputs, expected, on_device
from tests.kernels.cuda.test_prefill_attention import inputs as prefill_inputs

LENGTHS = ((5, 5), (700, 2), (90, 1), (290, 40), (0, 0), (64, 64))  # tokens in the cache, of which queries
TYPES = (FLOAT16, BFLOAT16, INT8, FP8, INT4)


def inputs(
    kind: KVDtype, dim: int, heads: int, dtype: torch.dtype, device: str, lengths: tuple[tuple[int, int], ...] = LENGTHS
) -> Inputs:
    torch.manual_seed(dim)
    in_cache, new = [n for n, _ in lengths], [n for _, n in lengths]
    kv, tables = filled_cache((kind, kind), 1, dim, 32, in_cache)
    batch = geometry(torch.tensor([0, *new]).cumsum(0).tolist(), in_cache, tables)
    q = (torch.randn(sum(new), heads, dim) * 2).to(dtype)
    args = Inputs(q, kv.k, kv.k, batch, AttentionSpec(dim**-0.5))
    args = args if device == "cpu" else on_device(args, device)
    return args._replace(v_cache=args.k_cache)


def assert_attends(args: Inputs, tolerance: float) -> Tensor:
    got: Tensor = attention.paged_attention(*args)
    want = expected(args)
    assert (got.float() - want).abs().max() <= tolerance * want.abs().max()
    assert not module.counters(args.q.device.type).any()
    return got


@pytest.mark.parametrize(
    ("kind", "dim", "heads", "dtype"),
    [
        (FLOAT16, 32, 6, torch.float16),
        (BFLOAT16, 96, 20, torch.bfloat16),
        (INT8, 96, 6, torch.bfloat16),
        (INT8, 576, 16, torch.float16),
        (FP8, 32, 16, torch.float16),
        (INT4, 96, 6, torch.float16),
        (INT3, 96, 6, torch.float16),
    ],
    ids=str,
)
def test_attention(device: str, kind: KVDtype, dim: int, heads: int, dtype: torch.dtype) -> None:
    """Prompts, a chunk, new tokens and a sequence without any; long keys are split into ranges."""
    lengths = LENGTHS if dim < 576 else ((300, 1), (40, 3))
    assert_attends(
        inputs(kind, dim, heads, dtype, device, lengths), BRAIN_TOLERANCE if dtype == torch.bfloat16 else TOLERANCE
    )


@pytest.mark.parametrize("shape", [Shape(16, 16), Shape(32, 16)])
def test_other_shapes_of_a_block(device: str, shape: Shape, monkeypatch: pytest.MonkeyPatch) -> None:
    """Those of GPUs with less shared memory."""
    monkeypatch.setattr(wide, "shape_of", lambda *given: shape)
    assert_attends(inputs(INT8, 32, 6, torch.float16, device), TOLERANCE)


def test_what_no_query_sees_may_be_anything(device: str) -> None:
    args = inputs(FLOAT16, 32, 6, torch.float16, device, ((70, 1), (37, 3)))
    want = assert_attends(args, TOLERANCE)
    seen = {
        int(block) * 32 + i
        for b, length in enumerate((70, 37))
        for j, block in enumerate(args.geometry.block_tables[b])
        for i in range(min(32, length - 32 * j))
    }
    rows = args.k_cache.data.view(-1, 32)
    rows[[i for i in range(len(rows)) if i not in seen]] = torch.nan
    assert torch.equal(attention.paged_attention(*args), want)


def test_an_unused_place_becomes_0(device: str) -> None:
    args = inputs(FLOAT16, 32, 6, torch.float16, device, ((20, 1), (9, 1)))
    args.geometry.context_lens[1] = 0
    assert attention.paged_attention(*args)[1].eq(0).all()


@pytest.mark.parametrize("kind", TYPES, ids=str)
def test_a_row_is_stored_once(device: str, kind: KVDtype) -> None:
    """With the reference's bits: queries and rows are turned in place, and codes are of the turned row."""
    torch.manual_seed(4)
    dtype, dim = torch.bfloat16 if kind == BFLOAT16 else torch.float16, 96
    kv, _ = filled_cache((kind, kind), 1, dim, 16, [48])
    cache = KVTensor(kv.k.data.to(device), kv.k.params.to(device), kind)
    q, row = torch.randn(19, 6, dim).to(dtype).to(device), torch.randn(19, 1, dim).to(dtype).to(device)
    angles, slots = torch.rand(19, 8, device=device) * 7, some_slots(19, device)
    wanted = q.clone(), row.clone(), copied(cache)
    append.rope_append(q, row, row, angles.cos(), angles.sin(), cache, replace(cache), slots)
    ops.rope_append.named("reference")(
        wanted[0], wanted[1], wanted[1], angles.cos(), angles.sin(), wanted[2], wanted[2], slots
    )
    assert torch.equal(q, wanted[0])
    assert torch.equal(row, wanted[1])
    assert_same(cache, wanted[2])


@pytest.mark.parametrize(
    ("types", "dtype"),
    [
        ((FLOAT16, FLOAT16), torch.float16),
        ((INT8, FP8), torch.bfloat16),
        ((BFLOAT16, INT4), torch.bfloat16),
        ((INT3, INT8), torch.float16),
    ],
    ids=str,
)
def test_heads_that_are_wide(device: str, types: tuple[KVDtype, KVDtype], dtype: torch.dtype) -> None:
    """Keys and values of their own, several KV heads: what is appended is attended to."""
    args = prefill_inputs(types, dtype, (2, 3, 512), device, lengths=((150, 1), (40, 3)))
    q, k, v = args.q.contiguous(), *(torch.randn(4, 2, 512, device=device).to(dtype) for _ in range(2))
    last = (0, torch.tensor([149])), (1, torch.arange(37, 40))  # of each sequence
    tables = args.geometry.block_tables.cpu()
    where = torch.cat([tables[b, tokens // 32] * 32 + tokens % 32 for b, tokens in last])
    batch = replace(args.geometry, slots=where.int().to(device))
    angles = torch.rand(4, 64, device=device) * 7
    caches = copied(args.k_cache), copied(args.v_cache)
    turned = q.clone()
    got = attention.rope_paged_attention(q, k.clone(), v, angles.cos(), angles.sin(), *caches, batch, args.spec)
    wanted = copied(args.k_cache), copied(args.v_cache)
    ops.rope_append.named("reference")(turned, k, v, angles.cos(), angles.sin(), *wanted, batch.slots)
    for cache, of_reference in zip(caches, wanted, strict=True):
        assert_same(cache, of_reference)
    want = expected(Inputs(turned, *wanted, batch, args.spec))
    most = BRAIN_TOLERANCE if dtype == torch.bfloat16 else TOLERANCE
    assert (got.float() - want).abs().max() <= most * want.abs().max()


def test_every_gpu_has_a_shape_for_published_models() -> None:
    """DeepSeek's rows and Gemma 4's heads, of one token and of many."""
    for (capability, gpu), kind, rows in itertools.product(GPUS.items(), TYPES, (16, 128)):
        for dim, stored in ((576, Storage(kind, None)), (512, Storage(kind, kind))):
            shape = wide.shape_of(dim, stored, rows, capability)
            assert shape is not None
            assert wide.shared_bytes(dim, stored, shape) <= gpu.block_shared
    row = Storage(FLOAT16, None)
    assert wide.shape_of(576, row, 128, (9, 0)) == Shape(32, 32)
    assert wide.shape_of(576, row, 128, (8, 9)) == Shape(32, 16)
    assert wide.shape_of(1024, row, 16, (8, 9)) is None


@pytest.mark.parametrize("types", [(INT3, INT8), (INT8, INT3)], ids=str)
def test_the_storage_that_odd_blocks_cannot_have_is_named(types: tuple[KVDtype, KVDtype]) -> None:
    """Two rows of levels share a word of parameters."""
    kv = allocate_kv(1, 1, 7, 288, types)
    found = wide.wide_problem(torch.zeros(1, 4, 288, dtype=torch.float16), kv.k, kv.v, AttentionSpec(scale=1.0), None)
    assert found == "wide rows of int3 in blocks of 7 tokens, an odd number"
