"""Section "build": compile every kernel variant, several at a time. CuPy keeps the compiled kernels."""

from __future__ import annotations

import os
import time
from concurrent.futures import ThreadPoolExecutor

from benchmarks.gpu.context import Context, Row
from lmkit.kernels.cuda import variants
from lmkit.kernels.cuda.module import Kernel


def run(context: Context) -> None:
    texts = {(kernel.source, *sorted(kernel.defines.items())): kernel for kernel in variants.common()}
    kernels = list(texts.values())  # one entry point of each text: its others are compiled with it
    workers = min(16, len(os.sched_getaffinity(0)))
    start = time.perf_counter()
    with ThreadPoolExecutor(workers) as pool:
        seconds = list(pool.map(lambda kernel: _build(context, kernel), kernels[: 2 if context.rehearsal else None]))
    slowest = max(seconds, default=0.0)
    context.row("all", variants=len(seconds), workers=workers, seconds=time.perf_counter() - start, slowest=slowest)


def _build(context: Context, kernel: Kernel) -> float:
    start = time.perf_counter()
    what: Row = {"source": kernel.source, "defines": kernel.defines}
    with context.attempt(kernel.name, **what):
        kernel.compile(context.device)
        context.row(kernel.name, **what, seconds=time.perf_counter() - start)
    return time.perf_counter() - start
