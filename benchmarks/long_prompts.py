"""Where a long prompt's time goes on a CPU: attention, other kernels and Python, and attention beside the peak.

    python -m benchmarks.long_prompts [--lengths 512,8192,32768] [--layers 2] [--kv-dtype int8] [--demo] [--json FILE]

A Llama in the shape of a 1B (benchmarks.random_llama), of which `--layers` suffice: shares do not depend on them.
`--demo` has that of the bundled model. Steps run op by op, so that each job is timed. An attention kernel's operations
are those of the scores and values that the prompt needs: masked ones, second halves of split numbers, and the last
layer, whose attention is that of one token, do not count.
The peaks are those of products in registers (benchmarks.loops), measured beside each prompt: of bfloat16 numbers by the
processor's best instruction, and of float32 numbers, which attention multiplies where there are no tile registers. With
one thread (LMKIT_NUM_THREADS=1) seconds are the processor's, so that other work on the machine counts less.
"""

from __future__ import annotations

import argparse
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any
from unittest import mock

from benchmarks.loops import Kind, loops
from benchmarks.random_llama import LLAMA_1B, Shape, make_checkpoint
from benchmarks.report import interleaved, machine, save, show
from lmkit.config import EngineConfig
from lmkit.environment import default_num_threads
from lmkit.kernels.cpu import isa, threads
from lmkit.kernels.cpu.jit import Task
from lmkit.turbo.engine.engine import Engine
from lmkit.turbo.request import Request, SamplingParams
from lmkit.turbo.runners.cpu_captured import CapturedSteps

Clock = Callable[[], float]
KINDS: tuple[Kind, ...] = ("bfloat16", "float")
DEMO = Shape(hidden=256, mlp=768, layers=8, heads=4, kv_heads=2, head_dim=64, vocab=4096)


@contextmanager
def timed_jobs(clock: Clock) -> Iterator[dict[str, float]]:
    """The seconds of all jobs meanwhile, by the module of their task. Steps are not captured."""
    seconds, run = defaultdict[str, float](float), threads.run

    def timed(task: Task, *args: Any, **options: Any) -> None:
        start = clock()
        run(task, *args, **options)
        seconds[task.function.__module__.removeprefix("lmkit.kernels.cpu.")] += clock() - start

    with mock.patch.object(threads, "run", timed), mock.patch.object(CapturedSteps, "__call__", return_value=None):
        yield seconds


def peaks(clock: Clock) -> dict[Kind, float]:
    """Operations per second of products of bfloat16 and of float32 numbers on all threads."""
    pieces = 2 * threads.num_threads()
    usable = {loop.name: loop for loop in loops() if "bfloat16" in loop.kinds}
    calls: dict[str, Callable[[], Any]] = {
        name: partial(threads.run, loop.task, pieces, loop.arguments, scratch=loop.scratch)
        for name, loop in usable.items()
    }
    best = interleaved(calls, seconds=0.5, rounds=200, pick=min, clock=clock)
    rates = {name: pieces * usable[name].operations / seconds for name, seconds in best.items()}
    return {kind: max(rates[name] for name in rates if kind in usable[name].kinds) for kind in KINDS}


def measure(engine: Engine, shape: Shape, length: int) -> dict[str, float]:
    """One prompt, which no cache knows."""
    clock = time.process_time if default_num_threads() == 1 else time.perf_counter
    before = peaks(clock)
    with timed_jobs(clock) as seconds:
        params = SamplingParams(max_tokens=1, ignore_eos=True)
        prompt = [2 + (i * i + length) % (shape.vocab - 2) for i in range(length)]
        engine.add(Request(request_id=f"prompt-{length}", prompt_ids=prompt, params=params))
        start = clock()
        while not any(output.finish_reason for output in engine.step()):
            pass
        whole = clock() - start
    attention = seconds["attention"]
    rate = 4 * (shape.layers - 1) * shape.heads * shape.head_dim * length * (length + 1) / 2 / attention
    best = {kind: max(before[kind], found) for kind, found in peaks(clock).items()}
    return {
        "tokens": length,
        "seconds": whole,
        "attention": attention,
        "other kernels": sum(seconds.values()) - attention,
        "the rest": whole - sum(seconds.values()),
        "us a token but for attention": 1e6 * (whole - attention) / length,
        "attention GFLOP/s": rate / 1e9,
        "of float32's peak": rate / best["float"],
        "of bfloat16's": rate / best["bfloat16"],
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--lengths", default="512,8192,32768", help="of the prompts")
    parser.add_argument("--layers", type=int, default=2)
    parser.add_argument("--kv-dtype", default="bfloat16")
    parser.add_argument("--demo", action="store_true", help="the shape of the bundled model")
    parser.add_argument("--json", type=Path, help="also write the figures here")
    given = parser.parse_args()
    if given.layers < 2:
        parser.error("--layers: the last layer computes one token alone, so take 2 or more")
    lengths = [int(n) for n in given.lengths.split(",")]
    shape = replace(DEMO if given.demo else LLAMA_1B, layers=given.layers, max_position=max(lengths) + 64)
    with TemporaryDirectory() as folder:
        make_checkpoint(Path(folder) / "model", shape)
        config = EngineConfig(kv_dtype=given.kv_dtype, kv_memory="4G", packed_cache=False, selftest="off")
        engine = Engine(str(Path(folder) / "model"), config)
        print(f"{machine()['cpu']}, {default_num_threads()} threads, {isa.describe()}")
        measure(engine, shape, 256)  # compiles and takes memory
        rows = [measure(engine, shape, length) for length in lengths]
        engine.close()
    show(rows)
    if given.json:
        save(given.json, "long_prompts", rows, isa=isa.host().name, kv=given.kv_dtype)


if __name__ == "__main__":
    main()
