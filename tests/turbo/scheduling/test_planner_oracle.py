"""The planner's admissions against the same rules written without indices, caches or early ends."""

from __future__ import annotations

from collections import Counter

import numpy as np
import pytest

from lmkit.turbo.scheduling import policy
from lmkit.turbo.scheduling.planner import Planner, Step
from lmkit.turbo.scheduling.under_way import PromptsUnderWay
from lmkit.turbo.sequence import Sequence
from tests.turbo.fakes import FakeEngine, limits, request
from tests.turbo.scheduling.traffic import Traffic


def common_prefix(seq: Sequence, other: Sequence) -> int:
    """The length of the common prefix, within the tokens that `seq` can reuse and the prompt of `other`."""
    count = min(seq.max_cached, other.num_prompt_tokens)
    differ = np.flatnonzero(seq.tokens(count) != other.tokens(count))
    return int(differ[0]) if len(differ) else count


def waits_for_prefix(planner: Planner, seq: Sequence) -> bool:
    """Whether a prompt under way will soon compute a good part of this sequence's tokens: it compares all of them."""
    if not planner.limits.kv.prefix_cache or not seq.max_cached or seq.overtaken >= planner.limits.max_overtakes:
        return False
    cached = planner.kv.find(seq).num_tokens
    for other in planner.slots.running.values():
        if other.num_completed >= other.num_prompt_tokens or planner.kv.namespace(seq) != planner.kv.namespace(other):
            continue
        common = common_prefix(seq, other)
        saved, left = common - cached, seq.max_cached + 1 - cached
        if common > other.num_completed and (saved >= planner.limits.kv.block_size or 2 * saved >= left):
            return True
    return False


def choice(planner: Planner, step: Step, before: Sequence | None) -> list[Sequence]:
    """The sequences to admit, the first one that fits."""

    def goes_before(seq: Sequence) -> bool:
        return before is None or planner._goes_before(seq, before, step)

    ranks = planner.shares.ranks(planner.waiting.heads(), step.now) if step.ranks is None else step.ranks
    assert ranks == sorted(planner.shares.rank(seq, step.now) for seq in planner.waiting.heads()), "out of date"
    for rank in ranks:
        row = planner.waiting.of(rank.tenant)
        candidates = [seq for seq in row[: 4 * policy.LOOK_AHEAD] if not seq.in_flight]
        ready = [seq for seq in candidates if not waits_for_prefix(planner, seq) and goes_before(seq)]
        if goes_before(row[0]) and ready:
            best = policy.next_in(ready, lambda seq: planner.kv.find(seq).num_tokens, planner.limits.max_overtakes)
            return list(dict.fromkeys((best, ready[0])))
    return []


@pytest.fixture
def decisions(monkeypatch: pytest.MonkeyPatch) -> Counter[str]:
    """Every admission is compared with the oracle's. Returns the counts of what was compared."""
    enter_next, enter = Planner._enter_next, Planner._enter
    tried: list[Sequence] = []
    counts: Counter[str] = Counter()

    def checked_next(planner: Planner, step: Step, before: Sequence | None) -> bool:
        wanted = choice(planner, step, before)
        overtaken = {seq: seq.overtaken for seq in planner.waiting}
        rows = {seq: planner.waiting.of(seq.request.tenant).index(seq) for seq in planner.waiting}
        tried.clear()
        entered = enter_next(planner, step, before)
        assert tried == (wanted[: len(tried)] if entered else wanted)
        if entered:
            for seq in planner.waiting:
                passed = seq in rows and not seq.in_flight and policy.order(seq) < policy.order(tried[-1])
                passed = passed and seq.request.tenant == tried[-1].request.tenant
                passed = passed and rows[seq] < 4 * policy.LOOK_AHEAD
                assert seq.overtaken == overtaken.get(seq, 0) + passed
        counts["entered" if entered else "none"] += 1
        counts["chosen by match"] += wanted[1:] != []
        counts["waits for a prefix"] += any(waits_for_prefix(planner, seq) for seq in list(planner.waiting)[:8])
        return entered

    def recorded(planner: Planner, seq: Sequence, *arguments: object) -> bool:
        tried.append(seq)
        found = arguments[0]
        assert found == planner.kv.find(seq), "the prefix is out of date"
        return enter(planner, seq, *arguments)  # type: ignore[arg-type]

    monkeypatch.setattr(Planner, "_enter_next", checked_next)
    monkeypatch.setattr(Planner, "_enter", recorded)
    return counts


def test_admissions_are_those_of_the_oracle(decisions: Counter[str]) -> None:
    for seed in range(700, 760):
        traffic = Traffic(seed, 1 + seed % 2, disturb=seed % 3 == 0, thorough=False)
        traffic.run(120)
        traffic.check_results()
    assert decisions["entered"] > 1500
    assert decisions["none"] > 300
    assert decisions["chosen by match"] > 5
    assert decisions["waits for a prefix"] > 100


def test_the_index_of_prompts_is_asked_once_for_each_candidate_and_not_for_each_prompt_under_way(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """512 different prompts are admitted in one step, and the work for each does not grow with their number."""
    counts: Counter[int] = Counter()
    will_compute = PromptsUnderWay.will_compute

    def counted(index: PromptsUnderWay, *arguments: object) -> bool:
        counts[num_requests] += 1
        return will_compute(index, *arguments)  # type: ignore[arg-type]

    monkeypatch.setattr(PromptsUnderWay, "will_compute", counted)
    for num_requests in (128, 512):
        engine = FakeEngine(
            limits(
                num_blocks=4096, max_batch_size=512, max_step_tokens=8192, max_queue=1024, prefix_cache=True,
                vocab_size=2000,
            )
        )  # fmt: skip
        engine.add(*(request(f"r{i}", [i, *range(9)], max_tokens=1) for i in range(num_requests)))
        plan = engine.step()
        assert plan is not None
        assert len(plan.chunks) == num_requests
    assert counts[512] <= 4 * policy.LOOK_AHEAD * 512
    assert counts[512] <= 5 * counts[128]
