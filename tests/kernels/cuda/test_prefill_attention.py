"""Attention of chunks against attention in float32 over what the cache holds."""

from __future__ import annotations

from dataclasses import replace
from typing import NamedTuple

import pytest
import torch
from torch import Tensor

from lmkit.attention_spec import AttentionSpec
from lmkit.kernels import ops
from lmkit.kernels.cuda import module, prefill
from lmkit.kernels.ops import BatchGeometry, KVTensor
from lmkit.kernels.reference.kv import read_blocks
from lmkit.kv_dtype import BFLOAT16, FLOAT16, FP8, INT2, INT3, INT4, INT8, KVDtype
from tests.kernels.cases import filled_cache, geometry, key_mean

LENGTHS = ((5, 5), (700, 2), (90, 1), (290, 129), (0, 0), (64, 64))  # tokens in the cache, of which queries
TOLERANCE, BRAIN_TOLERANCE = 2e-3, 1e-2  # of the largest result; bfloat16 has 8 bits


class Inputs(NamedTuple):
    """Arguments of ops.paged_attention."""

    q: Tensor
    k_cache: KVTensor
    v_cache: KVTensor
    geometry: BatchGeometry
    spec: AttentionSpec


def inputs(
    types: tuple[KVDtype, KVDtype],
    dtype: torch.dtype,
    heads: tuple[int, int, int],
    device: str,
    *,
    block_size: int = 32,
    window: tuple[int, int] = (0, 0),
    lengths: tuple[tuple[int, int], ...] = LENGTHS,
    keys: str = "",
) -> Inputs:
    """`heads` = (KV heads, queries a KV head, D); `keys` names what is special about them: mean, hadamard."""
    kv_heads, group, dim = heads
    in_cache, new = [n for n, _ in lengths], [n for _, n in lengths]
    kv, tables = filled_cache(types, kv_heads, dim, block_size, in_cache)
    k_cache = replace(kv.k, hadamard="hadamard" in keys)
    if "mean" in keys:
        k_cache = replace(k_cache, mean=key_mean(kv_heads, dim, dim // 2, max(in_cache)))
    q = (torch.randn(sum(new), kv_heads * group + 2, dim) * 2).to(dtype)[:, 1:-1]  # part of a tensor, as of q, k and v
    batch = geometry(torch.tensor([0, *new]).cumsum(0).tolist(), in_cache, tables)
    args = Inputs(q, k_cache, kv.v, batch, AttentionSpec(dim**-0.5, *window))
    return args if device == "cpu" else on_device(args, device)


def on_device(args: Inputs, device: str) -> Inputs:
    caches = [replace(cache, data=cache.data.to(device), params=cache.params.to(device)) for cache in args[1:3]]
    if (mean := args.k_cache.mean) is not None:
        moved = replace(mean, **{name: getattr(mean, name).to(device) for name in ("vector", "pairs", "table")})
        caches[0] = replace(caches[0], mean=moved)
    batch = BatchGeometry(*(x.to(device) for x in vars(args.geometry).values()))
    return Inputs(args.q.to(device), *caches, batch, args.spec)


def attend(args: Inputs, *, skip_single: bool = False, sink_logits: Tensor | None = None) -> Tensor:
    """NaN where nothing is written."""
    out = torch.full(args.q.shape, torch.nan, dtype=args.q.dtype, device=args.q.device)
    prefill.prefill_attention(*args, out, skip_single=skip_single, sink_logits=sink_logits)
    assert not module.counters(args.q.device.type).any()
    return out


def expected(args: Inputs) -> Tensor:
    """float32; without what queries of int4 keys may be rounded to."""
    out = torch.empty(args.q.shape, device=args.q.device)
    group = args.q.shape[1] // args.k_cache.data.shape[1]
    starts = args.geometry.query_start.tolist()
    for b, length in enumerate(args.geometry.context_lens.tolist()):
        if length == 0:
            continue
        blocks = args.geometry.block_tables[b, : -(-length // args.k_cache.block_size)]
        keys, values = (
            read_blocks(cache, blocks, length).repeat_interleave(group, dim=0) for cache in (args.k_cache, args.v_cache)
        )
        rows = slice(starts[b], starts[b + 1])
        position = torch.arange(length - (rows.stop - rows.start), length, device=out.device)[:, None]
        key = torch.arange(length, device=out.device)
        visible = key <= position
        if args.spec.window:
            visible = visible & ((key > position - args.spec.window) | (key < args.spec.sinks))
        scores = args.q[rows].float().transpose(0, 1) @ keys.transpose(1, 2) * args.spec.scale
        cap = args.spec.softcap
        scores = cap * (scores / cap).tanh() if cap else scores
        weights = scores.masked_fill(~visible, -torch.inf).softmax(-1)
        out[rows] = (weights @ values.masked_fill(~visible.any(0)[:, None], 0)).transpose(0, 1)
    return out


def assert_near(got: Tensor, wanted: Tensor, tolerance: float = TOLERANCE) -> None:
    assert got.isfinite().all()
    error = float((got.float() - wanted).abs().max() / wanted.abs().max())
    assert error < tolerance


HALF, BRAIN = torch.float16, torch.bfloat16
CASES = [
    ((FLOAT16, FLOAT16), HALF, (2, 4, 128), 64, (0, 0), ""),
    ((BFLOAT16, BFLOAT16), BRAIN, (1, 3, 64), 16, (0, 0), ""),
    ((INT8, INT8), HALF, (1, 8, 128), 32, (0, 0), ""),
    ((INT8, INT8), BRAIN, (2, 1, 64), 7, (0, 0), ""),
    ((INT4, INT4), HALF, (1, 4, 64), 16, (0, 0), ""),
    ((INT4, INT4), BRAIN, (1, 1, 128), 100, (0, 0), ""),
    ((FP8, FP8), HALF, (1, 1, 128), 32, (0, 0), ""),
    ((FP8, INT4), BRAIN, (1, 3, 80), 16, (0, 0), ""),
    ((INT4, FP8), HALF, (1, 1, 256), 32, (0, 0), ""),
    ((BFLOAT16, INT8), BRAIN, (1, 2, 96), 16, (0, 0), ""),
    ((FLOAT16, FLOAT16), BRAIN, (1, 1, 16), 32, (0, 0), ""),
    ((BFLOAT16, FLOAT16), HALF, (1, 1, 48), 32, (0, 0), ""),
    ((FLOAT16, FLOAT16), HALF, (1, 1, 64), 16, (3, 0), ""),
    ((FLOAT16, FLOAT16), HALF, (1, 4, 64), 16, (100, 5), ""),
    ((INT8, INT8), BRAIN, (1, 4, 64), 16, (40, 300), ""),
    ((FLOAT16, FLOAT16), HALF, (1, 1, 64), 16, (30, 1000), ""),
    ((INT8, INT8), HALF, (2, 2, 64), 16, (0, 0), "mean"),
    ((INT4, INT4), BRAIN, (2, 2, 128), 16, (0, 0), "mean hadamard"),
    ((INT4, INT8), HALF, (1, 4, 256), 16, (0, 0), "hadamard"),
    ((BFLOAT16, BFLOAT16), BRAIN, (1, 2, 64), 16, (100, 4), "mean"),
    ((FLOAT16, FLOAT16), HALF, (1, 2, 128), 16, (0, 0), "mean"),
    ((INT3, INT3), HALF, (1, 4, 64), 16, (0, 0), "hadamard"),
    ((INT2, INT3), BRAIN, (1, 2, 96), 7, (40, 3), "mean"),
    ((INT8, INT8), HALF, (1, 1, 16), 16, (0, 0), "hadamard"),
]


@pytest.mark.parametrize("splits", [1, 4])
@pytest.mark.parametrize("window", [(0, 0), (40, 3)])
def test_learned_sinks(device: str, splits: int, window: tuple[int, int], monkeypatch: pytest.MonkeyPatch) -> None:
    """Each head has its own. Some take nearly all of a row, some nothing."""
    torch.manual_seed(4)
    monkeypatch.setattr(prefill, "num_splits", lambda *_: splits)
    args = inputs((FLOAT16, FLOAT16), HALF, (2, 3, 64), "cpu", block_size=16, window=window)
    learned = torch.tensor([-50.0, 0.0, 2.0, 5.0, 30.0, 300.0])
    wanted = ops.paged_attention.named("reference")(args.q.float(), *args[1:], learned)
    got = attend(on_device(args, device), sink_logits=learned.to(device)).cpu()
    assert_near(got, wanted)
    assert not got[:, 5].any()


def test_a_tile_ends_with_the_first_key_that_is_no_sink(device: str) -> None:
    """The first query sees it. It is before the window of the last one."""
    torch.manual_seed(3)
    window = 40, prefill.tile_keys(64, 0, module.backend(device).capability()) - 1
    args = inputs((FLOAT16, FLOAT16), HALF, (1, 2, 64), device, block_size=16, window=window, lengths=((110, 20),))
    assert_near(attend(args), expected(args))


CAPPED = [
    ((FLOAT16, FLOAT16), HALF, (2, 2, 64), 16, (0, 0), ""),
    ((BFLOAT16, BFLOAT16), BRAIN, (1, 2, 256), 16, (100, 5), ""),
    ((INT8, INT8), HALF, (1, 2, 64), 16, (100, 5), ""),
    ((FP8, FP8), BRAIN, (1, 2, 64), 16, (0, 0), ""),
    ((INT4, INT4), HALF, (1, 2, 128), 16, (40, 0), ""),
    ((INT4, INT8), HALF, (2, 1, 64), 16, (0, 0), "mean hadamard"),
]


@pytest.mark.parametrize(("types", "dtype", "heads", "block_size", "window", "keys"), CASES)
def test_attention(
    device: str,
    types: tuple[KVDtype, KVDtype],
    dtype: torch.dtype,
    heads: tuple[int, int, int],
    block_size: int,
    window: tuple[int, int],
    keys: str,
) -> None:
    torch.manual_seed(sum(heads) + window[0])
    args = inputs(types, dtype, heads, device, block_size=block_size, window=window, keys=keys)
    short = dtype == BRAIN or BFLOAT16 in types
    assert_near(attend(args), expected(args), BRAIN_TOLERANCE if short else TOLERANCE)


@pytest.mark.parametrize(("types", "dtype", "heads", "block_size", "window", "keys"), CAPPED)
def test_a_soft_cap(
    device: str,
    types: tuple[KVDtype, KVDtype],
    dtype: torch.dtype,
    heads: tuple[int, int, int],
    block_size: int,
    window: tuple[int, int],
    keys: str,
) -> None:
    """Of scores before the mask; the share of a key mean is capped with the rest. Keys are in several ranges, too."""
    torch.manual_seed(heads[2])
    args = inputs(
        types, dtype, heads, device, block_size=block_size, window=window, keys=keys, lengths=((290, 129), (500, 3))
    )
    capped = args._replace(spec=replace(args.spec, softcap=3.0))
    wanted = expected(capped)
    assert float((expected(args) - wanted).abs().max() / wanted.abs().max()) > 0.1
    short = dtype == BRAIN or BFLOAT16 in types
    assert_near(attend(capped), wanted, BRAIN_TOLERANCE if short else TOLERANCE)


@pytest.mark.parametrize("types", [(FLOAT16, FLOAT16), (INT8, INT4)])
@pytest.mark.parametrize("window", [(0, 0), (500, 3)])
def test_few_queries_split_their_keys(device: str, types: tuple[KVDtype, KVDtype], window: tuple[int, int]) -> None:
    """Ranges of keys are merged in order, whichever ends last; a sequence that is too short for it is not split."""
    torch.manual_seed(1)
    args = inputs(types, HALF, (1, 2, 64), device, window=window, lengths=((1500, 5), (60, 3)))
    got = attend(args)
    assert_near(got, expected(args))
    assert torch.equal(got, attend(args))  # emulated in another order


def test_many_splits_merge(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """More ranges than are read at a time, some of which a row does not see."""
    torch.manual_seed(2)
    monkeypatch.setattr(prefill, "num_splits", lambda *args: 12)
    args = inputs((FLOAT16, INT8), HALF, (2, 1, 16), device, lengths=((3300, 130),))
    assert_near(attend(args), expected(args))


def test_result_does_not_depend_on_the_order_of_threads(device: str) -> None:
    torch.manual_seed(3)
    args = inputs((INT4, FLOAT16), BRAIN, (1, 4, 64), device, lengths=((150, 70), (20, 20)))
    assert torch.equal(attend(args), attend(args))


def test_single_queries_are_left_to_decode(device: str) -> None:
    torch.manual_seed(4)
    args = inputs((FLOAT16, FLOAT16), HALF, (1, 1, 64), device, lengths=((5, 5), (90, 1), (1, 1), (40, 2)))
    got, wanted = attend(args, skip_single=True), expected(args)
    assert got[5:7].isnan().all()
    assert_near(got[[*range(5), 7, 8]], wanted[[*range(5), 7, 8]])


def test_sequences_without_context_are_left_out(device: str) -> None:
    """Padding of a batch: queries of nothing, and rows that belong to no sequence."""
    torch.manual_seed(5)
    args = inputs((FLOAT16, FLOAT16), HALF, (1, 2, 64), device, lengths=((30, 6), (0, 0), (50, 50), (0, 0)))
    starts = torch.tensor([0, 6, 8, 58, 60]).int().to(device)  # the third's queries are rows 8..57
    q = torch.cat([args.q[:6], args.q[:2], args.q[6:], args.q[:4]])
    out = attend(args._replace(q=q, geometry=replace(args.geometry, query_start=starts)))
    assert_near(torch.cat([out[:6], out[8:58]]), expected(args))
    assert out[6:8].isnan().all()
    assert out[58:].isnan().all()


@pytest.mark.parametrize("types", [(FLOAT16, BFLOAT16), (INT8, INT8), (INT4, FP8)])
def test_keys_that_no_query_sees_may_be_anything(device: str, types: tuple[KVDtype, KVDtype]) -> None:
    torch.manual_seed(6)
    block_size, window, sinks, lengths = 16, 40, 5, ((300, 20), (50, 50), (7, 7))
    args = inputs(
        types, HALF, (1, 2, 64), device, block_size=block_size, window=(window, sinks), lengths=lengths
    )  # fmt: skip
    wanted = expected(args)
    seen = torch.zeros(len(args.k_cache.data), block_size, dtype=torch.bool)
    for table, (length, new) in zip(args.geometry.block_tables.cpu().long(), lengths, strict=True):
        for token in range(length):
            if token > length - new - window or token < sinks:
                seen[table[token // block_size], token % block_size] = True
    for cache in (args.k_cache, args.v_cache):
        unseen = ~seen[:, None].expand(cache.data.shape[:3]).to(device)
        cache.data.view(torch.uint8)[unseen] = 0xFF
        if cache.dtype.coded:
            cache.params[unseen] = torch.nan
    assert_near(attend(args), wanted, BRAIN_TOLERANCE)


def test_large_queries_of_codes_are_clamped(device: str) -> None:
    """bfloat16 queries meet codes in float16: what is beyond its range stays finite."""
    torch.manual_seed(7)
    args = inputs((INT8, INT8), BRAIN, (1, 1, 64), device, lengths=((20, 20),))
    args.q[3] = 1e30
    assert attend(args).isfinite().all()


def test_no_sequences(device: str) -> None:
    args = inputs((FLOAT16, FLOAT16), HALF, (1, 1, 64), device, lengths=((4, 1),))
    assert attend(args, skip_single=True).isnan().all()
    batch = args.geometry
    nothing = replace(batch, query_start=batch.query_start[:1], context_lens=batch.context_lens[:0])
    empty = args._replace(q=args.q[:0], geometry=nothing)
    assert attend(empty).shape == (0, 1, 64)
