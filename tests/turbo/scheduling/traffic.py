"""Random traffic for a FakeEngine, and the invariants that must hold at all times and in the end."""

from __future__ import annotations

import itertools
import math
import random
from collections import Counter
from pathlib import Path
from typing import Any

import msgspec

from lmkit.errors import RequestError
from lmkit.models.kv_layout import KVClass
from lmkit.turbo.plan import StepPlan
from lmkit.turbo.request import FinishReason, Request
from lmkit.turbo.scheduling import policy
from lmkit.turbo.scheduling.limits import SchedulerLimits
from lmkit.turbo.sequence import Status
from tests.turbo.fakes import FakeEngine, FakeRunner, limits, prompt_logprob, request, solo
from tests.turbo.kv.fake_tiers import ChanceTiers

REFUSALS = {"context_length_exceeded", "invalid_request", "queue_full"}


def random_classes(rng: random.Random) -> tuple[KVClass, ...]:
    """Random classes of layers: all layers see everything, all have one window, or there are some of each."""
    window, sinks = rng.choice([1, 4, 16, 70]), rng.choice([0, 0, 1, 6])
    kind = rng.random()
    if kind < 0.4:
        return (KVClass(),)
    if kind < 0.6:
        return (KVClass(window, sinks),)
    if kind < 0.9:
        return KVClass(0, 0, rng.choice([1, 1, 2])), KVClass(window, sinks, rng.choice([1, 2, 3, 5]))
    return KVClass(), KVClass(window, sinks, 2), KVClass(window + 5, sinks, 1)


def random_limits(rng: random.Random, *, recurrent: bool = False) -> SchedulerLimits:
    classes = (KVClass(),) if recurrent else random_classes(rng)
    num_groups = sum(layers.num_groups for layers in classes)
    cache: dict[str, Any] = {"prefix_cache": rng.random() < 0.8, "session_lease": rng.choice([5.0, 200.0])}
    if recurrent:
        cache |= {"prefix_cache": True, "first_snapshot": 8, "num_snapshots": rng.choice([1, 2, 5, 30])}
    if cache["prefix_cache"]:
        cache["cache_quota"] = rng.choice([1.0, 1.0, 0.5])
    cache["classes"] = classes
    policies = {"max_overtakes": rng.choice([0, 2, 8]), "priority_seconds": rng.choice([0.0, 5.0, 50.0])}
    if rng.random() < 0.4:  # many sequences start and few can grow, so that preemptions follow each other
        return limits(num_blocks=24 * num_groups, block_size=1, max_batch_size=8, max_model_len=25, **cache, **policies)
    return limits(
        num_blocks=rng.choice([3, 8, 13, 21, 34]) * rng.choice([1, num_groups]),
        block_size=rng.choice([1, 1, 2, 3, 8]),
        max_batch_size=rng.choice([1, 3, 5, 8]),
        max_step_tokens=rng.choice([1, 3, 7, 16, 64]),
        max_model_len=rng.choice([10, 25, 60, 150]),
        max_queue=rng.choice([3, 1000]),
        request_timeout=rng.choice([None, None, None, 100.0]),
        **cache,
        **policies,
    )


def random_request(rng: random.Random, name: str, limits: SchedulerLimits, texts: list[list[int]]) -> Request:
    """A random request. `texts` holds earlier prompts with their answers. A good part of the prompts continues one of
    them."""
    longest = rng.choice([3, 3, 8, limits.max_model_len])
    prompt = [rng.randrange(limits.vocab_size) for _ in range(rng.randint(0, longest))]
    if texts and rng.random() < 0.6:
        known = rng.choice(texts[-20:])
        prompt = (known[: rng.choice([len(known), rng.randint(0, len(known))])] + prompt)[: limits.max_model_len]
    max_new = rng.choice([0, 1, rng.randint(1, 30), rng.randint(1, 30), rng.randint(8, 20), None])
    return request(
        name,
        prompt,
        max_tokens=max_new,
        min_tokens=rng.randint(0, min(8 if max_new is None else max_new, 8)),
        ignore_eos=rng.random() < 0.7,
        stop_token_ids=tuple(rng.sample(range(50), rng.choice([0, 0, 0, 1, 4]))),
        seed=rng.randrange(1 << 64),
        logprobs=rng.choice([None, 1]),
        prompt_logprobs=rng.random() < 0.2,
        logprobs_start=rng.choice([0, rng.randrange(max(len(prompt), 1))]),
        tenant=(tenant := rng.choice(["", "", "x", "y"])),
        weight={"y": 2.5}.get(tenant, 1.0),
        cache_salt=rng.choice(["", "", "y"]),
        session_id=rng.choice([None, None, "s", "t"]),
        priority=rng.choice([0, 0, 0, -1, 2]),
        timeout=rng.choice([None] * 9 + [rng.uniform(0.1, 60.0)]),
    )


class Traffic:
    """An engine under random arrivals, aborts (also in the middle of a step), failing steps, forced evictions and
    deadlines.

    With `folder` it has lower tiers, and these fail, too. `thorough`: check all bookkeeping at every step. `drafts`:
    next tokens are drafted, and some draft tokens are right. `recurrent`: the model has recurrent states. `ahead`: next
    turns are prepared.
    """

    def __init__(
        self,
        seed: int,
        depth: int = 1,
        *,
        disturb: bool = False,
        folder: Path | None = None,
        thorough: bool = True,
        drafts: bool = False,
        recurrent: bool = False,
        ahead: bool = False,
    ) -> None:
        self.ahead = ahead
        self.rng = random.Random(seed)
        self.limits = random_limits(self.rng, recurrent=recurrent)
        self.disturb, self.folder, self.thorough, self.drafts = disturb, folder, thorough, drafts
        self.tiers: ChanceTiers | None = None
        has_tiers = folder is not None and self.limits.kv.prefix_cache
        self.now = 0.0
        self.engine = FakeEngine(
            self.limits, depth=depth, tiers=self._tiers if has_tiers else None, clock=lambda: self.now
        )
        self.texts: list[list[int]] = []
        self.requests: dict[str, Request] = {}
        self.wanted: dict[str, tuple[list[int], FinishReason]] = {}
        self.refused: set[str] = set()
        self.disturbed: dict[str, str] = {}  # request -> "abort" or "error", if this may have ended it
        self.deadlines: dict[str, float] = {}  # of requests that have not ended
        self.bound = 0  # steps that suffice for all requests one after the other, a token at a time
        self.counts: Counter[str] = Counter()

    def _tiers(self, runner: FakeRunner) -> ChanceTiers:
        rng = random.Random(self.rng.random())
        num_host, num_disk = rng.choice([(0, 30), (3, 30), (20, 10), (60, 0)])
        num_host, num_disk = (self.limits.kv.num_groups * count for count in (num_host, num_disk))
        self.tiers = ChanceTiers(runner, rng, self.folder if num_disk else None, num_host, num_disk)
        return self.tiers

    # ---- events

    def arrive(self) -> None:
        """One request, or several with one prompt."""
        req = random_request(self.rng, f"r{len(self.requests)}", self.limits, self.texts)
        for _ in range(self.rng.choice([1] * 8 + [2, 4])):
            self.add(msgspec.structs.replace(req, request_id=f"r{len(self.requests)}", params=self._reseeded(req)))

    def prepare(self) -> None:
        """The beginning of a next turn: a text with its answer, or a part of it, and some tokens."""
        text = self.rng.choice(self.texts) if self.texts else []
        new = [self.rng.randrange(self.limits.vocab_size) for _ in range(self.rng.randint(1, 20))]
        ids = (text[: self.rng.randint(0, len(text))] + new)[: self.limits.max_model_len]
        owner = {"tenant": self.rng.choice(["", "x"]), "session_id": self.rng.choice([None, "turn:a", "turn:b", "s"])}
        name = f"a{self.counts['prepared']}"
        try:
            self.engine.scheduler.add(request(name, ids, max_tokens=0, is_ahead=True, **owner))
        except RequestError as error:
            self.refused.add(error.code)
            return
        self.counts["prepared"] += 1
        self.texts += [ids] * 3  # that it comes is likely
        self.bound += len(ids) * (2 + len(self.requests))  # each request may make it begin anew

    def _reseeded(self, req: Request) -> object:
        return msgspec.structs.replace(req.params, seed=self.rng.randrange(1 << 64))

    def add(self, req: Request) -> None:
        try:
            self.engine.add(req)
        except RequestError as error:
            self.refused.add(error.code)
            return
        name, timeout = req.request_id, req.timeout or self.limits.request_timeout
        self.requests[name] = req
        self.wanted[name] = solo(req, self.limits)
        self.deadlines[name] = self.now + timeout if timeout else math.inf
        answer = self.wanted[name][0]
        self.texts.append(req.prompt_ids + answer)
        self.bound += len(req.prompt_ids) + len(answer)

    def abort(self) -> None:
        name = self.rng.choice([*self.requests, "nobody"])
        outputs = self.engine.outputs.get(name)
        if name in self.requests and not (outputs and outputs[-1].finish_reason):
            self.disturbed[name] = "abort"
        self.engine.scheduler.abort(name)

    def evict(self) -> None:
        """Evict idle blocks: they may leave the cache at any moment."""
        for cache in self.engine.scheduler.kv.caches:
            if self.rng.random() < 0.3:
                cache.clear()
            else:
                cache.evict(self.rng.randint(1, 5))

    def step(self, disturb: bool) -> None:
        engine, scheduler = self.engine, self.engine.scheduler
        if self.drafts:
            self.propose()
        plan = engine.schedule()
        if self.thorough or self.rng.random() < 0.1:
            scheduler.check_integrity()
        if plan is not None:
            self.check_plan(plan)
        self.now += self.rng.choice([0.0, 0.5, 1.0, 1.5])
        if not engine.plans:
            self.collect()
            return
        if disturb and self.rng.random() < 0.1:
            self.abort()
        if plan is not None and len(engine.plans) < engine.depth:
            return
        if disturb and self.rng.random() < 0.02:
            self.fail()
        else:
            engine.land()

    def propose(self) -> None:
        for seq in self.engine.scheduler._slots.running.values():
            if not seq.request.is_ahead and not seq.num_pending and self.rng.random() < 0.7:
                drafts = self.wanted[seq.request_id][0][seq.num_outputs :][: self.rng.choice([1, 2, 5, 9])]
                seq.propose([token if self.rng.random() < 0.8 else self.rng.randrange(50) for token in drafts])

    def fail(self) -> None:
        """Let the oldest step raise before it has done anything, or after all is done."""
        engine, scheduler = self.engine, self.engine.scheduler
        oldest = engine.plans.popleft()
        for seq in scheduler._under_way[0].sequences:
            self.disturbed.setdefault(seq.request_id, "error")
        engine.num_steps += 1
        if self.rng.random() < 0.5:
            engine.runner.execute(oldest)
            engine.runner.failed.update(chunk.slot for chunk in oldest.chunks)
        else:
            engine.runner.fail(oldest)
        engine.collect(scheduler.fail(oldest, "injected"))

    def collect(self) -> None:
        self.engine.collect(self.engine.scheduler.take_outputs())

    def run(self, num_operations: int) -> None:
        for _ in range(num_operations):
            if self.ahead and self.rng.random() < 0.15:
                self.prepare()
            action = self.rng.random()
            if action < (0.05 if self.ahead else 0.3):
                self.arrive()
            elif self.disturb and action < 0.33:
                self.abort()
            elif self.disturb and action < 0.36:
                self.evict()
            elif self.disturb and action < 0.4 and self.tiers is not None:
                self.tiers.disturb()
            else:
                self.step(self.disturb)
        self.counts["operations"] += num_operations
        for count in itertools.count():
            if not self.engine.scheduler.has_work():
                break
            self.step(disturb=False)
            self.counts["operations"] += 1
            assert self.engine.num_steps <= 2 * self.bound + 10, "someone starves"
            assert count <= 20 * self.bound + 1000, "someone waits for ever"
        if self.tiers is not None:
            self.tiers.close()

    # ---- invariants

    def check_plan(self, plan: StepPlan) -> None:
        """The sequence with the first priority key advances, if no other tenant's prompt goes before it. A sequence is
        served if it decodes or budget is left, unless it waits for a block.

        Some blocks are still written to, by a load or by a step of a sequence that has ended. No sequence can get them.
        """
        scheduler = self.engine.scheduler
        running = [seq for seq in scheduler._slots.running.values() if seq.status is Status.RUNNING]
        served = {chunk.slot for chunk in plan.chunks}
        budget_left = self.limits.max_step_tokens - sum(chunk.num_tokens for chunk in plan.chunks)
        writing = any(seq.status is not Status.RUNNING for seq in scheduler._slots)
        first = min(running, key=policy.order, default=None)
        is_next = len({seq.request.tenant for seq in (*running, *scheduler._waiting)}) == 1
        for seq in running:
            assert seq.deadline > self.now, "its time was up before this step"
            waits = seq.slot not in served and seq.num_due > 0
            if waits and (budget_left or seq.num_uncomputed == 1 or (seq is first and is_next)):
                held = min(len(table.blocks) for table in seq.tables)
                assert held * self.limits.kv.block_size < seq.num_tokens + seq.num_pending
                is_passed_over = seq.num_uncomputed > 1 and not is_next
                assert seq is not first or writing or is_passed_over, "the first by priority key waits for a block"

    def check_results(self) -> None:
        self.engine.check_idle()
        assert self.refused <= REFUSALS
        for name in self.requests:
            self._check_request(name)
        stats = self.engine.scheduler.stats()
        quiet = not (self.ahead or self.disturb or self.drafts or stats.preemptions or self.counts["deadline"])
        if quiet and self.engine.depth == 1:
            computed = sum(
                len(req.prompt_ids) + max(len(self.wanted[name][0]) - 1, 0) - self.engine.outputs[name][0].cached_tokens
                for name, req in self.requests.items()
            )
            assert self.engine.runner.num_computed == computed, "cached_tokens are not those that were not computed"
            self.counts["exact"] += 1
        self.counts["preemptions"] += stats.preemptions
        self.counts["requests"] += len(self.requests)
        self.counts["hits"] += stats.prefix_hits
        self.counts.update({f"{name} ahead": count for name, count in stats.next_turns.items()})
        self.counts["loaded"] += sum(stats.tier_hits.values())

    def _check_request(self, name: str) -> None:
        req, (want, reason) = self.requests[name], self.wanted[name]
        outputs, tokens = self.engine.outputs[name], self.engine.tokens(name)
        assert [o.finish_reason is None for o in outputs] == [True] * (len(outputs) - 1) + [False]
        last = outputs[-1]
        if last.error_code == "deadline_exceeded":
            assert self.deadlines[name] <= self.now
            assert tokens == want[: len(tokens)]
            self.counts["deadline"] += 1
        elif last.finish_reason in ("abort", "error"):
            assert self.disturbed[name] == last.finish_reason
            assert tokens == want[: len(tokens)]
        else:
            assert (tokens, last.finish_reason) == (want, reason)
        assert last.stop_token == (tokens[-1] if last.finish_reason == "stop" else None)
        asked = req.params.logprobs is not None
        logprobs = [(x.token_id, x.logprob, x.top) for o in outputs for x in o.logprobs]
        assert logprobs == ([(t, -float(t), [(t, -float(t))]) for t in tokens] if asked else [])
        if (tokens or last.finish_reason == "length") and req.prompt_logprobs:
            ids = req.prompt_ids
            start = req.logprobs_start
            assert outputs[0].prompt_logprobs == [prompt_logprob(ids[:n]) for n in range(start + 2, len(ids) + 1)]
            assert outputs[0].cached_tokens <= start
        assert not any(o.prompt_logprobs or o.cached_tokens for o in outputs[1:])
