"""Rows of latent attention as plain keys and values of each head, and attention of a chunk to them."""

from __future__ import annotations

import pytest
import torch

from lmkit.attention_spec import AttentionSpec
from lmkit.kernels import latent_ops, ops
from lmkit.kernels.cuda import attention, latent, prefill
from lmkit.kernels.reference.kv import read_blocks
from lmkit.kv_dtype import BFLOAT16, FLOAT16, FP8, INT2, INT3, INT4, INT8, KVDtype
from tests.kernels.cases import filled_cache, geometry
from tests.kernels.cuda.test_prefill_attention import BRAIN_TOLERANCE, TOLERANCE


@pytest.mark.parametrize(
    ("kind", "dtype"),
    [
        (FLOAT16, torch.float16),
        (BFLOAT16, torch.float16),
        (INT8, torch.bfloat16),
        (FP8, torch.float16),
        (INT4, torch.float16),
        (INT3, torch.float16),
        (INT2, torch.bfloat16),
    ],
    ids=str,
)
def test_rows_are_read(device: str, kind: KVDtype, dtype: torch.dtype) -> None:
    """Those of the second sequence, whose last block is half full. One rounding apart."""
    torch.manual_seed(3)
    kv, tables = filled_cache((kind, kind), 1, 96, 16, [20, 41])
    cache = ops.KVTensor(kv.k.data.to(device), kv.k.params.to(device), kind)
    got = latent.kv_rows(cache, tables[1].to(device), 41, dtype).cpu()
    want = read_blocks(kv.k, tables[1][:3], 41)[0]
    assert got.shape == (48, 96)
    assert got.dtype == dtype
    torch.testing.assert_close(got[:41].float(), want, rtol=torch.finfo(dtype).eps, atol=1e-6)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("splits", [1, 3])
def test_a_chunk_over_plain_heads(
    device: str, dtype: torch.dtype, splits: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Values are not as wide as keys. The rows after the context hold NaN."""
    torch.manual_seed(4)
    monkeypatch.setattr(prefill, "num_splits", lambda *_: splits)
    heads, length, tokens, turned, rank, plain, width = 3, 500, 40, 32, 48, 64, 32
    rows = torch.randn(512, turned + rank).to(dtype)
    rows[length:] = torch.nan
    parts = torch.randn(heads, rank, plain).to(dtype) / 7, torch.randn(heads, width, rank).to(dtype) / 7
    q = torch.randn(tokens, heads + 1, turned + plain).to(dtype)[:, 1:]
    batch = geometry([0, tokens], [length], torch.zeros(1, 1, dtype=torch.int32))
    spec = AttentionSpec(0.1)
    want = ops.paged_attention.named("reference")(
        q.float(),
        *latent_ops.plain_heads.named("reference")(rows[:length].float(), *(x.float() for x in parts)),
        batch,
        spec,
    )
    moved = ops.BatchGeometry(*(x.to(device) for x in vars(batch).values()))
    caches = latent.plain_heads(rows.to(device), *(x.to(device) for x in parts))
    assert [cache.data.shape for cache in caches] == [(1, heads, 512, turned + plain), (1, heads, 512, width)]
    got = attention.paged_attention(q.to(device), *caches, moved, spec).cpu()
    most = TOLERANCE if dtype == torch.float16 else BRAIN_TOLERANCE
    assert got.shape == (tokens, heads, width)
    assert (got.float() - want).abs().max() <= most * want.abs().max()
