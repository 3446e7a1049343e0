"""Sliding windows with attention sinks: what is visible, and that nothing else is read."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from torch import Tensor

import lmkit.kernels  # noqa: F401  (registers)
from lmkit.attention_spec import AttentionSpec
from lmkit.kernels import ops
from lmkit.kernels.cpu import isa, threads
from lmkit.kv_dtype import FLOAT32, KV_DTYPES, KVDtype
from lmkit.layers.batch import KVLayer
from tests.kernels.cases import F32_TOLERANCE, PLANES_TOLERANCE, WORD_TOLERANCE, filled_cache, geometry


@pytest.fixture(autouse=True)
def _threads() -> Iterator[None]:
    before = threads.num_threads()
    yield
    threads.configure(before)


LENGTHS, NEW = [900, 33, 700, 270], [1, 1, 90, 3]
DIM, BLOCK = 64, 16


def visible(length: int, num_new: int, window: int, sinks: int) -> Tensor:
    """bool [new, length], key by key."""
    rows = [[j <= p and (j > p - window or j < sinks) for j in range(length)] for p in range(length - num_new, length)]
    return torch.tensor(rows)


def attend(implementation: str, q: Tensor, kv: KVLayer, tables: Tensor, window: int, sinks: int) -> Tensor:
    batch = geometry(torch.tensor([0, *NEW]).cumsum(0).tolist(), LENGTHS, tables)
    op = ops.paged_attention
    impl = op.named("reference") if implementation == "reference" else op.select(
        "cpu", num_heads=q.shape[1], num_kv_heads=kv.k.data.shape[1], head_dim=DIM
    )  # fmt: skip
    return Tensor(impl(q, kv.k, kv.v, batch, AttentionSpec(DIM**-0.5, window, sinks)))


@pytest.mark.parametrize(("window", "sinks"), [(50, 0), (50, 4), (200, 300), (256, 64), (17, 1000)])
def test_reference_sees_what_the_formula_says(window: int, sinks: int) -> None:
    torch.manual_seed(11)
    kv, tables = filled_cache((FLOAT32, FLOAT32), 1, DIM, BLOCK, LENGTHS)
    q, row = torch.randn(sum(NEW), 1, DIM), 0
    got = attend("reference", q, kv, tables, window, sinks)
    for b, (length, num_new) in enumerate(zip(LENGTHS, NEW, strict=True)):
        keys, values = (x.data[tables[b].long()].flatten(0, 2)[:length] for x in (kv.k, kv.v))
        mask = torch.zeros(num_new, length).masked_fill(~visible(length, num_new, window, sinks), -torch.inf)
        weights = (q[row : row + num_new, 0] @ keys.T * DIM**-0.5 + mask).softmax(-1)
        torch.testing.assert_close(got[row : row + num_new, 0], weights @ values, rtol=1e-5, atol=1e-5)
        row += num_new


@pytest.mark.parametrize("implementation", ["reference", "cpu"])
@pytest.mark.parametrize("dtype", KV_DTYPES.values(), ids=str)
@pytest.mark.parametrize(("window", "sinks"), [(50, 0), (50, 4), (200, 300), (17, 1000)])
def test_hidden_blocks_are_not_read(dtype: KVDtype, window: int, sinks: int, implementation: str) -> None:
    """Blocks of which no query sees a key may hold anything, and have one entry in the table: 0."""
    torch.manual_seed(12)
    kv, tables = filled_cache((dtype, dtype), 2, DIM, BLOCK, LENGTHS)
    q = torch.randn(sum(NEW), 6, DIM) * 2
    expected = attend(implementation, q, kv, tables, window, sinks)
    oracle = attend("reference", q, kv, tables, window, sinks)
    tolerance = WORD_TOLERANCE if dtype.has_minimum else PLANES_TOLERANCE if isa.host().tiles else F32_TOLERANCE
    torch.testing.assert_close(expected, oracle, rtol=0, atol=tolerance * float(oracle.abs().max()))
    hidden = [0]
    for b, (length, num_new) in enumerate(zip(LENGTHS, NEW, strict=True)):
        seen = visible(length, num_new, window, sinks).any(0)
        for i, block in enumerate(seen.split(BLOCK)):
            if not block.any():
                hidden.append(int(tables[b, i]))
                tables[b, i] = 0
    assert len(hidden) > 20 or sinks == 1000
    for cache in (kv.k, kv.v):
        for part in (cache.data, cache.params):
            if len(part):
                part.view(torch.uint8)[hidden] = 0xFF  # NaN in every float type
    for count in (1, 8):  # the kernel's units are tiles, or partitions of tiles
        threads.configure(count)
        assert torch.equal(attend(implementation, q, kv, tables, window, sinks), expected)
