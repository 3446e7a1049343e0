"""Measures the best plan for each product and number of tokens. gemm_table.py keeps the plans of this device.

The compared plans are compiled first, several at a time: one after the other would take minutes.
"""

from __future__ import annotations

import time
from collections.abc import Iterator

import torch

from benchmarks.gpu.context import Context
from benchmarks.gpu.models import random_qtensor
from lmkit.kernels.cuda import gemm, gemm_table, linear
from lmkit.kernels.cuda.gemm_pack import PackedWeight, pack
from lmkit.kernels.cuda.module import Kernel, compile_all

PLANS = 5  # number of the most promising plans that are compared for each product
QUICK_BUCKETS = (1, 16)


def tune(context: Context, shapes: dict[str, tuple[int, int]]) -> None:
    """Tune for float16. Other activations use the estimate."""
    buckets = QUICK_BUCKETS if context.quick or context.rehearsal else gemm_table.BUCKETS
    start = time.perf_counter()
    weights = [pack(random_qtensor(n, k, context.device)) for n, k in shapes.values()]
    kernels = {kernel for weight in weights for kernel in _kernels(weight, buckets)}
    compile_all(kernels, context.device)
    compiled = time.perf_counter() - start
    if not context.rehearsal:
        gemm_table.tune(weights, torch.float16, linear.library, buckets=buckets, num_plans=PLANS)
    context.row("tuning", kernels=len(kernels), compile_seconds=compiled, seconds=time.perf_counter() - start)


def _kernels(weight: PackedWeight, buckets: tuple[int, ...]) -> Iterator[Kernel]:
    for tokens in buckets:
        for plan in gemm_table.promising(tokens, weight, PLANS):
            yield from gemm.kernels_of(weight, plan, torch.float16, tokens)
