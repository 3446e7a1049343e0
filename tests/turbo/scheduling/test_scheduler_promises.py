"""Waiting, priorities, decoding beside prompts, deadlines and leases, with a clock of the test's own."""

from __future__ import annotations

import random

import pytest

from lmkit.turbo.kv.tiers.store import Loaded
from lmkit.turbo.plan import Load, Save, StepPlan
from lmkit.turbo.request import Request
from lmkit.turbo.scheduling import policy
from tests.turbo.fakes import FakeEngine, limits, request, solo


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


def text(seed: int, count: int) -> list[int]:
    rng = random.Random(seed)
    return [rng.randrange(2, 50) for _ in range(count)]


def started(engine: FakeEngine, order: list[str]) -> None:
    """Append to `order` who has got its first token since."""
    order += [name for name, outputs in engine.outputs.items() if outputs and name not in order]


# ---- waiting


@pytest.mark.parametrize("priority", [1, 3])
def test_a_level_of_priority_is_worth_so_many_seconds_of_waiting_and_not_more(priority: int) -> None:
    clock = Clock()
    engine = FakeEngine(limits(max_batch_size=1, priority_seconds=10.0), clock=clock)
    order: list[str] = []
    arrivals = {"low": 5.0}
    for second in range(60):  # two steps of work arrive a second, and one is done
        clock.now = float(second)
        if second == 5:
            engine.add(request("low", text(99, 5), max_tokens=2, priority=priority))
        engine.add(request(f"r{second}", text(second, 3), max_tokens=2))
        arrivals[f"r{second}"] = clock.now
        engine.step()
        started(engine, order)
    while "low" not in order:
        clock.now += 1
        engine.step()
        started(engine, order)
    before = order[: order.index("low")]
    assert max(arrivals[name] for name in before) <= 5.0 + 10.0 * priority
    assert {name for name, time in arrivals.items() if time < 5.0 + 10.0 * priority} - {"low"} == set(before)


@pytest.mark.parametrize("max_overtakes", [0, 1, 3])
def test_nobody_is_overtaken_more_often_than_allowed(max_overtakes: int) -> None:
    engine = FakeEngine(limits(max_batch_size=1, num_blocks=64, prefix_cache=True, max_overtakes=max_overtakes))
    known = text(0, 20)
    engine.add(request("known", known))
    engine.run()
    engine.add(request("cold", text(2, 20)))
    order = ["known"]
    for i in range(40):
        engine.add(request(f"r{i}", known + text(i + 10, 2), max_tokens=1))
        engine.step()
        started(engine, order)
    engine.run()
    started(engine, order)
    assert order.index("cold") - 1 == max_overtakes


# ---- priorities


def test_no_two_ever_throw_each_other_out() -> None:
    engine = FakeEngine(limits(max_batch_size=1, priority_seconds=5.0))
    rng = random.Random(1)
    for i in range(60):
        engine.scheduler.add(request(f"r{i}", 1, priority=rng.randint(-3, 3)))
    waiting = list(engine.scheduler._waiting)
    pairs = [(a, b) for a in waiting for b in waiting if policy.may_preempt(a, b)]
    assert len(pairs) > 300
    assert not any(policy.may_preempt(b, a) for a, b in pairs)
    assert all(a.request.priority < b.request.priority for a, b in pairs)


def test_a_better_one_takes_a_slot_and_the_other_goes_on_where_it_was() -> None:
    engine = FakeEngine(limits(max_batch_size=1, prefix_cache=True, num_blocks=32), depth=1)
    engine.add(request("low", text(1, 9), max_tokens=12, priority=1))
    for _ in range(5):
        engine.step()
    engine.add(request("high", text(2, 5), max_tokens=3), request("same", text(3, 5), priority=1))
    engine.step()
    order = ["low"]
    while engine.scheduler.has_work():
        engine.step()
        started(engine, order)
    assert order == ["low", "high", "same"]
    assert engine.scheduler.stats().preemptions == 1
    # Nothing was evicted, so nothing was computed twice.
    assert engine.runner.num_computed == (9 + 11) + (5 + 2) + (5 + 3)


@pytest.mark.parametrize("num_pending", [1, 2, 3])
def test_a_prompt_that_gave_way_between_chunks_goes_on_where_it_was(num_pending: int) -> None:
    engine = FakeEngine(limits(max_batch_size=1, prefix_cache=True, num_blocks=32))
    engine.add(request("low", text(1, 60), max_tokens=1, priority=1))
    for _ in range(num_pending):
        engine.step()
    engine.add(request("high", text(2, 5), max_tokens=1))
    engine.run()
    assert engine.scheduler.stats().preemptions == 1
    assert engine.runner.num_computed == 60 + 5
    assert engine.outputs["low"][0].cached_tokens == 0  # it computed all of them itself


def test_a_better_one_does_not_wait_until_a_long_prompt_is_computed() -> None:
    engine = FakeEngine(limits(num_blocks=40, max_model_len=100))
    engine.add(request("low", text(1, 90), priority=1))
    engine.step()
    engine.add(request("high", text(3, 5)), request("same", text(2, 30), priority=1))
    for expected in ([(0, 5), (16, 11)], [(5, 1), (27, 15)]):
        plan = engine.step()
        assert plan is not None
        assert [(chunk.start, chunk.num_tokens) for chunk in plan.chunks] == expected
    engine.run()


def test_nobody_is_thrown_out_where_that_would_not_suffice() -> None:
    """What the worse one shares with one that stays would not be free without it."""
    engine = FakeEngine(limits(num_blocks=10, prefix_cache=True))
    shared = text(1, 14)
    engine.add(request("first", shared, max_tokens=12))
    engine.step()
    engine.add(request("worse", [*shared, 9], max_tokens=10, priority=1))
    engine.step()
    tables = [seq.tables[0].blocks for seq in engine.scheduler._slots]
    assert tables[0][:3] == tables[1][:3]
    engine.add(request("better", text(2, 24), max_tokens=4))
    for _ in range(4):
        engine.step()
    assert engine.scheduler.stats().preemptions == 0
    engine.run()
    assert engine.tokens("better") == solo(request("better", text(2, 24), max_tokens=4), engine.scheduler.limits)[0]


def test_what_a_better_one_shares_with_the_one_it_throws_out_counts_once() -> None:
    """The worse one's blocks would be free without it, but those of the match are needed as they are."""
    engine = FakeEngine(limits(num_blocks=12, prefix_cache=True))
    shared = text(1, 12)
    engine.add(request("first", text(3, 18), max_tokens=9))  # 5 blocks
    engine.step()
    engine.add(request("worse", shared, max_tokens=9, priority=1))  # 4 blocks, once it decodes
    engine.step()
    engine.step()
    engine.add(request("better", shared + text(4, 16), max_tokens=2))  # 7 blocks, and one for the first to grow
    engine.step()
    assert engine.scheduler.stats().preemptions == 0
    assert engine.scheduler.stats().num_running == 2
    engine.run()


# ---- decoding beside prompts


def step_seconds(plan: StepPlan) -> float:
    decodes = sum(chunk.num_tokens == 1 for chunk in plan.chunks)
    prompt = sum(chunk.num_tokens for chunk in plan.chunks) - decodes
    return 20e-3 + 0.5e-3 * decodes + 2e-3 * prompt + 1e-3 * bool(prompt and decodes)


def test_decoding_waits_for_no_prompt_and_is_not_slowed_down_beyond_measure() -> None:
    pace = limits(
        max_batch_size=8, max_step_tokens=256, num_blocks=4000, max_model_len=4000, decode_slowdown=2.0, max_queue=1000
    )
    engine = FakeEngine(pace, seconds=step_seconds)
    engine.add(*(request(f"d{i}", 3, max_tokens=900) for i in range(4)))
    for _ in range(20):
        engine.step()
    engine.add(*(request(f"warm{i}", 200, max_tokens=1) for i in range(4)))  # it learns
    while any(not engine.outputs[f"warm{i}"] for i in range(4)):
        engine.step()
    engine.add(request("long", 2500, max_tokens=1))
    while not engine.outputs["long"]:
        before = [len(engine.outputs[f"d{i}"]) for i in range(4)]
        plan = engine.step()
        assert plan is not None
        assert [len(engine.outputs[f"d{i}"]) for i in range(4)] == [count + 1 for count in before]
        assert step_seconds(plan) <= 1.25 * 2.0 * (20e-3 + 4 * 0.5e-3)
    assert 2500 / engine.num_steps > 4  # and the prompt gets on


# ---- deadlines


class HeldTiers:
    """Has every block there is, and ends a load when it is told to; it fills nothing."""

    def __init__(self) -> None:
        self.held: list[Load] = []
        self.may_end = False

    def lookup(self, keys: list[bytes]) -> int:
        return len(keys)

    def load_seconds(self, keys: list[bytes]) -> float:
        return 0.0

    def touch(self, keys: list[bytes]) -> None:
        pass

    def save(self, saves: list[Save]) -> None:
        pass

    def load(self, load: Load) -> None:
        self.held.append(load)

    def finished(self) -> list[Loaded]:
        held, self.held = (self.held, []) if self.may_end else ([], self.held)
        return [Loaded(load.job, 0, {}) for load in held]

    def wait(self, seconds: float) -> None:
        pass

    def stats(self) -> dict[str, int]:
        return {}


def ended(engine: FakeEngine, name: str) -> bool:
    outputs = engine.outputs[name]
    if not outputs or outputs[-1].finish_reason is None:
        return False
    assert (outputs[-1].finish_reason, outputs[-1].error_code) == ("error", "deadline_exceeded")
    return True


@pytest.mark.parametrize("depth", [1, 2])
def test_time_is_up_in_the_queue_and_while_running(depth: int) -> None:
    clock = Clock()
    engine = FakeEngine(limits(max_batch_size=1, request_timeout=7.0), depth=depth, clock=clock)
    engine.add(request("runs", 3, max_tokens=50), request("waits", 3, timeout=2.0), request("later", 3, timeout=99))
    while not ended(engine, "waits"):
        assert clock.now <= 2.5
        clock.now += 0.5
        engine.step()
    assert clock.now >= 2.0
    assert not engine.outputs["runs"][-1].finish_reason
    while not ended(engine, "runs"):
        assert clock.now <= 7.5
        clock.now += 0.5
        engine.step()
    assert clock.now >= 7.0
    engine.run()
    assert engine.tokens("later") == solo(request("later", 3), engine.scheduler.limits)[0]
    assert 0 < len(engine.tokens("runs")) < 50


@pytest.mark.parametrize("by", ["deadline", "abort"])
def test_a_load_ends_before_its_blocks_are_given_to_others(by: str) -> None:
    clock, tiers = Clock(), HeldTiers()
    engine = FakeEngine(limits(prefix_cache=True), tiers=lambda runner: tiers, clock=clock)
    engine.add(request("loads", text(1, 20), timeout=5.0))
    engine.step()
    assert (len(tiers.held), engine.scheduler.stats().blocks_used) == (1, 4)
    clock.now = 5.0
    if by == "abort":
        engine.scheduler.abort("loads")
    engine.step()
    reason = engine.outputs["loads"][-1].finish_reason if by == "abort" else ended(engine, "loads")
    assert reason == ("abort" if by == "abort" else True)
    assert engine.scheduler.stats().blocks_used == 4
    assert engine.scheduler.has_work() is False
    engine.add(request("loads", 3, max_tokens=1))  # the name is free, the blocks are not
    engine.step()
    assert engine.scheduler.stats().blocks_used == 4
    tiers.may_end = True
    engine.add(request("other", 2, max_tokens=1))
    engine.run()


def test_ended_requests_are_forgotten_long_before_their_time() -> None:
    engine = FakeEngine()
    for i in range(300):
        engine.add(request(f"r{i}", 2, max_tokens=1, timeout=1e9))
        engine.run()
    assert len(engine.scheduler._deadlines) < 100


# ---- leases


def test_no_session_keeps_others_from_running() -> None:
    engine = FakeEngine(limits(prefix_cache=True, session_lease=1e9))
    for i in range(4):
        engine.add(request(f"s{i}", text(i, 12), session_id=f"s{i}"))
        engine.run_until_idle()
    assert engine.scheduler.stats().sessions == 4
    assert engine.scheduler.stats().blocks_used == 16
    whole = request("whole", text(9, 60), max_tokens=4)
    engine.add(whole)
    engine.step()
    assert engine.scheduler.stats().num_running == 1
    engine.run_until_idle()
    assert engine.tokens("whole") == solo(whole, engine.scheduler.limits)[0]


def test_a_lease_that_holds_the_match_may_end_for_the_rest_of_it() -> None:
    """When it ends, what it held of the match must still be counted as needed."""
    engine = FakeEngine(limits(prefix_cache=True, session_lease=1e9, num_blocks=16))
    chat = request("a", text(1, 28), session_id="s")
    engine.add(chat)
    engine.run_until_idle()  # 31 tokens lie in 8 blocks
    engine.add(request("first", text(2, 12), max_tokens=17))  # 3 blocks, and it grows
    engine.step()
    more = chat.prompt_ids + engine.tokens("a") + text(3, 20)
    engine.add(request("b", more, max_tokens=1, session_id="s"))  # 13 blocks of 16
    engine.step()
    assert engine.scheduler.stats().num_running == 1
    engine.run_until_idle()
    assert engine.scheduler.stats().preemptions == 0
    assert engine.outputs["b"][0].finish_reason == "length"


def test_leases_end_in_time() -> None:
    clock = Clock()
    engine = FakeEngine(limits(prefix_cache=True, session_lease=10.0), clock=clock)
    engine.add(request("a", text(1, 12), session_id="s"))
    engine.run_until_idle()
    for clock.now, sessions in ((9.9, 1), (10.1, 0)):
        engine.scheduler.schedule()
        assert (engine.scheduler.stats().sessions, engine.scheduler.stats().blocks_used > 0) == (
            sessions,
            sessions == 1,
        )


def test_requests_of_the_queue_keep_their_order_by_rank() -> None:
    clock = Clock()
    engine = FakeEngine(limits(max_batch_size=1, priority_seconds=10.0), clock=clock)
    rng = random.Random(5)
    wanted: list[tuple[float, int, str]] = []
    requests: list[Request] = []
    for i in range(30):
        clock.now += rng.random() * 3
        requests.append(request(f"r{i}", 1, max_tokens=1, priority=rng.randint(-2, 2)))
        wanted.append((clock.now + 10.0 * requests[-1].priority, i, f"r{i}"))
        engine.add(requests[-1])
    order: list[str] = []
    while engine.scheduler.has_work():
        engine.step()
        started(engine, order)
    assert order == [name for _, _, name in sorted(wanted)]


def test_the_first_output_tells_how_long_its_request_waited() -> None:
    clock = Clock()
    engine = FakeEngine(limits(max_batch_size=1), clock=clock)
    clock.now = 5.0
    engine.add(request("a", 3, max_tokens=4), request("b", 3, max_tokens=3))
    while engine.scheduler.has_work():
        engine.step()
        clock.now += 1.0
    waited = {name: [output.queue_seconds for output in outputs] for name, outputs in engine.outputs.items()}
    assert waited["a"] == [0, 0, 0, 0]
    assert waited["b"] == [4, 0, 0]
