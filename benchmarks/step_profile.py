"""Where a decode step goes on a CPU: Python, and each kind of kernel.

    python -m benchmarks.step_profile MODEL [--batch 1,4,16] [--steps N] [--threads N] [--activations int8]

First steps launch their captured program as one, as in serving, and job by job in turns. A job has the median of its
times, less that of a launch without work. Then come steps as they are: what they take besides the program is Python,
with planning and sampling, and what the program takes besides its jobs are barriers and what caches hold less of. The
head is the last product, with the job before it that rounds its inputs. One thread is measured in time of the
processor, so that other work on the machine counts little; more threads in time of a clock.
"""

from __future__ import annotations

import argparse
import gc
import time
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path
from statistics import mean, median
from unittest import mock

import psutil
from rich.console import Console
from rich.table import Table

from benchmarks.peers.lmkit_gguf import GgufEngine
from benchmarks.peers.protocol import Options
from lmkit.kernels.cpu import isa, threads
from lmkit.kernels.cpu.jit import Task

PROMPT, TOKENS = 64, 1000
Clock = Callable[[], float]
PYTHON, BARRIERS, HEAD = "Python", "barriers and rest", "head"


class Watch:
    """Launches programs whole and apart in turns, and keeps the seconds of each whole program and of each job."""

    def __init__(self, clock: Clock) -> None:
        self.clock = clock
        self.apart = self.turns = False
        self.programs: list[float] = []
        self.jobs: dict[tuple[int, int], list[float]] = defaultdict(
            list
        )  # by (place in the program, its task's address)

    def launch(self, program: threads.Program) -> None:
        begin, place = self.clock(), 0
        self.apart = self.turns and not self.apart
        for part in program.parts:
            if self.apart and isinstance(part, threads.Jobs):
                for task, job in part.apart():
                    start = self.clock()
                    job()
                    self.jobs[place, task].append(self.clock() - start)
                    place += 1
            else:
                part()
        if not self.apart:
            self.programs.append(self.clock() - begin)

    def kinds(self) -> dict[str, float]:
        """Seconds of each kind of kernel."""
        names = {kernel.address: task.name for task in _tasks() if (kernel := task.load()) is not None}
        kinds = [names[task].removesuffix("_task").lstrip("_") for _, task in self.jobs]
        last = max(place for place, kind in enumerate(kinds) if kind == "product")
        first = last - 1 if kinds[last - 1] == "quantize" else last
        kinds[first : last + 1] = [HEAD] * (last + 1 - first)
        idle, found = _idle(self.clock), defaultdict[str, float](float)
        for kind, seconds in zip(kinds, self.jobs.values(), strict=True):
            found[kind] += max(0.0, median(seconds) - idle)
        return dict(found)


def _tasks() -> list[Task]:
    return [each for each in gc.get_objects() if type(each) is Task]


def _idle(clock: Clock) -> float:
    """Seconds of a launch of a job without work."""

    def nothing(args: int, scratch: int, index: int) -> None: ...

    task, found = Task(nothing), list[float]()
    for _ in range(100):
        start = clock()
        threads.run(task, 1, (), parallel=threads.num_threads() > 1)
        found.append(clock() - start)
    return median(found)


def profile(engine: GgufEngine, batch: int, steps: int, clock: Clock, of_step: Clock) -> dict[str, float]:
    """Seconds of a step by part."""
    watch = Watch(clock)
    with mock.patch.object(threads.Program, "launch", lambda program: watch.launch(program)):
        engine.prefill([[(7 * i + 31 * n) % TOKENS for i in range(PROMPT)] for n in range(batch)])
        watch.turns = True
        for _ in range(2 * steps):
            engine.step()
        watch.turns = False
        engine.step()
        watch.programs.clear()
        start = of_step()
        for _ in range(steps):
            engine.step()
        step = (of_step() - start) / steps
    kinds, program = watch.kinds(), mean(watch.programs)
    return {PYTHON: step - program, **kinds, BARRIERS: max(0.0, program - sum(kinds.values()))}


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
    options = Options(given.model.resolve(), given.threads, max(batches), PROMPT + 3 * given.steps + 16, 0)
    engine = GgufEngine(options, activations=given.activations)
    clocks = (time.thread_time, time.process_time) if given.threads == 1 else (time.perf_counter,) * 2
    found = {batch: profile(engine, batch, given.steps, *clocks) for batch in batches}
    title = f"{given.model.name}, {given.threads} threads, {isa.describe()}"
    table = Table("microseconds a step", *(f"b{batch}" for batch in batches), title=title)
    for part in dict.fromkeys(part for each in found.values() for part in each):
        table.add_row(part, *(_cell(each.get(part, 0.0), sum(each.values())) for each in found.values()))
    Console(width=120).print(table)


if __name__ == "__main__":
    main()
