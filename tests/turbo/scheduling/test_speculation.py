"""When draft tokens are computed: where they save time on the machine at hand, by a clock that charges each token."""

from __future__ import annotations

from collections import deque
from typing import Any

import msgspec
import pytest

from lmkit.turbo.plan import StepPlan
from lmkit.turbo.request import Request
from lmkit.turbo.scheduling.speculation import Speculation
from tests.turbo import fakes
from tests.turbo.fakes import FakeEngine, limits, next_token, request, solo

PERIOD = 11


class Machine(FakeEngine):
    """Steps of `fixed` + `each` * tokens seconds. What the host does in between takes `host`, which overlap hides. The
    first step of each size takes `first` more.
    """

    def __init__(
        self, *, fixed: float = 20.0, each: float = 2.0, host: float = 0.5, first: float = 0.0, **changes: Any
    ) -> None:
        self.now, self.fixed, self.each, self.host, self.first = 0.0, fixed, each, host, first
        self.sizes = set[tuple[int, int]]()
        given = {"num_blocks": 2000, "max_step_tokens": 64, "max_model_len": 400, "max_batch_size": 16}
        super().__init__(limits(**(given | changes)), depth=2, clock=lambda: self.now)
        self.waited = deque[bool]()

    def schedule(self) -> StepPlan | None:
        was_idle = not self.plans
        plan = super().schedule()
        if plan is not None:
            self.waited.append(was_idle)
        return plan

    def land(self) -> None:
        chunks = self.plans[0].chunks
        num_tokens = sum(chunk.num_tokens for chunk in chunks)
        if (len(chunks), num_tokens) not in self.sizes:
            self.sizes.add((len(chunks), num_tokens))
            self.now += self.first
        self.now += self.fixed + self.each * num_tokens + (self.host if self.waited.popleft() else 0.0)
        super().land()

    def finish(self, requests: list[Request]) -> float:
        """The seconds that the requests take. Their tokens are those of requests alone."""
        self.add(*requests)
        self.run()
        for req in requests:
            assert self.tokens(req.request_id) == solo(req, self.scheduler.limits)[0]
        return self.now


@pytest.fixture
def repeats(monkeypatch: pytest.MonkeyPatch) -> None:
    """Answers whose tokens come again after PERIOD tokens; the seed decides how many in a hundred do."""

    def token(prefix: list[int], num_outputs: int, params: Any, eos: tuple[int, ...], vocab: int) -> int:
        fresh = next_token(prefix[-1:], num_outputs, params, eos, vocab)
        return prefix[-PERIOD] if hash((num_outputs, 7)) % 100 < params.seed else fresh

    monkeypatch.setattr(fakes, "next_token", token)


def requests(count: int, percent: int, **params: Any) -> list[Request]:
    prompt = [(5 * i) % 43 + 2 for i in range(PERIOD)] * 3
    return [request(f"r{i}", [i + 2, *prompt], max_tokens=200, seed=percent, **params) for i in range(count)]


@pytest.mark.usefixtures("repeats")
def test_what_repeats_itself_takes_fewer_steps() -> None:
    plain, drafting = Machine(), Machine(max_draft_tokens=8)
    assert drafting.finish(requests(1, 100)) < plain.finish(requests(1, 100)) / 2.5
    stats = drafting.scheduler.stats()
    assert stats.generation_tokens == 200
    assert 0.9 * stats.draft_tokens < stats.accepted_tokens <= stats.draft_tokens
    assert stats.drafts <= drafting.num_steps < plain.num_steps / 2.5


@pytest.mark.usefixtures("repeats")
@pytest.mark.parametrize("percent", [0, 30, 60, 80, 95])
@pytest.mark.parametrize("count", [1, 4, 16])
@pytest.mark.parametrize("each", [0.1, 2.0, 10.0], ids=["a GPU", "a CPU", "a small model"])
def test_drafts_never_cost_much(percent: int, count: int, each: float) -> None:
    """The costs of this machine are learned on the way, by a few steps that do not pay."""
    plain = Machine(each=each).finish(requests(count, percent))
    most = 1.02 if percent < 50 else 1.04
    assert Machine(each=each, max_draft_tokens=16).finish(requests(count, percent)) < most * plain


@pytest.mark.usefixtures("repeats")
@pytest.mark.parametrize("percent", [80, 90])
def test_few_sizes_are_taken_if_each_costs_much_once(percent: int) -> None:
    plain = Machine(first=150.0).finish(requests(4, percent))
    assert Machine(first=150.0, max_draft_tokens=16).finish(requests(4, percent)) < 0.92 * plain


@pytest.mark.usefixtures("repeats")
@pytest.mark.parametrize("percent", [70, 100])
def test_a_long_pause_of_the_host_is_a_reason_not_to_wait(percent: int) -> None:
    """A few draft tokens show how long it is, even if there are some at each step."""
    engine = Machine(host=200.0, max_draft_tokens=4)
    engine.finish(requests(1, percent))
    assert engine.scheduler.stats().drafts < 10


@pytest.mark.usefixtures("repeats")
@pytest.mark.parametrize(("count", "percent"), [(1, 0), (1, 60), (1, 100), (4, 100)])  # all sequences end together
def test_the_time_that_drafts_saved_is_known(percent: int, count: int) -> None:
    plain, engine = Machine(), Machine(max_draft_tokens=8)
    saved, shown = [0.0], [0.0]
    for turn in range(3):
        texts = [msgspec.structs.replace(r, request_id=f"{turn} {r.request_id}") for r in requests(count, percent)]
        saved.append(plain.finish(texts) - engine.finish(texts))
        shown.append(engine.scheduler.stats().draft_seconds_saved)
    # The first steps are not counted, because the time of a step is not known.
    assert shown[-1] - shown[1] == pytest.approx(saved[-1] - saved[1], abs=0.02 * plain.now)


@pytest.mark.usefixtures("repeats")
def test_choosing_for_long_is_a_reason_not_to(monkeypatch: pytest.MonkeyPatch) -> None:
    plain, engine = Machine(), Machine(max_draft_tokens=8)
    choose, seconds = Speculation._lengths, 0.2 * plain.fixed

    def slowly(self: Speculation, *given: Any) -> Any:
        engine.now += seconds
        return choose(self, *given)

    monkeypatch.setattr(Speculation, "_lengths", slowly)
    for turn in range(10):
        texts = [msgspec.structs.replace(r, request_id=f"{turn}") for r in requests(1, 0)]
        plain.finish(texts)
        engine.finish(texts)
    assert engine.now < 1.015 * plain.now + 8 * plain.fixed


@pytest.mark.usefixtures("repeats")
def test_a_request_may_refuse_drafts() -> None:
    engine = Machine(max_draft_tokens=8)
    engine.finish(requests(2, 100, speculate=False))
    assert not engine.scheduler.stats().drafts


@pytest.mark.usefixtures("repeats")
def test_drafts_stop_while_others_wait_or_prompts_are_computed() -> None:
    engine = Machine(max_draft_tokens=8, max_batch_size=2)
    engine.add(*requests(5, 100))
    while engine.scheduler.has_work():
        plan = engine.step()
        if plan is not None and any(chunk.draft for chunk in plan.chunks):
            assert not engine.scheduler._waiting
            assert all(chunk.num_tokens == chunk.num_sampled for chunk in plan.chunks)
    assert engine.scheduler.stats().accepted_tokens > 0
    assert not engine.scheduler._speculation._texts, "an index outlives its sequence"  # type: ignore[union-attr]
