"""Random traffic on tiny pools: results depend on the request alone, everybody ends once, nothing leaks or starves."""

from __future__ import annotations

import random

import pytest

from lmkit.errors import RequestError
from lmkit.turbo import policy
from lmkit.turbo.limits import SchedulerLimits
from lmkit.turbo.plan import StepPlan
from lmkit.turbo.request import FinishReason, Request
from tests.turbo.fakes import FakeEngine, limits, prompt_logprob, request, solo

REFUSALS = {"context_length_exceeded", "invalid_request", "queue_full"}


def random_limits(rng: random.Random) -> SchedulerLimits:
    cache = {"prefix_cache": rng.random() < 0.8, "session_lease": rng.choice([5.0, 200.0])}
    if cache["prefix_cache"]:
        cache["cache_quota"] = rng.choice([1.0, 1.0, 0.5])
    if rng.random() < 0.3:
        cache |= {"window": rng.choice([1, 4, 16, 70]), "sinks": rng.choice([0, 0, 1, 6])}
    policies = {"max_overtakes": rng.choice([0, 2, 8]), "priority_seconds": rng.choice([0.0, 5.0, 50.0])}
    if rng.random() < 0.4:  # many sequences start and few can grow: preemption upon preemption
        return limits(num_blocks=24, block_size=1, max_batch_size=8, max_model_len=25, **cache, **policies)
    return limits(
        num_blocks=rng.choice([3, 8, 13, 21, 34]),
        block_size=rng.choice([1, 1, 2, 3, 8]),
        max_batch_size=rng.choice([1, 3, 5, 8]),
        max_step_tokens=rng.choice([1, 3, 7, 16, 64]),
        max_model_len=rng.choice([10, 25, 60, 150]),
        max_queue=rng.choice([3, 1000]),
        **cache,
        **policies,
    )


def random_request(rng: random.Random, name: str, limits: SchedulerLimits, texts: list[list[int]]) -> Request:
    """`texts`: what was asked and answered before; a good part of the prompts goes on with one of them."""
    longest = rng.choice([3, 3, 8, limits.max_model_len])
    prompt = [rng.randrange(limits.vocab_size) for _ in range(rng.randint(0, longest))]
    if texts and rng.random() < 0.6:
        known = rng.choice(texts[-20:])
        prompt = (known[: rng.choice([len(known), rng.randint(0, len(known))])] + prompt)[: limits.max_model_len]
    max_new = rng.choice([0, 1, rng.randint(1, 30), rng.randint(1, 30), rng.randint(8, 20), None])
    return request(
        name,
        prompt,
        max_new_tokens=max_new,
        min_new_tokens=rng.randint(0, min(8 if max_new is None else max_new, 8)),
        ignore_eos=rng.random() < 0.7,
        stop_token_ids=tuple(rng.sample(range(50), rng.choice([0, 0, 0, 1, 4]))),
        seed=rng.randrange(1 << 64),
        logprobs=rng.choice([None, 1]),
        prompt_logprobs=rng.random() < 0.2,
        tenant=rng.choice(["", "", "x"]),
        cache_salt=rng.choice(["", "", "y"]),
        session_id=rng.choice([None, None, "s", "t"]),
        priority=rng.choice([0, 0, 0, -1, 2]),
    )


class Traffic:
    """An engine under random arrivals, aborts (also in the middle of a step) and failing steps."""

    def __init__(self, seed: int, depth: int = 1) -> None:
        self.rng = random.Random(seed)
        self.limits = random_limits(self.rng)
        self.engine = FakeEngine(self.limits, depth=depth)
        self.texts: list[list[int]] = []
        self.requests: dict[str, Request] = {}
        self.wanted: dict[str, tuple[list[int], FinishReason]] = {}
        self.refused: set[str] = set()
        self.disturbed: dict[str, str] = {}  # request -> "abort" or "error", if that may have ended it
        self.bound = 0  # steps that are enough for all of them one after the other, a token at a time

    def arrive(self) -> None:
        req = random_request(self.rng, f"r{len(self.requests)}", self.limits, self.texts)
        try:
            self.engine.add(req)
        except RequestError as error:
            self.refused.add(error.code)
            return
        self.requests[req.request_id] = req
        self.wanted[req.request_id] = solo(req, self.limits)
        answer = self.wanted[req.request_id][0]
        self.texts.append(req.prompt_ids + answer)
        self.bound += len(req.prompt_ids) + len(answer)

    def abort(self) -> None:
        name = self.rng.choice([*self.requests, "nobody"])
        outputs = self.engine.outputs.get(name)
        if name in self.requests and not (outputs and outputs[-1].finish_reason):
            self.disturbed[name] = "abort"
        self.engine.scheduler.abort(name)

    def check_plan(self, plan: StepPlan) -> None:
        """The first by rank advances; whoever decodes, or finds budget left, is served unless it waits for a block."""
        scheduler = self.engine.scheduler
        scheduler.check_integrity()
        running = list(scheduler._seats.running.values())
        served = {chunk.slot for chunk in plan.chunks}
        budget_left = self.limits.max_step_tokens - sum(chunk.num_tokens for chunk in plan.chunks)
        first = min(running, key=policy.order, default=None)
        for seq in running:
            waits = seq.slot not in served and seq.is_due
            if waits and (budget_left or seq.num_uncomputed == 1 or seq is first):
                assert len(seq.block_table) * self.limits.kv.block_size < seq.num_tokens + seq.num_pending
                assert seq is not first, "the first by rank waits for a block"

    def step(self, disturb: bool) -> None:
        engine, scheduler = self.engine, self.engine.scheduler
        plan = engine.schedule()
        if plan is not None:
            self.check_plan(plan)
        if not engine.plans:
            engine.collect(scheduler.take_outputs())
            return
        if disturb and self.rng.random() < 0.1:
            self.abort()
        if plan is not None and len(engine.plans) < engine.depth:
            return
        if disturb and self.rng.random() < 0.02:
            oldest = engine.plans.popleft()
            for seq in scheduler._under_way[0].sequences:
                self.disturbed.setdefault(seq.request_id, "error")
            engine.num_steps += 1
            engine.runner.fail(oldest)
            engine.collect(scheduler.fail(oldest, "injected"))
        else:
            engine.land()

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
            assert self.engine.num_steps <= 2 * self.bound + 10, "someone starves"

    def check_results(self) -> None:
        self.engine.check_idle()
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
@pytest.mark.parametrize("depth", [1, 2])
@pytest.mark.parametrize("group", range(2))
def test_random_traffic(group: int, depth: int, disturb: bool) -> None:
    preemptions = finished = 0
    for seed in range(30):
        traffic = Traffic(1000 * group + seed, depth)
        traffic.run(150, disturb)
        traffic.check_results()
        preemptions += traffic.engine.scheduler.stats().preemptions
        finished += len(traffic.requests)
    assert preemptions > 100, "the traffic no longer exercises preemption"
    assert finished > 400
