"""Measures what the steps of an engine take: prompts alone, prompts beside decoding, and decoding of several sizes.

The steps are carried out as the engine does, one while the next is planned. A step's time is that from the end of the
step before it, so it contains what the engine cannot hide behind the computation. A few steps are one measurement:
when a result is taken in late, the time of the next step looks as much shorter.
"""

from __future__ import annotations

import itertools
import time
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from lmkit.advise.costs import CostFile, TypeCosts, Work, fit, work_of
from lmkit.bench.config import Progress
from lmkit.bench.schema import environment
from lmkit.config import EngineConfig
from lmkit.formats.hub import resolve_model_path
from lmkit.turbo.engine.engine import Engine
from lmkit.turbo.plan import StepPlan
from lmkit.turbo.request import Request, SamplingParams
from lmkit.turbo.runners.runner import Ticket
from lmkit.turbo.scheduling.limits import SchedulerLimits

OUTPUT_LEN = 16
PROMPTS = (16, 128, 512, 2048)  # tokens
BATCHES = (1, 4, 16, 64, 256)
CONTEXTS = (16, 256, 1024)
FEWEST = 6  # loads that are measured however long they take
GROUP = 4  # steps that are one measurement
ROUNDS = 3  # that are measured


@dataclass(frozen=True)
class _Load:
    """Requests that come together."""

    batch_size: int
    input_len: int
    output_len: int

    def __str__(self) -> str:
        return f"{self.batch_size} x {self.input_len} + {self.output_len}"

    @property
    def num_tokens(self) -> int:
        return self.batch_size * (self.input_len + self.output_len)

    def fits(self, limits: SchedulerLimits) -> bool:
        length = self.input_len + self.output_len
        blocks = self.batch_size * (limits.kv.blocks_for(length) + limits.kv.num_groups)
        return (
            self.batch_size <= limits.max_batch_size
            and length <= limits.max_model_len
            and blocks <= limits.kv.num_blocks
        )


def measure_all(
    model: str,
    configs: Mapping[str, EngineConfig],
    options: dict[str, str],
    *,
    seconds: float,
    seed: int = 0,
    progress: Progress = lambda what, done, total: None,
) -> CostFile:
    """The costs of the checkpoint `model` with each of `configs`, by the type of KV, one engine after the other.

    `options` are those of `lmkit serve` that all of them have. The loads of an engine come from small to large until
    `seconds` have passed; its start does not count.
    """
    path = str(resolve_model_path(model))
    types, largest = dict[str, TypeCosts](), list[int]()
    for kv_dtype, config in configs.items():
        engine = Engine(path, config)
        try:
            types[kv_dtype], batch = _measured(engine, seconds, seed, progress)
        finally:
            engine.close()
        largest.append(batch)
    return CostFile(model=model, environment=environment(), options=options, largest_batch=min(largest), types=types)


def _measured(engine: Engine, seconds: float, seed: int, progress: Progress) -> tuple[TypeCosts, int]:
    """One round compiles and captures, and finds the loads that leave time for measured rounds."""
    limits, rng = engine.scheduler.limits, np.random.default_rng(seed)
    loads, fitting = list[_Load](), [load for load in _loads() if load.fits(limits)]
    start = time.perf_counter()
    for done, load in enumerate(fitting):
        progress("steps", done, (1 + ROUNDS) * len(fitting))
        if done >= FEWEST and time.perf_counter() - start > seconds / (1 + ROUNDS):
            break
        list(_run(engine, load, rng))
        loads.append(load)
    works, times, count = list[Work](), list[float](), 0
    for done, load in enumerate(loads * ROUNDS):  # load by load: the machine's speed changes meanwhile
        progress("steps", len(loads) + done, (1 + ROUNDS) * len(loads))
        steps = list(_run(engine, load, rng))
        count += len(steps)
        for group in _groups(steps):
            works.append(Work(*map(sum, zip(*(work for work, _ in group), strict=True))))
            times.append(sum(taken for _, taken in group))
    progress("steps", 1, 1)
    costs, error = fit(works, times)
    found = TypeCosts(costs=costs, error=error, num_steps=count, limits=limits)
    return found, max(load.batch_size for load in loads)


def _groups(steps: list[tuple[Work, float]]) -> list[list[tuple[Work, float]]]:
    """GROUP steps each; the last has the rest as well."""
    ends = [*range(GROUP, len(steps) - GROUP + 1, GROUP), len(steps)]
    return [steps[start:end] for start, end in zip([0, *ends], ends, strict=False)]


def _loads() -> Sequence[_Load]:
    alone = [_Load(1, length, 1) for length in PROMPTS]
    beside = [_Load(*sizes, OUTPUT_LEN) for sizes in itertools.product(BATCHES, CONTEXTS)]
    return sorted(alone + beside, key=lambda load: load.num_tokens)


def _run(engine: Engine, load: _Load, rng: np.random.Generator) -> Iterator[tuple[Work, float]]:
    """Each step of a load, and its seconds. Its prompts share nothing with any other."""
    scheduler, runner = engine.scheduler, engine.runner
    params = SamplingParams(max_tokens=load.output_len, ignore_eos=True)
    for i in range(load.batch_size):
        prompt = rng.integers(scheduler.limits.vocab_size, size=load.input_len).tolist()
        engine.add(Request(request_id=str(i), prompt_ids=prompt, params=params))
    under_way: deque[tuple[StepPlan, Ticket]] = deque()
    depth, before = 2 if scheduler.limits.overlaps else 1, time.perf_counter()
    while scheduler.has_work():
        plan = scheduler.schedule()
        if plan is not None:
            under_way.append((plan, runner.launch(plan)))
        if under_way and (plan is None or len(under_way) >= depth):
            done, ticket = under_way.popleft()
            result = runner.collect(ticket)
            now = time.perf_counter()
            scheduler.update(done, result.sampled, result.seconds)
            yield work_of(done), now - before
            before = now
        elif plan is None:
            scheduler.take_outputs()
