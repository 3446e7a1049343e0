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

from lmkit.attention_spec import AttentionSpec
from lmkit.kernels import ops
from lmkit.kernels.cuda import attention, module
from lmkit.kernels.cuda.gpus import GPUS, RESERVED_SHARED
from lmkit.kernels.cuda.switches import Switches
from lmkit.kernels.ops import BatchGeometry, KVTensor
from lmkit.kernels.reference.kv import read_blocks
from lmkit.kv_dtype import BFLOAT16, FLOAT16, FP8, INT2, INT3, INT4, INT8, KVDtype
from tests import emulator
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
    softcap: float = 0.0,
    sink_logits: Tensor | None = None,
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
        scores = softcap * (scores / softcap).tanh() if softcap else scores
        weights = scores.masked_fill(~seen, -torch.inf).softmax(-1)
        out[b] = torch.einsum("hn,hnd->hd", weights, values.masked_fill(~seen[None, :, None], 0))
    return out


def case(
    types: tuple[KVDtype, KVDtype], heads: tuple[int, int], dim: int, block_size: int, dtype: torch.dtype,
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
        if cache.dtype.coded:
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
    args: tuple[Any, ...],
    window: int,
    sinks: int,
    device: str,
    new: tuple[Tensor, ...] | None = None,
    *,
    softcap: float = 0.0,
    sink_logits: Tensor | None = None,
) -> Tensor:
    """The kernel's result on poisoned memory; `new`: k, v, cos, sin, slots."""
    q, k_cache, v_cache, tables, starts, lengths = moved(args, device)
    out = torch.full_like(q, torch.nan)
    *fused, slots = [None, lengths] if new is None else moved(new, device)
    batch = BatchGeometry(starts, lengths, tables, slots)
    spec = AttentionSpec(q.shape[2] ** -0.5, window, sinks, softcap)
    rows: Any = tuple(fused) if new else None
    learned = None if sink_logits is None else sink_logits.to(device)
    attention.decode_attention(q, rows, k_cache, v_cache, batch, spec, out, learned)
    assert not bool(module.counters(device).any())
    return out.cpu().float()


def in_splits(splits: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every sequence has so many splits."""
    monkeypatch.setattr(attention, "switches", lambda: Switches(work_list=False))
    monkeypatch.setattr(attention, "num_splits", lambda *_: splits)


def error(got: Tensor, expected: Tensor) -> float:
    assert bool(got.isfinite().all())
    return float((got - expected).abs().max() / expected.abs().max())


TYPES = (
    ((FLOAT16, FLOAT16), torch.float16),
    ((BFLOAT16, BFLOAT16), torch.bfloat16),
    ((INT8, INT8), torch.float16),
    ((INT8, INT8), torch.bfloat16),
    ((INT4, INT4), torch.float16),
    ((FP8, FP8), torch.bfloat16),
    ((INT8, INT4), torch.bfloat16),
    ((FLOAT16, FP8), torch.float16),
    ((INT4, BFLOAT16), torch.bfloat16),
)


@pytest.mark.parametrize(("types", "dtype"), TYPES)
@pytest.mark.parametrize(("window", "sinks"), [(0, 0), (100, 7)])
def test_types(device: str, types: tuple[KVDtype, KVDtype], dtype: torch.dtype, window: int, sinks: int) -> None:
    torch.manual_seed(1)
    args = case(types, (4, 2), 64, 16, dtype)
    expected = oracle(*args[:4], args[5], 64**-0.5, window, sinks)
    assert error(decode(args, window, sinks, device), expected) < TOLERANCE[dtype]


@pytest.mark.parametrize(
    ("types", "heads", "dim"),
    [((INT3, INT3), (4, 2), 128), ((INT2, INT8), (3, 1), 64), ((FLOAT16, INT3), (9, 1), 96)],
)
def test_levels(device: str, types: tuple[KVDtype, KVDtype], heads: tuple[int, int], dim: int) -> None:
    """Windows begin at even and at odd tokens, whose parameters are halves of words."""
    torch.manual_seed(dim)
    args = case(types, heads, dim, 16, torch.float16, (1, 150, 64, 0, 65))
    for window, sinks in ((0, 0), (100, 7), (3, 0)):
        expected = oracle(*args[:4], args[5], dim**-0.5, window, sinks)
        assert error(decode(args, window, sinks, device), expected) < TOLERANCE[torch.float16]


@pytest.mark.parametrize("mean", [False, True])
@pytest.mark.parametrize(("types", "dtype"), TYPES)
def test_a_soft_cap(device: str, types: tuple[KVDtype, KVDtype], dtype: torch.dtype, mean: bool) -> None:
    """Of scores before the mask, over a window and sinks; the share of a key mean is capped with the rest."""
    torch.manual_seed(2)
    q, k_cache, *rest = case(types, (4, 2), 64, 16, dtype, (1, 300, 64, 0, 77))
    if mean:
        k_cache = replace(k_cache, mean=key_mean(2, 64, 64, 300))
    args = (q * 2, k_cache, *rest)
    exact, capped = (oracle(*args[:4], args[5], 64**-0.5, 100, 7, softcap) for softcap in (0.0, 3.0))
    assert error(exact, capped) > 0.1
    assert error(decode(args, 100, 7, device, softcap=3.0), capped) < TOLERANCE[dtype]


@pytest.mark.parametrize(
    ("types", "heads", "dim", "block_size"),
    [
        ((INT8, INT8), (3, 3), 128, 64),  # a group of one
        ((INT4, INT4), (6, 2), 128, 64),
        ((FLOAT16, INT8), (7, 1), 80, 16),
        ((INT4, INT4), (8, 1), 80, 48),  # rows of 40 bytes
        ((INT4, FP8), (16, 1), 96, 16),  # two tiles of heads
        ((FP8, FLOAT16), (20, 1), 64, 64),  # three, in two blocks
        ((INT8, INT4), (12, 1), 256, 16),  # two blocks
        ((FLOAT16, FLOAT16), (2, 1), 256, 32),
        ((INT8, INT8), (2, 2), 48, 16),
        ((INT4, FLOAT16), (1, 1), 16, 16),
    ],
)
def test_shapes(device: str, types: tuple[KVDtype, KVDtype], heads: tuple[int, int], dim: int, block_size: int) -> None:
    torch.manual_seed(dim)
    args = case(types, heads, dim, block_size, torch.float16, (1, 77, 130))
    expected = oracle(*args[:4], args[5], dim**-0.5, 0, 0)
    assert error(decode(args, 0, 0, device), expected) < TOLERANCE[torch.float16]


@pytest.mark.parametrize("storage", [INT8, INT4, FP8])
def test_large_queries(device: str, storage: KVDtype) -> None:
    """The codes' bias, 1024 times the sum of a query, is in the sums of a tensor core. It may not hide the scores."""
    torch.manual_seed(4)
    q, *rest = case((storage, storage), (8, 2), 128, 16, torch.float16, (1, 300, 77))
    args = ((40 + 60 * torch.rand(q.shape)).half() * q.sign(), *rest)
    args[0][1] = args[0][1].abs()  # a sum of 9,000
    scale = 0.02 * 128**-0.5
    expected = oracle(*args[:4], args[5], scale, 0, 0)
    there, out = moved(args, device), torch.full_like(q, torch.nan, device=device)
    batch = BatchGeometry(there[4], there[5], there[3], there[5])
    attention.decode_attention(there[0], None, there[1], there[2], batch, AttentionSpec(scale), out)
    assert error(out.cpu().float(), expected) < TOLERANCE[torch.float16]


@pytest.mark.parametrize(("window", "sinks"), [(1, 0), (3, 2), (64, 0), (300, 7), (40, 100), (40, 1000), (10, 64)])
def test_windows(device: str, window: int, sinks: int) -> None:
    """What no query sees is not read, be it a NaN."""
    torch.manual_seed(window)
    args = case((FLOAT16, FP8), (2, 1), 64, 16, torch.float16, (5, 400, 64, 65))
    expected = oracle(*args[:4], args[5], 64**-0.5, window, sinks)
    _, k_cache, v_cache, tables, _, lengths = args
    for table, length in zip(tables, lengths.tolist(), strict=True):
        for t in range(sinks, length - window):
            where = table[t // 16], slice(None), t % 16
            k_cache.data[where] = v_cache.params[where] = torch.nan
    assert error(decode(args, window, sinks, device), expected) < TOLERANCE[torch.float16]


@pytest.mark.parametrize("splits", [2, 3, 7, 11, 64])
def test_splits(device: str, splits: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Shares of tiles, of which short sequences have fewer than there are blocks."""
    torch.manual_seed(splits)
    in_splits(splits, monkeypatch)
    args = case((INT8, INT4), (5, 1), 64, 16, torch.bfloat16, (700, 64, 0, 65, 130))
    expected = oracle(*args[:4], args[5], 64**-0.5, 0, 0)
    assert error(decode(args, 0, 0, device), expected) < TOLERANCE[torch.bfloat16]


@pytest.mark.parametrize("splits", [1, 5])
def test_learned_sinks(device: str, splits: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each head has its own. Some take nearly all of a row, some nothing."""
    torch.manual_seed(6)
    in_splits(splits, monkeypatch)
    q, k_cache, v_cache, tables, starts, lengths = args = case(
        (FLOAT16, FLOAT16), (6, 2), 64, 16, torch.float16, (700, 64, 1, 65)
    )
    learned = torch.tensor([-50.0, 0.0, 2.0, 5.0, 30.0, 300.0])
    batch, spec = BatchGeometry(starts, lengths, tables, lengths), AttentionSpec(64**-0.5)
    expected = ops.paged_attention.named("reference")(q.float(), k_cache, v_cache, batch, spec, learned)
    got = decode(args, 0, 0, device, sink_logits=learned)
    assert error(got, expected) < TOLERANCE[torch.float16]
    assert not got[:, 5].any()


def test_same_bits_in_any_order(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(0)
    in_splits(5, monkeypatch)
    args = case((INT4, INT4), (4, 2), 64, 16, torch.float16, (700, 290))
    first = decode(args, 0, 0, device)
    for seed in range(3):
        if device == "cpu":
            emulator.install(seed=seed + 100)
        assert torch.equal(decode(args, 0, 0, device), first)


def test_scales_of_all_sizes(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Values whose scales span F16, growing and shrinking, and a constant vector now and then: weight * scale."""
    torch.manual_seed(3)
    in_splits(1, monkeypatch)
    for sign in (1, -1):
        args = case((INT8, INT8), (4, 1), 64, 16, torch.float16, (260,))
        exponents = torch.linspace(-14, 8, 260) if sign > 0 else torch.linspace(8, -14, 260)
        t = torch.arange(260)
        where = args[3][0][t // 16].long(), 0, t % 16
        args[2].params[where] = torch.stack([2**exponents, -(2**exponents) * 100], -1).half()
        args[2].params[where[0][::9], 0, where[2][::9], 0] = 0
        expected = oracle(*args[:4], args[5], 64**-0.5, 0, 0)
        assert error(decode(args, 0, 0, device), expected) < TOLERANCE[torch.float16]


def test_sharp_and_flat_scores(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """One token that outweighs all others by far, wherever it is; and none."""
    torch.manual_seed(4)
    in_splits(1, monkeypatch)
    for place in (0, 17, 250, None):
        q, k_cache, *rest = case((BFLOAT16, BFLOAT16), (2, 1), 64, 16, torch.bfloat16, (251,))
        k_cache.data.mul_(0.02)
        if place is not None:
            k_cache.data[rest[1][0, place // 16], 0, place % 16] = q[0, 0] * 10
        expected = oracle(q, k_cache, *rest[:2], rest[3], 64**-0.5, 0, 0)
        assert error(decode((q, k_cache, *rest), 0, 0, device), expected) < TOLERANCE[torch.bfloat16]


def test_queries_beyond_float16(device: str) -> None:
    """bfloat16 queries that F16 cannot hold, with keys that are as small."""
    torch.manual_seed(5)
    q, k_cache, *rest = case((INT8, INT8), (4, 2), 64, 16, torch.bfloat16, (90, 3))
    q *= 2.0**15
    assert float(q.abs().max()) > 65504
    k_cache.params.mul_(2.0**-12)
    expected = oracle(q, k_cache, *rest[:2], rest[3], 64**-0.5, 0, 0)
    assert error(decode((q, k_cache, *rest), 0, 0, device), expected) < TOLERANCE[torch.bfloat16]


FUSED = (  # types, heads, D, rotary dim, type of the activations, what keys are
    ((FLOAT16, FLOAT16), (4, 2), 64, 64, torch.float16, ""),
    ((BFLOAT16, BFLOAT16), (7, 1), 128, 64, torch.bfloat16, ""),
    ((INT8, INT8), (8, 2), 128, 128, torch.float16, "mean"),
    ((INT4, INT4), (3, 3), 64, 64, torch.bfloat16, "hadamard"),
    ((INT4, FP8), (4, 1), 128, 128, torch.float16, "mean hadamard"),
    ((FP8, INT4), (10, 1), 80, 20, torch.bfloat16, "mean"),
    ((INT8, INT8), (18, 1), 64, 32, torch.float16, "scales"),
    ((INT4, INT8), (9, 1), 256, 256, torch.bfloat16, ""),
    ((INT3, INT2), (4, 2), 96, 96, torch.float16, ""),
)


@pytest.mark.parametrize(("types", "heads", "dim", "rotary", "dtype", "keys"), FUSED)
def test_append_and_attend(
    device: str,
    types: tuple[KVDtype, KVDtype],
    heads: tuple[int, int],
    dim: int,
    rotary: int,
    dtype: torch.dtype,
    keys: str,
) -> None:
    """As the reference's append, then attention; what is stored has its bits, elsewhere nothing changes."""
    torch.manual_seed(dim)
    lengths, (num_heads, kv_heads) = (33, 1, 0, 130, 64), heads
    q, k_cache, v_cache, tables, starts, lens = case(types, heads, dim, 16, dtype, lengths)
    k_cache = replace(k_cache, hadamard="hadamard" in keys)
    angles = torch.rand(len(lengths), rotary // 2) * 7
    if "mean" in keys:
        k_cache = replace(k_cache, mean=key_mean(kv_heads, dim, rotary, 130))
        assert k_cache.mean is not None
        k_cache.mean.vector.div_(10)
        last = (lens.long() - 1).clamp(min=0)
        cos, sin = (part[:, last].T.contiguous() for part in k_cache.mean.table.unbind(1))
    else:
        cos, sin = angles.cos(), angles.sin()
    if "scales" in keys:
        scales = torch.full((kv_heads,), 0.03125)
        k_cache, v_cache = replace(k_cache, scales=scales), replace(v_cache, scales=scales)
    merged = torch.cat([q.flatten(1), torch.randn(len(lengths), 2 * kv_heads * dim).to(dtype)], dim=1)
    slots = torch.tensor(
        [-1 if n == 0 else int(row[(n - 1) // 16]) * 16 + (n - 1) % 16 for n, row in zip(lengths, tables, strict=True)]
    )
    parts = [p.view(len(lengths), -1, dim) for p in merged.split((num_heads * dim, kv_heads * dim, kv_heads * dim), 1)]
    caches = k_cache, v_cache
    got = tuple(replace(c, data=c.data.to(device, copy=True), params=c.params.to(device, copy=True)) for c in caches)
    args = (parts[0], *got, tables, starts, lens)
    result = decode(args, 0, 0, device, (parts[1], parts[2], cos, sin, slots.int()))

    ops.rope_append.named("reference")(*parts, cos, sin, *caches, slots.int())
    expected = oracle(parts[0], *caches, tables, lens, dim**-0.5, 0, 0)
    assert error(result, expected) < TOLERANCE[dtype]
    for a, b in zip(got, caches, strict=True):
        assert torch.equal(a.data.cpu().view(torch.uint8), b.data.view(torch.uint8))
        assert torch.equal(a.params.cpu().view(torch.int16), b.params.view(torch.int16))


def test_longer_queries_are_left_alone(device: str) -> None:
    """In a mixed step only rows of sequences with one query are written."""
    torch.manual_seed(2)
    q, *caches, tables, _, lens = case((INT8, INT8), (4, 2), 64, 16, torch.float16, (40, 90, 7))
    q = torch.cat([q, torch.randn(20, 4, 64).half()])
    starts = torch.tensor([0, 1, 22, 23]).int()
    out = torch.full_like(q, torch.nan).to(device)
    args = moved((q, *caches, tables, starts, lens), device)
    batch = BatchGeometry(args[4], args[5], args[3], args[5])
    attention.decode_attention(args[0], None, *args[1:3], batch, AttentionSpec(0.125), out)
    expected = oracle(q[[0, 1, 22]], *caches, tables, lens, 0.125, 0, 0)
    assert error(out[[0, 22]].cpu().float(), expected[[0, 2]]) < TOLERANCE[torch.float16]
    assert bool(out[1:22].isnan().all())


def test_ops(device: str) -> None:
    """Both ops take decode steps to the kernel, and what it cannot do to the reference."""
    torch.manual_seed(6)
    q, *rest = case((INT8, INT8), (4, 2), 64, 16, torch.float16, (40, 9))
    k_cache, v_cache, tables, starts, lens = rest
    expected = oracle(q, k_cache, v_cache, tables, lens, 0.125, 0, 0)
    new = [torch.randn(2, 2, 64).half() for _ in range(2)], torch.rand(2, 32) * 7
    slots = torch.tensor([int(tables[0, 2]) * 16 + 7, int(tables[1, 0]) * 16 + 8]).int()
    args = *moved((k_cache, v_cache), device), BatchGeometry(*moved((starts, lens, tables, slots), device))
    spec = AttentionSpec(0.125)
    got = attention.paged_attention(q.to(device), *args, spec)
    assert error(got.cpu().float(), expected) < TOLERANCE[torch.float16]
    got = attention.paged_attention(q.float().to(device), *args, spec)
    assert got.dtype == torch.float32
    assert error(got.cpu(), expected) < 1e-5
    assert ops.paged_attention.fallbacks["tensors of float32"]

    tail = [*new[0], new[1].cos(), new[1].sin()]
    moved_tail = [x.to(device) for x in (q, *tail)]
    got = attention.rope_paged_attention(*moved_tail, *args, spec).cpu()
    reference = ops.rope_paged_attention.named("reference")
    expected = reference(q.clone(), *tail, k_cache, v_cache, BatchGeometry(starts, lens, tables, slots), spec).float()
    assert error(got.float(), expected) < TOLERANCE[torch.float16]


@pytest.mark.parametrize("lengths", [((40, 1), (90, 20), (7, 7)), ((50, 30),)])
def test_steps_with_prompts(device: str, lengths: tuple[tuple[int, int], ...]) -> None:
    """(context, new tokens) of sequences, of which some have one new token."""
    torch.manual_seed(7)
    _, *caches, tables, _, lens = case((INT8, INT8), (4, 2), 64, 16, torch.float16, tuple(n for n, _ in lengths))
    counts = torch.tensor([new for _, new in lengths])
    starts = torch.cat([torch.zeros(1), counts.cumsum(0)]).int()
    owner = torch.repeat_interleave(torch.arange(len(lengths)), counts)
    where = torch.cat([torch.arange(n - new, n) for n, new in lengths])
    slots = (tables[owner, where // 16] * 16 + where % 16).int()
    new = [torch.randn(len(where), heads, 64).half() for heads in (4, 2, 2)]
    angles = torch.rand(len(where), 32) * 7
    args = moved((*new, angles.cos(), angles.sin(), *caches), device)
    args = args[0].clone(), args[1].clone(), *args[2:]
    batch = BatchGeometry(*moved((starts, lens, tables, slots), device))
    got = attention.rope_paged_attention(*args, batch, AttentionSpec(0.125)).cpu()
    ops.rope_append.named("reference")(*new, angles.cos(), angles.sin(), *caches, slots)
    for b, (n, count) in enumerate(lengths):
        rows = slice(int(starts[b]), int(starts[b + 1]))
        lens = torch.arange(n - count + 1, n + 1).int()
        expected = oracle(new[0][rows], *caches, tables[b : b + 1].repeat(count, 1), lens, 0.125, 0, 0)
        assert error(got[rows].float(), expected) < TOLERANCE[torch.float16]


def test_num_splits() -> None:
    """One wave where it can be filled, no more shares than tiles, always one at least, and few waves."""
    assert attention.num_splits(128, 128, 396, 3) == 3
    assert attention.num_splits(8, 128, 396, 3) in range(40, 50)
    assert attention.num_splits(8, 5, 396, 3) == 5
    assert attention.num_splits(4, 0, 396, 3) == 1
    # 16 x 8k, 64 x 1k and 256 x 1k of 8 KV heads on an H200, where two blocks of INT8 fit an SM
    assert [attention.num_splits(8 * b, n // 64, 264, 3) for b, n in ((16, 8192), (64, 1024), (256, 1024))] == [2, 1, 1]


def test_shapes_fit_the_device() -> None:
    """Rings as deep as shared memory allows; what does not fit is left to the reference."""
    shape = attention.shape_of(128, FLOAT16, FLOAT16, 4, False, (9, 0))
    assert (shape.n_tiles, shape.stages, shape.blocks_per_sm) == (1, 3, 2)
    assert attention.shape_of(128, INT4, INT4, 4, False, (9, 0)).blocks_per_sm == 4
    assert attention.shape_of(128, INT8, INT8, 16, False, (8, 0)).n_tiles == 2
    assert not attention.shape_of(256, FLOAT16, FLOAT16, 4, False, (8, 9)).fits
    for capability, gpu in GPUS.items():
        for types in (FLOAT16, INT8, INT4, INT3, FP8):
            shape = attention.shape_of(128, types, types, 8, True, capability)
            assert shape.fits
            assert shape.blocks_per_sm * (shape.shared + RESERVED_SHARED) <= gpu.shared
