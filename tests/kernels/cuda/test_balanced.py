"""Keys that are balanced, and position 0 without what it has in common: append, decode and prefill attention against
the reference's, which undoes all of it in float32."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from lmkit.kernels import ops
from lmkit.kernels.cuda import append, attention, module, prefill
from lmkit.kernels.ops import Balance, BatchGeometry, KeyMean, KVTensor
from lmkit.kernels.reference.kv import read_blocks
from lmkit.kv_dtype import BFLOAT16, FLOAT16, FP8, INT4, INT8, KVDtype
from lmkit.layers.batch import allocate_kv
from tests.kernels.cases import balance, edge_vectors, key_mean
from tests.kernels.cuda.test_decode_attention import in_splits
from tests.kernels.cuda.test_prefill_attention import Inputs, assert_near, expected, inputs

HALF, BRAIN = torch.float16, torch.bfloat16
TOLERANCE = {HALF: 2e-3, BRAIN: 1e-2}  # of the largest result
EVERYTHING = "mean balance first"
PARTS = KVTensor, KeyMean, Balance, BatchGeometry


def there(x: Any, device: str) -> Any:
    """x with all of its tensors on the device; their copies, if they are there."""
    if isinstance(x, PARTS):
        return replace(x, **{name: there(part, device) for name, part in vars(x).items()})
    return x.to(device, copy=True) if isinstance(x, Tensor) else x


def changed(k_cache: KVTensor, v_cache: KVTensor, keys: str, first: float = 5.0) -> tuple[KVTensor, KVTensor]:
    """The caches with a balance of keys and a key of position 0, if `keys` names them, and a value of size `first`."""
    heads, dim = k_cache.data.shape[1], k_cache.dim
    if "balance" in keys:
        k_cache = replace(k_cache, balance=balance(heads, dim))
    if "first" in keys:
        k_cache = replace(k_cache, first=torch.randn(heads, dim) * 3)
    return k_cache, replace(v_cache, first=torch.randn(heads, dim) * first)


CASES = (  # types, type of queries, (KV heads, queries a KV head, D), window and sinks, soft cap, what keys are
    ((INT4, INT4), HALF, (2, 3, 64), (0, 0), 0.0, EVERYTHING),
    ((INT4, INT4), BRAIN, (1, 2, 128), (40, 3), 0.0, EVERYTHING),
    ((INT4, INT8), BRAIN, (2, 2, 256), (0, 0), 0.0, EVERYTHING),
    ((INT4, FLOAT16), HALF, (1, 9, 96), (100, 0), 0.0, "balance first"),
    ((INT8, INT4), HALF, (2, 1, 80), (60, 5), 20.0, EVERYTHING),
    *(
        pytest.param(*case, marks=pytest.mark.exhaustive)
        for case in (
            ((INT8, INT8), BRAIN, (1, 12, 64), (0, 0), 30.0, "mean balance"),
            ((FP8, BFLOAT16), BRAIN, (1, 4, 128), (0, 0), 0.0, "first"),
            ((BFLOAT16, INT4), HALF, (1, 4, 64), (0, 0), 0.0, "hadamard"),
        )
    ),
)
STEPS = {
    "new tokens": ((1, 1), (300, 1), (0, 0), (64, 1), (45, 1)),
    "prompts": ((5, 5), (290, 69), (64, 64)),
    "both": ((90, 1), (1, 1), (150, 20), (7, 7)),
}


@pytest.mark.parametrize("step", STEPS)
@pytest.mark.parametrize(("types", "dtype", "heads", "window", "softcap", "keys"), CASES)
def test_attention(
    device: str,
    types: tuple[KVDtype, KVDtype],
    dtype: torch.dtype,
    heads: tuple[int, int, int],
    window: tuple[int, int],
    softcap: float,
    keys: str,
    step: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Windows pass position 0 in some sequences, and splits leave it to one of them."""
    monkeypatch.setattr(ops.paged_attention, "fall_back", None)  # kernels do it
    torch.manual_seed(sum(heads) + window[0])
    args = inputs(types, dtype, heads, "cpu", block_size=16, window=window, lengths=STEPS[step], keys=keys)
    assert_right(args, softcap, keys, device)


def assert_right(args: Inputs, softcap: float, keys: str, device: str, first: float = 5.0) -> None:
    k_cache, v_cache = changed(args.k_cache, args.v_cache, keys, first)
    args = args._replace(k_cache=k_cache, v_cache=v_cache, spec=replace(args.spec, softcap=softcap))
    got = attention.paged_attention(*(there(x, device) for x in args)).cpu()
    short = args.q.dtype == BRAIN or BFLOAT16 in (k_cache.dtype, v_cache.dtype)
    assert_near(got, expected(args), TOLERANCE[BRAIN if short else HALF])
    assert not module.counters(device).any()


@pytest.mark.parametrize("splits", [1, 2, 5])
@pytest.mark.parametrize("step", ["new tokens", "prompts"])
def test_splits(device: str, step: str, splits: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """One of a sequence's splits has position 0, whose value is seen even where later keys outweigh it by far."""
    torch.manual_seed(splits)
    in_splits(splits, monkeypatch)
    monkeypatch.setattr(prefill, "num_splits", lambda *_: splits)
    args = inputs((INT4, INT4), HALF, (1, 8, 64), "cpu", block_size=16, lengths=STEPS[step])
    assert_right(args, 0.0, "balance first", device, first=1000.0)


@pytest.mark.parametrize(
    ("types", "dim", "rotary", "heads", "dtype", "keys"),
    [
        ((INT4, INT4), 64, 64, (6, 2), HALF, EVERYTHING),
        ((INT4, INT4), 256, 128, (2, 1), BRAIN, EVERYTHING),
        ((INT4, INT8), 96, 96, (3, 3), BRAIN, "balance first"),
        ((INT8, FP8), 128, 128, (5, 1), HALF, "mean balance"),
        ((FLOAT16, INT4), 80, 20, (4, 2), HALF, "first"),
    ],
)
def test_append(
    device: str,
    types: tuple[KVDtype, KVDtype],
    dim: int,
    rotary: int,
    heads: tuple[int, int],
    dtype: torch.dtype,
    keys: str,
) -> None:
    """What is read back is the reference's but for a step of codes: products are added up in another order. Rows of
    position 0 stand among others, and one of them is stored nowhere."""
    torch.manual_seed(dim)
    tokens, (num_heads, kv_heads) = 19, heads
    kv = allocate_kv(3, kv_heads, 16, dim, types)
    mean = key_mean(kv_heads, dim, rotary, 48) if "mean" in keys else None
    caches = changed(replace(kv.k, mean=mean), kv.v, keys)
    q, k, v = torch.randn(tokens, num_heads, dim), *(edge_vectors(tokens, kv_heads, dim, narrow=True) for _ in "kv")
    q, k, v = (x.to(dtype) for x in (q, k, v))
    angles = torch.rand(tokens, rotary // 2) * 7
    positions, slots = torch.arange(tokens).int() % 7, torch.randperm(48)[:tokens].int()
    slots[7] = -1
    args = q, k, v, angles.cos(), angles.sin(), *caches, slots, positions
    got = [there(x, device) for x in args]
    append.rope_append(*got)
    ops.rope_append.named("reference")(*args)
    for mine, theirs in zip(got[:3], args[:3], strict=True):
        assert torch.equal(mine.cpu().view(torch.int16), theirs.view(torch.int16))
    for mine, theirs in zip(got[5:7], args[5:7], strict=True):
        mine = there(mine, "cpu")
        ours, wanted = (read_blocks(replace(x, mean=None, balance=None, first=None), torch.arange(3), 48)
                        for x in (mine, theirs))  # fmt: skip
        different = (ours - wanted).abs()
        largest = wanted.abs().amax(-1, keepdim=True)
        assert float((different > 1e-3 * largest).float().mean()) < 0.01
        assert bool((different <= 0.15 * largest + 1e-3).all())
