"""Drafts: whatever was drafted, a request gives the tokens that it gives without; accepted draft tokens save steps."""

from __future__ import annotations

import random
from typing import Any

import pytest

from lmkit.models.kv_layout import KVClass
from lmkit.turbo.plan import StepPlan
from lmkit.turbo.request import Request
from lmkit.turbo.scheduling.limits import SchedulerLimits
from lmkit.turbo.sequence import FAILED_TOKEN, Sequence
from tests.turbo.fakes import LIMITS, FakeEngine, limits, request, sampled, solo


class Drafting(FakeEngine):
    """Proposes up to `length` tokens for each sequence whose tokens are known, each right with a chance."""

    def __init__(self, limits: SchedulerLimits = LIMITS, length: int = 4, chance: float = 1.0, **options: Any) -> None:
        super().__init__(limits, **options)
        self.length, self.chance, self.rng = length, chance, random.Random(length)

    def schedule(self) -> StepPlan | None:
        for seq in self.scheduler._slots.running.values():
            if not seq.num_pending:
                seq.propose(self._drafts(seq))
        return super().schedule()

    def _drafts(self, seq: Sequence) -> list[int]:
        answer = solo(seq.request, self.scheduler.limits)[0][seq.num_outputs :][: self.length]
        beyond = [5] * (self.length - len(answer))  # its end is not known to who drafts
        return [token if self.rng.random() < self.chance else (token + 1) % 50 for token in answer] + beyond


def test_accepted_drafts_save_steps() -> None:
    req = request("a", 5, max_tokens=20, logprobs=1)
    engine = Drafting(length=4)
    engine.add(req)
    engine.run()
    want, _ = solo(req, LIMITS)
    assert engine.tokens("a") == want
    assert [len(output.token_ids) for output in engine.outputs["a"]] == [1, 5, 5, 5, 4]
    assert [entry.token_id for output in engine.outputs["a"] for entry in output.logprobs] == want
    assert engine.scheduler.stats().generation_tokens == 20


def test_what_is_after_a_rejected_draft_is_computed_again() -> None:
    req = request("a", 5, max_tokens=8)
    engine = Drafting(length=3, chance=0.0)
    engine.add(req)
    engine.run()
    assert engine.tokens("a") == solo(req, LIMITS)[0]
    assert all(len(output.token_ids) == 1 for output in engine.outputs["a"])


@pytest.mark.parametrize("ending", ["eos", "stop id", "length", "context"])
def test_a_sequence_ends_in_the_middle_of_a_right_draft(ending: str) -> None:
    """What the step computed after its end is in no cache: the next request finds what a step by step run leaves."""
    free, _ = solo(request("a", 5, max_tokens=30), LIMITS)
    params: dict[str, Any] = {
        "eos": {"ignore_eos": False, "max_tokens": None},
        "stop id": {"stop_token_ids": (free[6],), "max_tokens": 30},
        "length": {"max_tokens": 7},
        "context": {"max_tokens": None},
    }[ending]
    cached = limits(prefix_cache=True)
    found = []
    for engine in (Drafting(cached, length=9), FakeEngine(cached)):
        seeds = (request("a", 5, seed=seed, **params) for seed in range(1000))
        req = next(r for r in seeds if ending != "eos" or 3 < len(solo(r, cached)[0]) < 9)
        want, reason = solo(req, cached)
        engine.add(req)
        engine.run_until_idle()
        assert (engine.tokens("a"), engine.reason("a")) == (want, reason)
        follow_up = request("b", (req.prompt_ids + want + [7])[: cached.max_model_len - 1])
        engine.add(follow_up)
        engine.run()
        found.append(engine.outputs["b"][0].cached_tokens)
    assert found[0] == found[1] > 5


def test_unusable_logits_in_a_draft_keep_the_tokens_before() -> None:
    engine = Drafting(length=3)
    engine.add(request("a", 5, max_tokens=9))
    engine.step()
    first, *_ = engine.tokens("a")
    plan = engine.schedule()
    assert plan is not None
    assert plan.chunks[0].num_sampled == 4
    tokens = plan.chunks[0].draft[:2]
    outputs = engine.scheduler.update(plan, [sampled(*tokens, FAILED_TOKEN)])
    assert [(o.token_ids, o.finish_reason) for o in outputs] == [(tokens, None), ([], "error")]
    assert solo(request("a", 5, max_tokens=9), LIMITS)[0][:3] == [first, *tokens]


def test_drafts_take_no_token_from_those_that_decode() -> None:
    engine = Drafting(limits(max_step_tokens=5), length=9)
    engine.add(*(request(name, 1, max_tokens=9) for name in "abcd"))
    while engine.scheduler.has_work():
        plan = engine.step()
        running = {seq.slot for seq in engine.scheduler._slots.running.values()}
        if plan is not None and engine.num_steps > 2:
            assert {chunk.slot for chunk in plan.chunks} >= running
    assert all(engine.tokens(name) == solo(request(name, 1, max_tokens=9), LIMITS)[0] for name in "abcd")


@pytest.mark.parametrize("seed", range(30))
def test_random_drafts_change_no_token(seed: int) -> None:
    """Small pools, so that sequences are preempted; windows, blocks of all sizes, steps that overlap."""
    rng = random.Random(seed)
    classes = (KVClass(rng.choice([4, 16]), rng.choice([0, 6])) if rng.random() < 0.3 else KVClass(),)
    some = limits(
        num_blocks=rng.choice([40, 60]), block_size=rng.choice([1, 2, 3]), max_batch_size=rng.choice([1, 3, 5]),
        max_step_tokens=rng.choice([5, 16, 64]), max_model_len=40, prefix_cache=rng.random() < 0.7,
        classes=classes,
    )  # fmt: skip
    engine = Drafting(some, length=rng.choice([1, 3, 8]), chance=rng.choice([0.0, 0.5, 0.9, 1.0]), depth=1 + seed % 2)
    requests: list[Request] = [
        request(
            str(i), rng.randint(1, 12), max_tokens=rng.choice([0, 1, 5, 20, None]), seed=rng.randrange(9),
            ignore_eos=rng.random() < 0.7, prompt_logprobs=rng.random() < 0.2, min_tokens=0,
        )
        for i in range(12)
    ]  # fmt: skip
    engine.add(*requests)
    while engine.scheduler.has_work():
        engine.step()
        engine.scheduler.check_integrity()
    engine.check_idle()
    for req in requests:
        assert (engine.tokens(req.request_id), engine.reason(req.request_id)) == solo(req, some), req
