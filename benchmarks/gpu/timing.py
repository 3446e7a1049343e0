"""Seconds of a call on a GPU. Many calls run in one CUDA graph, so that launches from Python are not timed."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch

Call = Callable[[], Any]
CACHE_BYTES = 256 << 20  # several times an L2; buffers that are used in turn and exceed this are read from memory


def copies_for(num_bytes: int, device: str) -> int:
    """The number of copies of a buffer to use in turn, so that none is in the cache when its turn comes."""
    return 2 if device == "cpu" else max(2, -(-CACHE_BYTES // max(1, num_bytes)))


def seconds_of(calls: Sequence[Call], device: str, *, budget: float = 0.15) -> float:
    """Seconds of one of `calls`. The calls are made in turn. The median is over replays that take about `budget`
    seconds in all."""
    for call in calls[:2]:
        call()
    if device == "cpu":
        return min(_host_seconds(call) for call in calls)
    launch = _captured(calls)
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    samples: list[float] = []
    while len(samples) < 3 or (sum(samples) < budget and len(samples) < 50):
        start.record()
        launch()
        end.record()
        end.synchronize()
        samples.append(start.elapsed_time(end) / 1e3)
    return statistics.median(samples[1:]) / len(calls)


def host_seconds_of(call: Call, *, repeats: int = 3) -> float:
    """Seconds of a call that ends with the host waiting."""
    return statistics.median(_host_seconds(call) for _ in range(repeats))


def synchronize(device: str) -> None:
    if device != "cpu":
        torch.cuda.synchronize()


def _host_seconds(call: Call) -> float:
    start = time.perf_counter()
    call()
    return time.perf_counter() - start


def _captured(calls: Sequence[Call]) -> Call:
    """The calls as one CUDA graph, warmed up."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for call in calls:
            call()
    torch.cuda.current_stream().wait_stream(stream)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, capture_error_mode="thread_local"):
        for call in calls:
            call()
    graph.replay()
    torch.cuda.synchronize()
    return graph.replay
