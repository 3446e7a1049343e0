"""Section "gemm": products of 4-bit weights of Llama-3-8B's shapes, groups of 128, beside bfloat16 and other kernels.

Several weights are used in turn, and together they are larger than a cache. Calls are captured in a CUDA graph.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

import lmkit.kernels  # noqa: F401  (registers)
from benchmarks.gpu import peers
from benchmarks.gpu.context import Context
from benchmarks.gpu.models import random_qtensor
from benchmarks.gpu.roofline import LLAMA_3_8B
from benchmarks.gpu.timing import copies_for, seconds_of
from benchmarks.gpu.tuning import tune
from lmkit.kernels import ops
from lmkit.kernels.registry import Op

ROWS = (1, 2, 4, 8, 16, 32, 64, 128, 256, 1024, 4096)
QUICK_ROWS = (1, 16, 256)
CALLS = 24  # in a graph, at most


@dataclass(frozen=True)
class Candidate:
    """A way to multiply. `make()` returns f with y = f(x), over a weight of its own."""

    name: str
    dtype: torch.dtype
    weight_bytes: int
    make: Callable[[], Callable[[Tensor], Any]]


def run(context: Context) -> None:
    shapes = {"qkv": (64, 128)} if context.rehearsal else LLAMA_3_8B.products()
    rows = (1, 9) if context.rehearsal else QUICK_ROWS if context.quick else ROWS
    with context.attempt("tuning"):
        tune(context, shapes)
    for title, (n, k) in shapes.items():
        for candidate in candidates(context, n, k):
            if context.is_over:
                context.row(candidate.name, shape=title, error="no time left")
                continue
            with context.attempt(candidate.name, shape=title):
                _measure(context, candidate, title, n, k, rows)


def _measure(context: Context, candidate: Candidate, title: str, n: int, k: int, rows: tuple[int, ...]) -> None:
    copies = min(CALLS, copies_for(candidate.weight_bytes, context.device))
    products = [candidate.make() for _ in range(copies)]
    peak = context.peak()
    for m in rows:
        x = torch.randn(m, k, device=context.device).to(candidate.dtype)
        calls = [_call(product, x) for product in itertools.islice(itertools.cycle(products), max(copies, 4))]
        seconds = seconds_of(calls, context.device)
        num_bytes = candidate.weight_bytes + 2 * m * (n + k)
        bound = peak.seconds(num_bytes, 2 * m * n * k)
        share = context.share(bound, seconds, f"{candidate.name}, {title}, M={m}")
        context.row(
            candidate.name, shape=title, n=n, k=k, m=m, seconds=seconds, bound=bound, share=share,
            bytes_per_s=num_bytes / seconds, of_bandwidth=num_bytes / seconds / peak.bytes_per_s,
            flops=2 * m * n * k / seconds,
        )  # fmt: skip


def _call(product: Callable[[Tensor], Any], x: Tensor) -> Callable[[], Any]:
    return lambda: product(x)


def candidates(context: Context, n: int, k: int) -> Iterator[Candidate]:
    four_bits = n * k // 2 + n * k // 128 * 5 // 2  # each group has a scale of 2 bytes and a zero of half a byte
    traits: dict[str, Any] = {"out_features": n, "in_features": k, "group_size": 128, "bits": 4}

    def ours(op: Op = ops.linear_w4a16) -> Callable[[Tensor], Any]:
        impl = op.select("cuda", **traits)
        packed = impl.pack(random_qtensor(n, k, context.device))
        return lambda x: impl(x, packed, None)

    def dense(dtype: torch.dtype) -> Callable[[], Callable[[Tensor], Any]]:
        def make() -> Callable[[Tensor], Any]:
            weight = torch.randn(n, k, device=context.device).to(dtype)
            return lambda x: torch.nn.functional.linear(x, weight)

        return make

    name = ops.linear_w4a16.select("cuda", **traits).name
    yield Candidate(f"lmkit {name} float16", torch.float16, four_bits, ours)
    yield Candidate(f"lmkit {name} bfloat16", torch.bfloat16, four_bits, ours)
    yield Candidate("cuBLAS bfloat16", torch.bfloat16, 2 * n * k, dense(torch.bfloat16))
    for peer in peers.gemms(context, n, k):
        yield Candidate(peer.name, peer.dtype, four_bits, peer.make)
    yield Candidate("int8 inputs", torch.float16, four_bits, partial(ours, ops.linear_w4a8))
