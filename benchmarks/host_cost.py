"""What a decode step costs the host beside a GPU: planning, staging inputs, launching a graph, taking in tokens.

    python -m benchmarks.host_cost [--batch-size 1,16,64,256] [--seconds 2] [--json FILE]

The engine and its runner for GPUs are the real ones. Kernels and graphs do nothing, and tensors lie in host memory, so
a step takes only what Python does for it; a GPU hides this time as long as its own step is longer. Every sequence is
greedy, and sequences cross the blocks' boundaries at different steps. What it costs to encode a step's outputs for the
front end's process is a column of its own. Searches for garbage run as in an engine process.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import msgspec
import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor

from benchmarks.report import save
from lmkit.config import EngineConfig
from lmkit.formats.hub import DEMO_FOLDER
from lmkit.kernels.cuda import module
from lmkit.kernels.cuda.variants import Recorder
from lmkit.turbo.engine.engine import Engine
from lmkit.turbo.request import Request, SamplingParams
from lmkit.turbo.runners.cuda_device import CudaDevice
from lmkit.turbo.runners.device import Event
from lmkit.turbo.transport.deferred import quick_start
from lmkit.turbo.transport.messages import Outputs

MODEL_LEN = 4096  # tokens of the longest sequence


class NoKernels(Recorder):
    """A backend whose kernels do nothing but set tokens to 0."""

    def load(self, source: str, name: str, defines: dict[str, int]) -> module.Launch:
        return _launch


def _launch(grid: tuple[int, ...], block: tuple[int, ...], args: Sequence[Any], shared: int) -> None:
    for arg in args:
        if isinstance(arg, Tensor) and arg.dtype == torch.int64 and arg.dim() == 1:
            arg.zero_()


class _Event:
    def record(self) -> None: ...

    def synchronize(self) -> None: ...

    def elapsed_time(self, end_event: Any) -> float:
        return 1.0


class NoDevice(CudaDevice):
    """A GPU with kernels that do nothing. Its memory is the host's."""

    tensors = "cpu"
    self_test = ""

    def free_memory(self) -> int:
        return 4 << 30

    def staging(self, num_bytes: int) -> Tensor:
        return torch.empty(num_bytes, dtype=torch.uint8)

    def software(self) -> str:
        return "nothing"

    def event(self) -> Event:
        return _Event()

    def synchronize(self) -> None: ...

    def capture(self, launch: Callable[[], None]) -> Callable[[], None]:
        return lambda: None


@contextmanager
def decoding(batch_size: int) -> Iterator[Engine]:
    """An engine with so many sequences, all of which have their first token."""
    config = EngineConfig(
        device="cuda", num_threads=1, max_batch_size=batch_size, max_step_tokens=max(256, batch_size),
        max_model_len=MODEL_LEN, kv_memory="2G", selftest="off", packed_cache=False,
    )  # fmt: skip
    module.BACKENDS["cpu"] = NoKernels()
    try:
        engine = Engine(str(DEMO_FOLDER), config, device=NoDevice())
        for i in range(batch_size):
            params = SamplingParams(max_tokens=MODEL_LEN - 256, ignore_eos=True)
            engine.add(Request(request_id=f"request-{i}", prompt_ids=[5] * (3 + i % 61), params=params))
        waiting = batch_size
        while waiting:
            waiting -= sum(output.queue_seconds > 0 for output in engine.step())
        yield engine
        engine.close()
    finally:
        module.BACKENDS.pop("cpu")
        module.counters.cache_clear()


def measure(batch_size: int, seconds: float) -> dict[str, float]:
    """Times of a decode step of so many sequences, in milliseconds: the median, and the parts of the mean."""
    with decoding(batch_size) as engine:
        encode = msgspec.msgpack.Encoder().encode
        times, sending, before = list[float](), list[float](), engine.profile()
        end = time.perf_counter() + seconds
        while len(times) < MODEL_LEN - 512 and time.perf_counter() < end:
            start = time.perf_counter()
            outputs = engine.step()
            done = time.perf_counter()
            encode(Outputs(outputs))
            times.append(done - start)
            sending.append(time.perf_counter() - done)
        passed = engine.profile().since(before)
    return {
        "batch_size": batch_size,
        "ms": 1e3 * statistics.median(times),
        "least_ms": 1e3 * statistics.quantiles(times, n=20)[0],  # of a busy machine's steps, the undisturbed ones
        "mean_ms": 1e3 * statistics.mean(times),
        "schedule_ms": 1e3 * passed.schedule / len(times),
        "update_ms": 1e3 * passed.update / len(times),
        "encode_ms": 1e3 * statistics.median(sending),
    }


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.host_cost")
    parser.add_argument("--batch-size", default="1,16,64,256")
    parser.add_argument("--seconds", type=float, default=2.0)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    torch.set_num_threads(1)  # what is copied in the host's memory here, a GPU copies by itself
    with quick_start():
        pass  # the modules are loaded: searches for garbage leave them out from now on
    rows = [measure(int(size), options.seconds) for size in options.batch_size.split(",")]
    table = Table(*rows[0])
    for row in rows:
        table.add_row(str(row["batch_size"]), *(f"{value:.3f}" for name, value in row.items() if name != "batch_size"))
    Console(soft_wrap=True).print(table)
    if options.json is not None:
        save(options.json, "host_cost", rows)


if __name__ == "__main__":
    main()
