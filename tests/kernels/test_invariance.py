"""The same token gives the same bits whatever runs beside it: other rows, sequences, chunks, numbers of threads."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

import lmkit.kernels  # noqa: F401  (registers)
from lmkit.attention_spec import AttentionSpec
from lmkit.kernels import ops
from lmkit.kernels.cpu import attention, isa, quantized, threads
from lmkit.kernels.ops import Norm
from lmkit.kernels.registry import Op
from lmkit.kv_dtype import BFLOAT16, FLOAT32, FP8, INT2, INT3, INT4, INT8, KVDtype
from lmkit.layers.batch import KVLayer
from lmkit.qtensor import float8_scheme, int_scheme, quantize
from tests.kernels.cases import balance, filled_cache, geometry, key_mean


@pytest.fixture(autouse=True)
def _threads() -> Iterator[None]:
    before = threads.num_threads()
    yield
    threads.configure(before)


@pytest.mark.parametrize("group_size", [32, 128, -1])
@pytest.mark.parametrize(
    "op",
    [ops.linear_dense, ops.linear_w4a16, ops.linear_w4a8, ops.linear_w8a8, ops.linear_w8a16, ops.linear_fp8],
    ids=lambda op: op.name,
)
def test_linear_rows(op: Op, group_size: int) -> None:
    torch.manual_seed(2)
    k, n = 1300, 110
    weight: Any = torch.randn(n, k)
    traits: dict[str, Any] = {"out_features": n, "in_features": k}
    if op is ops.linear_dense:
        weight = weight.to({32: torch.float32, 128: torch.bfloat16, -1: torch.float16}[group_size])
        traits["dtype"] = weight.dtype
    else:
        bits, kind = 4 if "w4" in op.name else 8, "float" if op is ops.linear_fp8 else "int"
        weight = quantize(weight, float8_scheme(group_size) if kind == "float" else int_scheme(bits, group_size))
        traits |= {"group_size": group_size, "bits": weight.scheme.bits}
    impl = op.select("cpu", **traits)
    packed, bias, x = impl.pack(weight), torch.randn(n), torch.randn(230, k)
    together = impl(x, packed, bias)
    for start, count in (
        (0, 1),
        (7, 1),
        (1, 2),
        (3, 3),
        (90, 5),
        (0, 6),
        (10, 7),
        (13, 13),
        (100, 14),
        (60, 97),
        (0, 200),
    ):
        assert torch.equal(impl(x[start : start + count], packed, bias), together[start : start + count]), (
            start,
            count,
        )
    for num_threads in (1, 3):
        threads.configure(num_threads)
        assert torch.equal(impl(x, packed, bias), together)


@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("name", ["neon_i8mm", "neon_dot"])
def test_linear_rows_of_arm(name: str, bits: int) -> None:
    """Native on such a processor, elsewhere emulated. `usmmla` pairs rows, and an odd one with itself."""
    level = isa.named(name if isa.obstacle(isa.LEVELS[name]) is None else name + isa.EMULATED)
    torch.manual_seed(2)
    impl = quantized.implementation(level, bits)
    packed, x = impl.pack(quantize(torch.randn(70, 300), int_scheme(bits, 32))), torch.randn(40, 300)
    together = impl(x, packed, None)
    for start, count in ((0, 1), (7, 1), (1, 2), (3, 3), (8, 5), (11, 27)):
        assert torch.equal(impl(x[start : start + count], packed, None), together[start : start + count])


@pytest.mark.parametrize("op", [ops.rms_norm, ops.gated_activation], ids=lambda op: op.name)
def test_elementwise_rows(op: Op) -> None:
    torch.manual_seed(3)
    x, residual, weight = torch.randn(300, 258), torch.randn(300, 258), torch.randn(258)

    def apply(rows: slice) -> Tensor:
        given = (
            (x[rows], "gelu_tanh")
            if op is ops.gated_activation
            else (x[rows], Norm(weight, 1e-5, residual[rows].clone()))
        )
        return Tensor(op.select("cpu")(*given))

    together = apply(slice(0, 300))
    for start, stop in ((0, 1), (17, 18), (5, 9), (200, 300)):
        assert torch.equal(apply(slice(start, stop)), together[start:stop])


LENGTHS, NEW = [1, 30, 700, 2050, 257], [1, 30, 3, 1, 100]


LEVELS = {isa.host().name, "amx+emulated"}


@pytest.mark.parametrize("level", sorted(LEVELS))
@pytest.mark.parametrize(
    "spec", [(0, 0), (40, 0), (400, 0, 20.0), (40, 5), (300, 270, 20.0)], ids=lambda spec: "-".join(map(str, spec))
)
@pytest.mark.parametrize(
    ("types", "dim"),
    [
        ((FLOAT32, INT8), 48),
        ((INT4, BFLOAT16), 48),
        ((INT8, INT4), 64),
        ((INT4, INT8), 6),
        ((INT3, INT2), 64),
        ((INT2, INT3), 96),
        ((FP8, FP8), 64),
        ((BFLOAT16, BFLOAT16), 80),
    ],
)
def test_attention_sequences_chunks_and_splits(
    types: tuple[KVDtype, KVDtype], dim: int, spec: tuple[Any, ...], level: str
) -> None:
    torch.manual_seed(4)
    kv_heads, group = 2, 3
    kv, tables = filled_cache(types, kv_heads, dim, 16, LENGTHS)
    if dim == 64:
        turned: dict[str, Any] = {"hadamard": True}
        if types[0] == INT8:
            turned = {"balance": balance(kv_heads, dim), "first": torch.randn(kv_heads, dim)}
        kv = KVLayer(replace(kv.k, mean=key_mean(kv_heads, dim, dim, max(LENGTHS)), **turned), kv.v)
    q = torch.randn(sum(NEW), kv_heads * group, dim) * 3
    starts = [0, *torch.tensor(NEW).cumsum(0).tolist()]
    impl = attention.implementation(isa.named(level))

    def attend(sequences: list[int], first: int = 0, count: int | None = None) -> Tensor:
        """New tokens first .. first + count of each sequence, computed as a step of its own."""
        taken = [NEW[b] - first if count is None else count for b in sequences]
        rows = torch.cat(
            [torch.arange(starts[b] + first, starts[b] + first + n) for b, n in zip(sequences, taken, strict=True)]
        )
        lens = [LENGTHS[b] - NEW[b] + first + n for b, n in zip(sequences, taken, strict=True)]
        batch = geometry([0, *torch.tensor(taken).cumsum(0).tolist()], lens, tables[sequences])
        return Tensor(impl(q[rows], kv.k, kv.v, batch, AttentionSpec(dim**-0.5, *spec)))

    together = attend(list(range(len(LENGTHS))))
    for num_threads in (2, 1, 5):
        threads.configure(num_threads)
        assert torch.equal(attend(list(range(len(LENGTHS)))), together)
        for b in range(len(LENGTHS)):
            assert torch.equal(attend([b]), together[starts[b] : starts[b + 1]])
    assert torch.equal(attend([4, 1]), torch.cat([together[starts[b] : starts[b + 1]] for b in (4, 1)]))
    for first, count in ((0, 1), (99, 1), (0, 37), (37, 50), (16, 84)):
        part = together[starts[4] + first : starts[4] + first + count]
        assert torch.equal(attend([4], first, count), part), (first, count)
