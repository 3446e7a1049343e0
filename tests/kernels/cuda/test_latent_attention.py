"""Attention over rows that are keys and values at once, against attention in float32 over what the cache holds."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from lmkit.attention_spec import AttentionSpec
from lmkit.kernels import ops
from lmkit.kernels.cuda import append, attention, latent, module
from lmkit.kernels.cuda.gpus import GPUS
from lmkit.kernels.cuda.latent import Shape
from lmkit.kernels.ops import KVTensor
from lmkit.kv_dtype import BFLOAT16, FLOAT16, FP8, INT4, INT8, KVDtype
from tests.kernels.cases import filled_cache, geometry
from tests.kernels.cuda.test_append import assert_same, copied, some_slots
from tests.kernels.cuda.test_prefill_attention import BRAIN_TOLERANCE, TOLERANCE, Inputs, expected, on_device

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
    monkeypatch.setattr(latent, "shape_of", lambda *given: shape)
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


def test_every_gpu_has_a_shape_for_deepseek() -> None:
    """Rows of 576, of one token's heads and of many tokens."""
    for capability, gpu in GPUS.items():
        for kind in TYPES:
            for rows in (16, 128):
                shape = latent.shape_of(576, kind, rows, capability)
                assert shape is not None
                assert latent.shared_bytes(576, kind, shape) <= gpu.block_shared
    assert latent.shape_of(576, FLOAT16, 128, (9, 0)) == Shape(32, 32)
    assert latent.shape_of(576, FLOAT16, 128, (8, 9)) == Shape(32, 16)
    assert latent.shape_of(1024, FLOAT16, 16, (8, 9)) is None
