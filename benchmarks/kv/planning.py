"""The time that the scheduler takes: admissions on one core, and the share of a step with many sequences.

The scheduler is the real one. Nothing is computed for its own times. The demo model's step is measured beside it: a
step of any larger model takes longer.
"""

from __future__ import annotations

import gc
import random
import statistics
import time

from benchmarks.kv.common import Row, Setting, random_tokens
from lmkit.config import EngineConfig
from lmkit.formats.hub import DEMO_FOLDER
from lmkit.turbo.engine.engine import Engine
from lmkit.turbo.kv.manager import KVLimits
from lmkit.turbo.plan import Sampled, SampledToken
from lmkit.turbo.request import Request, SamplingParams
from lmkit.turbo.scheduling.limits import SchedulerLimits
from lmkit.turbo.scheduling.scheduler import Scheduler

WAITING, RUNNING, PROMPT, STEPS = 1024, 256, 16, 100
VOCAB, BLOCK_SIZE = 8192, 32
LEAST_ADMISSIONS, MOST_SHARE = 5000, 0.05  # a second; of a step
ONE, NONE = Sampled([SampledToken(5)]), Sampled()
GENERATOR = random.Random(0)


def cases(setting: Setting) -> list[Row]:
    running = 16 if setting.quick else RUNNING
    rates = [admissions_per_second(WAITING, running) for _ in range(3)]
    planning, step = planning_seconds(WAITING, running), demo_step_seconds(running)
    return [
        Row("admissions, at least 5,000 a second", max(rates) / LEAST_ADMISSIONS, 1.0, {"all": rates}),
        Row(
            f"planning with {WAITING} waiting and {running} running sequences, at most 5 % of the demo's step",
            MOST_SHARE * step / planning, 1.0, {"ms_planning": 1e3 * planning, "ms_step": 1e3 * step},
        ),
    ]  # fmt: skip


def admissions_per_second(num_requests: int, num_seats: int) -> float:
    """The requests that are planned and ended in a second, if each is a prompt of a few tokens and one new token."""
    scheduler = make_scheduler(num_seats)
    for i in range(num_requests):
        scheduler.add(request(f"r{i}", 1))
    seconds, ended = 0.0, 0
    while ended < num_requests:
        begin = time.perf_counter()
        ended += _step(scheduler)
        seconds += time.perf_counter() - begin
    return num_requests / seconds


def planning_seconds(num_waiting: int, num_running: int, steps: int = STEPS) -> float:
    """The median time to plan a step in which all seats are taken, and to take in its results."""
    scheduler = make_scheduler(num_running)
    for i in range(num_running):
        scheduler.add(request(f"r{i}", 2 * steps + 20))
    while scheduler.stats().num_running < num_running:
        _step(scheduler)
    for i in range(num_waiting):
        scheduler.add(request(f"w{i}", 1))
    gc.freeze()  # as the engine's process does when it is ready
    times = []
    for _ in range(steps):
        begin = time.perf_counter()
        _step(scheduler)
        times.append(time.perf_counter() - begin)
    return statistics.median(times)


def demo_step_seconds(num_running: int, steps: int = 30) -> float:
    """The median time of a step of the demo model in which so many sequences decode."""
    engine = Engine(str(DEMO_FOLDER), EngineConfig(max_batch_size=num_running, max_queue=num_running))
    for i in range(num_running):
        engine.add(request(f"r{i}", 2 * steps))
    times = []
    while engine.has_work():
        before = engine.profile().execute
        engine.step()
        if engine.stats().num_running == num_running:
            times.append(engine.profile().execute - before)
    engine.close()
    return statistics.median(times)


def make_scheduler(num_seats: int) -> Scheduler:
    return Scheduler(
        SchedulerLimits(
            kv=KVLimits(32 * num_seats, BLOCK_SIZE), max_batch_size=num_seats, max_step_tokens=4096, max_model_len=1024,
            max_queue=2 * WAITING, vocab_size=VOCAB,
        ),
        (),
    )  # fmt: skip


def request(name: str, num_new: int) -> Request:
    params = SamplingParams(max_tokens=num_new, ignore_eos=True, seed=0)
    return Request(request_id=name, prompt_ids=random_tokens(GENERATOR, PROMPT, 4096), params=params)


def _step(scheduler: Scheduler) -> int:
    """Plan a step and take in results for it. Returns the number of its outputs."""
    plan = scheduler.schedule()
    assert plan is not None
    return len(scheduler.update(plan, [ONE if chunk.num_sampled else NONE for chunk in plan.chunks], 0.02))
