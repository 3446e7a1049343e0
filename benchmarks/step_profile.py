"""Where a decode step goes on a CPU: Python, and each kind of kernel.

    python -m benchmarks.step_profile MODEL [--batch 1,4,16] [--steps N] [--threads N] [--activations int8]

Steps take turns. In one the captured program is one launch, as in serving: what the step takes besides is Python, with
planning and sampling. In the next one each job of the program is a launch of its own and is timed. Figures are the best
of all steps, for each job its own, less the time of a launch without work. The jobs apart less the whole program is
what launches hide; with more threads it is less than 0 where they wait for each other. The head is the last product,
with the job before it that rounds its inputs.
"""

from __future__ import annotations

import argparse
import gc
import time
from collections import defaultdict
from pathlib import Path
from unittest import mock

import psutil
from rich.console import Console
from rich.table import Table

from benchmarks.peers.lmkit_gguf import GgufEngine
from benchmarks.peers.protocol import Options
from lmkit.kernels.cpu import isa, threads
from lmkit.kernels.cpu.jit import Task

PROMPT = 64
PYTHON, PROGRAM, HEAD = "Python", "whole program", "head"


class Watch:
    """Launches programs whole or apart, and keeps the best time of each job."""

    def __init__(self) -> None:
        self.apart = False
        self.program = 0.0  # seconds of the last launch
        self.jobs: dict[int, float] = {}  # seconds by place in the program
        self.tasks: list[int] = []  # the address of each job's task

    def launch(self, program: threads.Program) -> None:
        begin, self.tasks = time.perf_counter(), []
        for part in program.parts:
            if self.apart and isinstance(part, threads.Jobs):
                for task, job in part.apart():
                    start = time.perf_counter()
                    job()
                    seconds, place = time.perf_counter() - start, len(self.tasks)
                    self.jobs[place] = min(seconds, self.jobs.get(place, seconds))
                    self.tasks.append(task)
            else:
                part()
        self.program = time.perf_counter() - begin

    def kinds(self) -> dict[str, float]:
        """Seconds of each kind of kernel."""
        names = {kernel.address: task.name for task in _tasks() if (kernel := task.load()) is not None}
        kinds, products = [names[task] for task in self.tasks], list[int]()
        for place, kind in enumerate(kinds):
            if kind == "product":
                products.append(place)
        for place in products[-1:]:
            first = place - 1 if kinds[place - 1] == "quantize" else place
            kinds[first : place + 1] = [HEAD] * (place + 1 - first)
        idle, found = _idle(), defaultdict[str, float](float)
        for place, kind in enumerate(kinds):
            found[kind] += max(0.0, self.jobs[place] - idle)
        return dict(found)


def _tasks() -> list[Task]:
    return [each for each in gc.get_objects() if type(each) is Task]


def _idle() -> float:
    """Seconds of a launch of a job without work."""

    def nothing(args: int, scratch: int, index: int) -> None: ...

    task, best = Task(nothing), float("inf")
    for _ in range(100):
        start = time.perf_counter()
        threads.run(task, 1, (), parallel=threads.num_threads() > 1)
        best = min(best, time.perf_counter() - start)
    return best


def profile(engine: GgufEngine, batch: int, steps: int, vocab: int) -> dict[str, float]:
    """Seconds of a step by part."""
    watch, step, program = Watch(), float("inf"), float("inf")
    with mock.patch.object(threads.Program, "launch", lambda program: watch.launch(program)):
        engine.prefill([[(7 * i + 31 * n) % vocab for i in range(PROMPT)] for n in range(batch)])
        for turn in range(2 * steps):
            watch.apart = bool(turn % 2)
            start = time.perf_counter()
            engine.step()
            if not watch.apart and turn > 2:
                step, program = min(step, time.perf_counter() - start), min(program, watch.program)
    return {PYTHON: step - program, PROGRAM: program, **watch.kinds()}


def _cell(seconds: float, step: float) -> str:
    return f"{1e6 * seconds:.0f} ({seconds / step:.0%})"


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("model", type=Path)
    parser.add_argument("--batch", default="1,4,16")
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--threads", type=int, default=psutil.cpu_count() or 1)
    parser.add_argument("--activations", default="auto")
    given = parser.parse_args()
    batches = [int(number) for number in given.batch.split(",")]
    options = Options(given.model.resolve(), given.threads, max(batches), PROMPT + 2 * given.steps + 16, 0)
    engine = GgufEngine(options, activations=given.activations)
    found = {batch: profile(engine, batch, given.steps, 1000) for batch in batches}
    title = f"{given.model.name}, {given.threads} threads, {isa.describe()}"
    table = Table("microseconds a step", *(f"b{batch}" for batch in batches), title=title)
    for part in dict.fromkeys(part for each in found.values() for part in each):
        table.add_row(part, *(_cell(each.get(part, 0.0), each[PYTHON] + each[PROGRAM]) for each in found.values()))
    Console(width=120).print(table)


if __name__ == "__main__":
    main()
