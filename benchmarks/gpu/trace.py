"""Where the time of a step goes: microseconds of each kernel in one step of an engine, as rows.

On a GPU torch's profiler gives them, also from steps that are replayed from a graph. A rehearsal only has the names.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any

import torch

from benchmarks.gpu.context import Context
from lmkit.kernels.cuda import module

STEPS = 8


def trace(context: Context, what: str, step: Callable[[], Any]) -> None:
    """Write a row for each kernel of `step`, those with most time first, and one for all of them."""
    step()
    if context.rehearsal:
        backend: Any = module.BACKENDS["cpu"]
        before = len(backend.launches)
        step()
        times = [(name, float(count), 0.0) for name, count in Counter(backend.launches[before:]).most_common()]
    else:
        times = _times(step)
    for kernel, count, microseconds in times:
        context.row(f"{what}: kernel", kernel_name=kernel, count=count, microseconds=microseconds)
    launches, total = sum(count for _, count, _ in times), sum(time for *_, time in times)
    context.row(f"{what}: kernels of a step", count=launches, microseconds=total)


def _times(step: Callable[[], Any]) -> list[tuple[str, float, float]]:
    """(kernel, launches, microseconds) of a step, on average."""
    activities = [torch.profiler.ProfilerActivity.CUDA]
    with torch.profiler.profile(activities=activities) as profiler:
        for _ in range(STEPS):
            step()
        torch.cuda.synchronize()
    events = [event for event in profiler.key_averages() if event.device_time_total > 0]
    found = [(event.key[:80], event.count / STEPS, event.device_time_total / STEPS) for event in events]
    return sorted(found, key=lambda row: -row[2])
