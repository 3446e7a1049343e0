"""A call that a kernel cannot run goes to the reference, and the reason is said once."""

from __future__ import annotations

import shutil
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from lmkit.kernels import ops
from lmkit.kernels.cuda import append, attention, elementwise, library, module
from lmkit.kernels.ops import Norm
from lmkit.kernels.reference.linear import keep
from lmkit.kernels.registry import Op
from lmkit.kv_dtype import FLOAT16, FLOAT32, INT8, KVDtype
from lmkit.layers.batch import allocate_kv
from tests import emulator
from tests.kernels.cases import balance, key_mean

F16, BF16, F32, F64 = torch.float16, torch.bfloat16, torch.float32, torch.float64


def normed(columns: int, given: torch.dtype, result: torch.dtype) -> Callable[[], Tensor]:
    x, norm = torch.randn(3, columns).to(given), Norm(torch.rand(columns), 1e-5, dtype=result)
    return lambda: elementwise.rms_norm(x, norm)


def rounded_norm() -> Tensor:
    norm = Norm(torch.rand(32), 1e-5, dtype=BF16)
    return elementwise.quantize_rows(torch.randn(2, 32).half(), torch.int8, norm).codes


def appended(dtype: torch.dtype, stored: KVDtype, first: int = 0) -> Callable[[], Any]:
    kv = allocate_kv(2, 2, 16, 64, (stored, stored))
    rows, slots = torch.randn(4, 2, 72).to(dtype)[..., first : first + 64], torch.arange(4).int()
    return lambda: append.kv_append(rows, rows, kv.k, kv.v, slots)


def rotated() -> None:
    kv, angles = allocate_kv(2, 2, 16, 64, (INT8, INT8)), torch.rand(4, 32)
    q, k, v = torch.randn(3, 4, 2, 64)
    append.rope_append(q, k, v, angles.cos(), angles.sin(), kv.k, kv.v, torch.arange(4).int())


CASES: dict[str, tuple[Op, Callable[[], Any], str]] = {
    "norm of two types": (ops.rms_norm, normed(32, F16, BF16), "tensors of bfloat16 and float16"),
    "norm of float64": (ops.rms_norm, normed(32, F64, F64), "tensors of float64"),
    "wide norm": (ops.rms_norm, normed(32776, F16, F16), "32776 columns, more than 32768"),
    "codes of a norm": (ops.rms_norm, rounded_norm, "tensors of bfloat16 and float16"),
    "table of float64": (
        ops.embedding, lambda: elementwise.embedding(torch.zeros(9, 4, dtype=F64), torch.tensor([1])), "float64",
    ),
    "table of columns": (
        ops.embedding, lambda: elementwise.embedding(torch.zeros(4, 9).T, torch.tensor([1])), "not contiguous",
    ),
    "gate of float64": (
        ops.gated_activation,
        lambda: elementwise.gated_activation(torch.zeros(2, 8, dtype=F64), "silu"),
        "float64",
    ),
    "append of float32": (ops.kv_append, appended(F32, INT8), "tensors of float32"),
    "append into float32": (ops.kv_append, appended(F16, FLOAT32), "KV stored as float32"),
    "append of odd rows": (ops.kv_append, appended(F16, INT8, 3), "loads of 16 bytes"),
    "rotation of float32": (ops.rope_append, rotated, "tensors of float32"),
    "product of two types": (
        ops.linear_dense,
        lambda: library.linear_dense(torch.zeros(2, 16), keep(torch.zeros(8, 16).half()), None),
        "tensors of float16 and float32",
    ),
}  # fmt: skip


@pytest.fixture
def gpu() -> Iterator[None]:
    if shutil.which("g++") is None:
        pytest.skip("kernels are emulated with g++")
    emulator.install()
    yield
    module.BACKENDS.pop("cpu", None)
    module.counters.cache_clear()


@pytest.mark.usefixtures("gpu")
@pytest.mark.parametrize("name", CASES)
def test_a_fallback_is_told_once(name: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    op, call, reason = CASES[name]
    monkeypatch.setattr(op, "fallbacks", Counter())
    with caplog.at_level("WARNING", "lmkit"):
        call()
        call()
    (warning,) = [record.getMessage() for record in caplog.records]
    assert warning.startswith(f"{op.name}: ")
    assert reason in warning
    ((counted, calls),) = op.fallbacks.items()
    assert reason in counted
    assert calls == 2


@pytest.mark.usefixtures("gpu")
@pytest.mark.parametrize(
    ("dim", "stored", "changes", "reason"),
    [
        (64, INT8, {}, None),
        (64, INT8, {"dtype": F32}, "tensors of float32"),
        (72, INT8, {}, "head_dim 72"),
        (272, INT8, {}, "head_dim 272"),
        (64, FLOAT32, {}, "KV stored as float32"),
        (64, INT8, {"block_size": 8}, "blocks of 8 tokens"),
        (64, INT8, {"turned": True}, "values that are turned"),
        (64, INT8, {"balanced": True}, None),
        (512, INT8, {"balanced": True}, "rows of 512 that are turned"),
        (64, INT8, {"pairs": 16}, None),
        (64, INT8, {"pairs": 17}, "17 pairs, more than 16"),
        (256, FLOAT16, {"capability": (9, 0)}, None),
        (256, FLOAT16, {"capability": (8, 9)}, "shared memory cannot hold"),
    ],
)
def test_attention_says_what_it_cannot_do(
    dim: int, stored: KVDtype, changes: dict[str, Any], reason: str | None
) -> None:
    emulator.install(capability=changes.get("capability", (9, 0)))
    kv = allocate_kv(2, 1, changes.get("block_size", 16), dim, (stored, stored))
    k_cache, v_cache = kv.k, replace(kv.v, hadamard="turned" in changes)
    if "balanced" in changes:
        k_cache = replace(k_cache, balance=balance(1, dim))
    if "pairs" in changes:
        pairs = torch.zeros(1, changes["pairs"], dtype=torch.int32)
        k_cache = replace(k_cache, mean=replace(key_mean(1, 64, 64, 8), pairs=pairs))
    rows = (torch.zeros(2, 1, dim, dtype=changes.get("dtype", F16)),)
    found = attention.attention_problem(rows, k_cache, v_cache, decodes=False)
    assert found is None if reason is None else reason in str(found)
