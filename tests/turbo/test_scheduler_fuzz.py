"""Random traffic on tiny pools: results depend on the request alone, everybody ends once, nothing leaks or starves."""

from __future__ import annotations

import random
from collections.abc import Iterable, Iterator
from dataclasses import replace

import pytest

from lmkit.errors import RequestError
from lmkit.turbo.plan import StepPlan
from lmkit.turbo.policy import Order, fcfs
from lmkit.turbo.request import FinishReason, Request
from lmkit.turbo.scheduler import SchedulerLimits
from lmkit.turbo.sequence import Sequence
from tests.turbo.fakes import LIMITS, FakeEngine, prompt_logprob, request, solo

REFUSALS = {"context_length_exceeded", "invalid_request", "queue_full"}


def random_limits(rng: random.Random) -> SchedulerLimits:
    if rng.random() < 0.4:  # many sequences start and few can grow: preemption upon preemption
        return replace(LIMITS, num_blocks=24, block_size=1, max_batch_size=8, max_model_len=25)
    return replace(
        LIMITS,
        num_blocks=rng.choice([3, 8, 13, 21, 34]),
        block_size=rng.choice([1, 1, 2, 3, 8]),
        max_batch_size=rng.choice([1, 3, 5, 8]),
        max_step_tokens=rng.choice([1, 3, 7, 16, 64]),
        max_model_len=rng.choice([10, 25, 60]),
        max_queue=rng.choice([3, 1000]),
    )


def random_request(rng: random.Random, name: str, limits: SchedulerLimits) -> Request:
    longest = rng.choice([3, 3, 8, limits.max_model_len])
    max_new = rng.choice([0, 1, rng.randint(1, 30), rng.randint(1, 30), rng.randint(8, 20), None])
    return request(
        name,
        [rng.randrange(limits.vocab_size) for _ in range(rng.randint(0, longest))],
        max_new_tokens=max_new,
        min_new_tokens=rng.randint(0, min(8 if max_new is None else max_new, 8)),
        ignore_eos=rng.random() < 0.7,
        stop_token_ids=tuple(rng.sample(range(50), rng.choice([0, 0, 0, 1, 4]))),
        seed=rng.randrange(1 << 64),
        logprobs=rng.choice([None, 1]),
        prompt_logprobs=rng.random() < 0.3,
    )


def shuffled(rng: random.Random) -> Order:
    """No policy at all for the running ones: no promise about progress, but results must not care."""

    def order(running: Iterable[Sequence], waiting: Iterable[Sequence]) -> Iterator[Sequence]:
        yield from rng.sample(list(running), len(list(running)))
        yield from waiting

    return order


class Traffic:
    """An engine under random arrivals, aborts (also in the middle of a step) and failing steps."""

    def __init__(self, seed: int, fair: bool = True) -> None:
        self.rng = random.Random(seed)
        self.limits = random_limits(self.rng)
        self.engine = FakeEngine(self.limits, fcfs if fair else shuffled(self.rng))
        self.fair = fair
        self.requests: dict[str, Request] = {}
        self.wanted: dict[str, tuple[list[int], FinishReason]] = {}
        self.refused: set[str] = set()
        self.disturbed: dict[str, str] = {}  # request -> "abort" or "error", if that may have ended it
        self.bound = 0  # steps that are enough for all of them one after the other, a token at a time

    def arrive(self) -> None:
        req = random_request(self.rng, f"r{len(self.requests)}", self.limits)
        try:
            self.engine.add(req)
        except RequestError as error:
            self.refused.add(error.code)
            return
        self.requests[req.request_id] = req
        self.wanted[req.request_id] = solo(req, self.limits)
        self.bound += len(req.prompt_ids) + len(self.wanted[req.request_id][0])

    def abort(self) -> None:
        name = self.rng.choice([*self.requests, "nobody"])
        outputs = self.engine.outputs.get(name)
        if name in self.requests and not (outputs and outputs[-1].finish_reason):
            self.disturbed[name] = "abort"
        self.engine.scheduler.abort(name)

    def check_plan(self, plan: StepPlan) -> None:
        """The oldest advances; whoever decodes, or finds budget left, is served unless it waits for a block."""
        scheduler = self.engine.scheduler
        scheduler.check_integrity()
        running = list(scheduler._running.values())
        served = {chunk.slot for chunk in plan.chunks}
        if self.fair:
            oldest = min([*running, *scheduler._waiting.values()], key=lambda seq: seq.arrival)
            assert oldest.slot in served
        budget_left = self.limits.max_step_tokens - sum(chunk.num_tokens for chunk in plan.chunks)
        for seq in running:
            if seq.slot not in served and (budget_left or (self.fair and seq.num_uncomputed == 1)):
                assert len(seq.block_table) * self.limits.block_size < seq.num_tokens

    def step(self, disturb: bool) -> None:
        scheduler = self.engine.scheduler
        plan = scheduler.schedule()
        if plan is None:
            self.engine.collect(scheduler.take_outputs())
            return
        self.check_plan(plan)
        self.engine.num_steps += 1
        seated = {seq.slot: seq.request_id for seq in scheduler._running.values()}
        if disturb and self.rng.random() < 0.1:
            self.abort()
        if disturb and self.rng.random() < 0.02:
            for chunk in plan.chunks:
                self.disturbed.setdefault(seated[chunk.slot], "error")
            if self.rng.random() < 0.5:  # it broke at the end, or at the beginning
                self.engine.runner.execute(plan)
            self.engine.collect(scheduler.fail(plan, "injected"))
        else:
            self.engine.collect(scheduler.update(plan, self.engine.runner.execute(plan)))

    def run(self, num_operations: int, disturb: bool) -> None:
        for _ in range(num_operations):
            action = self.rng.random()
            if action < 0.3:
                self.arrive()
            elif disturb and action < 0.33:
                self.abort()
            else:
                self.step(disturb)
        while self.engine.scheduler.has_work():
            self.step(disturb=False)
            assert self.engine.num_steps <= self.bound * (1 if self.fair else 20), "someone starves"

    def check_results(self) -> None:
        self.engine.scheduler.check_integrity()
        assert self.engine.scheduler.stats().blocks_used == 0
        assert self.refused <= REFUSALS
        for name, req in self.requests.items():
            outputs, tokens = self.engine.outputs[name], self.engine.tokens(name)
            assert [o.finish_reason is None for o in outputs] == [True] * (len(outputs) - 1) + [False]
            want, reason = self.wanted[name]
            ended = outputs[-1].finish_reason
            if ended in ("abort", "error"):
                assert self.disturbed[name] == ended
                assert tokens == want[: len(tokens)]
            else:
                assert (tokens, ended) == (want, reason)
            assert outputs[-1].stop_token == (tokens[-1] if ended == "stop" else None)
            asked = req.params.logprobs is not None
            assert [x.token_id for o in outputs for x in o.logprobs] == (tokens if asked else [])
            if (tokens or ended == "length") and req.prompt_logprobs:
                ids = req.prompt_ids
                assert outputs[0].prompt_logprobs == [prompt_logprob(ids[:n]) for n in range(2, len(ids) + 1)]
            assert not any(o.prompt_logprobs for o in outputs[1:])


@pytest.mark.parametrize("disturb", [False, True])
@pytest.mark.parametrize("fair", [False, True])
@pytest.mark.parametrize("group", range(2))
def test_random_traffic(group: int, fair: bool, disturb: bool) -> None:
    preemptions = finished = 0
    for seed in range(30):
        traffic = Traffic(1000 * group + seed, fair)
        traffic.run(150, disturb)
        traffic.check_results()
        preemptions += traffic.engine.scheduler.stats().preemptions
        finished += len(traffic.requests)
    assert preemptions > 100, "the traffic no longer exercises preemption"
    assert finished > 400
