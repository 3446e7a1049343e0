"""What is computed ahead: only while nothing else is to be done, for its tenant alone, and within bounds."""

from __future__ import annotations

import random
from collections import Counter
from typing import Any

import pytest

from lmkit.turbo.kv.prefix import Prefix
from lmkit.turbo.kv.snapshots import Snapshots
from lmkit.turbo.request import TURN, Request
from lmkit.turbo.scheduling.allowance import FIRST, MOST, Allowance
from lmkit.turbo.scheduling.next_turns import LEAST_GAIN, LEAST_TOKENS, MAX_OF_TENANT
from lmkit.turbo.sequence import Sequence
from tests.turbo.fakes import FakeEngine, limits, request
from tests.turbo.scheduling.test_scheduler_prefixes import cached, text


def ahead(name: str, ids: list[int], **fields: Any) -> Request:
    return request(name, ids, max_tokens=0, is_ahead=True, **fields)


def engine(**changes: Any) -> FakeEngine:
    """Its steps take a millisecond for each token, so that those ahead are as small as they get."""
    sizes = {"prefix_cache": True, "num_blocks": 200, "block_size": 8, "max_batch_size": 8, "max_step_tokens": 256}
    sizes["max_model_len"] = changes.get("num_blocks", 200) * 8
    of_step = {"seconds": lambda plan: 1e-3 * sum(chunk.num_tokens for chunk in plan.chunks)}
    return FakeEngine(limits(**sizes | changes), **of_step)


def test_the_next_turn_finds_what_was_computed_ahead() -> None:
    made = engine()
    made.add(request("a", text(1, 100)))
    made.run()
    known = text(1, 60) + text(2, 83)  # the template writes the end otherwise
    made.scheduler.add(ahead("n", known))
    made.run_until_idle()
    assert "n" not in made.outputs  # it has no outputs
    computed, stats = made.runner.num_computed, made.scheduler.stats()
    assert (stats.prompt_tokens, stats.num_running, stats.prefix_tokens) == (100, 0, 100)
    assert stats.next_turns == {"prepared": 83, "used": 0, "wasted": 0}
    made.add(request("b", known + text(3, 10), max_tokens=1))
    made.run()
    assert cached(made, "b") == 143
    assert made.runner.num_computed == computed + 10
    assert made.scheduler.stats().next_turns == {"prepared": 83, "used": 83, "wasted": 0}


@pytest.mark.parametrize(("more", "computed"), [(0, 0), (LEAST_GAIN - 1, 0), (LEAST_GAIN, LEAST_GAIN)])
def test_what_the_cache_nearly_has_is_not_computed(more: int, computed: int) -> None:
    made = engine()
    made.add(request("a", text(1, 100), max_tokens=1))
    made.run()
    made.scheduler.add(ahead("n", text(1, 100) + text(2, more)))
    made.run()
    assert made.runner.num_computed == 100 + computed


@pytest.mark.parametrize("depth", [1, 2])
def test_a_request_comes_before_the_next_plan(depth: int) -> None:
    made = engine()
    made.depth = depth
    made.scheduler.add(ahead("n", text(1, 300)))
    for _ in range(3):
        plan = made.step()
        assert plan is not None
        assert [chunk.num_tokens for chunk in plan.chunks] == [LEAST_TOKENS]
        if depth > 1:
            assert made.step() is None  # the next one is planned when it has ended
    made.add(request("a", text(2, 50), max_tokens=3))
    plan = made.step()
    assert plan is not None
    assert [chunk.num_tokens for chunk in plan.chunks] == [50]
    while not (made.outputs["a"] and made.reason("a")):
        plan = made.step()
        assert plan is None or sum(chunk.num_tokens for chunk in plan.chunks) <= 50
        assert made.scheduler.stats().num_running <= 1
    made.run()
    assert made.scheduler.stats().next_turns["prepared"] == 300  # it went on where it was
    made.add(request("b", text(1, 301), max_tokens=1))
    made.run()
    assert cached(made, "b") == 300
    assert made.scheduler.stats().next_turns["used"] == 300


def test_requests_lose_no_more_than_their_share_whenever_they_arrive() -> None:
    """Each arrives in the middle of a step ahead, if there is one, and waits for all of it."""
    now = 0.0
    made = FakeEngine(engine().scheduler.limits, clock=lambda: now, seconds=lambda plan: 0.03)
    lost, num_idle = 0.0, 0
    for i in range(200):
        made.scheduler.add(ahead(f"n{i}", text(i + 1000, 40)))
        if plan := made.schedule():
            assert sum(chunk.num_tokens for chunk in plan.chunks) <= 40
            lost += 0.03
            made.land()
        else:
            num_idle += not made.scheduler.has_work()  # an idle engine sleeps
        made.add(request(f"r{i}", text(i, 10), max_tokens=1))
        now += 0.1
        while not made.outputs[f"r{i}"]:
            made.step()
    assert 0.1 < lost <= FIRST + 0.01 * 200 * 0.1
    assert num_idle > 150


def test_what_no_request_meets_costs_nothing() -> None:
    allowance = Allowance()
    for _ in range(1000):
        assert allowance.covers(FIRST)
        allowance.ran(0.02, 1.0)
        allowance.planned()
    allowance.ran(0.02, 2.0)
    allowance.arrives(2.5)  # the engine was idle
    assert allowance.waited == 0.0
    allowance.arrives(2.0)
    allowance.arrives(2.0)
    assert allowance.waited == 0.04
    assert allowance.covers(FIRST - 0.0401)
    assert not allowance.covers(FIRST - 0.0399)
    allowance.ended(4.0)
    assert allowance.covers(FIRST - 0.0001)
    allowance.ended(1e9)
    assert not allowance.covers(MOST + 0.1)


def test_the_next_turn_itself_goes_on_where_it_was() -> None:
    made = engine()
    made.scheduler.add(ahead("n", text(1, 300)))
    for _ in range(3):
        made.step()
    made.add(request("a", text(1, 320), max_tokens=1))
    made.run()
    assert cached(made, "a") == 3 * LEAST_TOKENS
    assert made.runner.num_computed == 320
    assert made.scheduler.stats().next_turns == {"prepared": 96, "used": 96, "wasted": 0}


def test_nothing_of_it_shows_to_another_tenant() -> None:
    made = engine()
    made.scheduler.add(ahead("n", text(1, 100), tenant="x"))
    made.run_until_idle()
    made.add(request("a", text(1, 120), max_tokens=1, tenant="y"), request("b", text(1, 120), max_tokens=1))
    made.run()
    assert cached(made, "a") == cached(made, "b") == 0
    assert made.scheduler.stats().next_turns == {"prepared": 100, "used": 0, "wasted": 0}


def test_a_tenant_has_so_many_at_a_time() -> None:
    made = engine()
    made.add(request("a", text(0, 10)))  # none begins meanwhile
    for i in range(MAX_OF_TENANT + 2):
        made.scheduler.add(ahead(f"n{i}", text(i + 1, 20), tenant="x"))
    made.scheduler.add(ahead("other", text(99, 20), tenant="y"))
    made.run()
    found = {}
    for i in range(MAX_OF_TENANT + 2):
        made.add(request(f"r{i}", text(i + 1, 30), max_tokens=1, tenant="x"))
        made.run()
        found[i] = cached(made, f"r{i}")
    assert list(found.values()) == [0, 0] + [20] * MAX_OF_TENANT
    made.add(request("r", text(99, 30), max_tokens=1, tenant="y"))
    made.run()
    assert cached(made, "r") == 20


def test_what_does_not_come_is_wasted() -> None:
    made = engine()
    for i in range(MAX_OF_TENANT + 1):
        made.scheduler.add(ahead(f"n{i}", text(i + 1, 20)))
        made.run_until_idle()
    assert made.scheduler.stats().next_turns["wasted"] == 20


def test_it_ends_no_lease_and_waits_for_no_room() -> None:
    made = engine(num_blocks=30, session_lease=1e9)
    made.add(request("a", text(1, 160), max_tokens=1, session_id="s"))
    made.run_until_idle()
    made.scheduler.add(ahead("n", text(2, 100)))
    made.run_until_idle()
    assert made.scheduler.stats().sessions == 1
    assert made.runner.num_computed == 160
    made.check_idle()


def test_a_conversation_that_called_tools_is_held_before_anything_is_computed() -> None:
    made = engine(num_blocks=40)
    made.add(request("a", text(1, 64), max_tokens=1))
    made.run_until_idle()
    made.add(request("b", text(2, 40), max_tokens=20))
    made.scheduler.add(ahead("n", text(1, 64) + text(9, 8), session_id=TURN + "1"))  # it waits
    assert made.scheduler.stats().sessions == 1
    made.add(request("c", text(3, 100), max_tokens=1), request("d", text(4, 100), max_tokens=1))  # more than the rest
    made.run_until_idle()
    made.add(request("e", text(1, 64) + text(9, 20), max_tokens=1))
    made.run_until_idle()
    assert cached(made, "e") == 72
    made.check_idle()


def test_such_leases_hold_a_part_of_the_cache_and_those_of_the_greediest_tenant_go() -> None:
    made = engine(num_blocks=40)  # 10 for all of them
    for i, tenant in enumerate(("x", "y", "y", "y")):
        made.scheduler.add(ahead(f"n{i}", text(i, 24), tenant=tenant, session_id=f"{TURN}{i}"))
        made.run_until_idle()
    leases = made.scheduler.kv.leases
    assert len(leases) == 3
    assert sum(lease.size for lease in leases) == 9
    assert list(leases._leases) == [("x", TURN + "0"), ("y", TURN + "2"), ("y", TURN + "3")]
    made.check_idle()


@pytest.mark.parametrize("length", [104, 105, 111])
def test_a_recurrent_state_stands_where_the_beginning_ends(length: int) -> None:
    made = engine(first_snapshot=8, num_snapshots=10)
    made.scheduler.add(ahead("n", text(1, length)))
    made.run_until_idle()
    made.scheduler.check_integrity()
    made.add(request("a", text(1, 120), max_tokens=1), request("b", text(1, length) + text(2, 5), max_tokens=1))
    made.run()
    assert cached(made, "a") == cached(made, "b") == length
    assert made.scheduler.stats().next_turns["used"] == length
    made.check_idle()


def test_a_recurrent_state_stands_where_renderings_part() -> None:
    made = engine(first_snapshot=8, num_snapshots=10)
    made.add(request("a", text(1, 100), max_tokens=1))  # its state stands after 96 tokens
    made.run()
    made.scheduler.add(ahead("n", text(1, 60) + text(2, 20)))
    made.run_until_idle()
    for name, prompt, found in (("b", text(1, 60) + text(2, 30), 80), ("c", text(1, 60) + text(3, 20), 56)):
        made.add(request(name, prompt, max_tokens=1))
        made.run()
        assert cached(made, name) == found


def test_a_step_that_fails_ends_it() -> None:
    made = engine()
    made.scheduler.add(ahead("n", text(1, 100)))
    plan = made.schedule()
    assert plan is not None
    made.runner.fail(made.plans.popleft())
    assert made.scheduler.fail(plan, "it broke") == []
    assert not made.scheduler.has_work()
    made.check_idle()


def known(name: str, ids: list[int], **fields: Any) -> Request:
    return ahead(name, ids, is_known=True, **fields)


def test_what_is_known_at_the_start_has_no_bound_of_number_and_comes_after_next_turns() -> None:
    made = engine()
    for i in range(2 * MAX_OF_TENANT):
        made.scheduler.add(known(f"k{i}", text(i + 1, 20), timeout=1e9))
    made.scheduler.add(ahead("n", text(99, 30)))
    assert made.scheduler.stats().next_turns["waiting"] == 2 * MAX_OF_TENANT
    first = made.step()
    assert first is not None
    assert [chunk.num_tokens for chunk in first.chunks] == [30]
    made.run_until_idle()
    stats = made.scheduler.stats().next_turns
    assert stats == {"prepared": 30, "used": 0, "wasted": 0, "warm": made.runner.num_computed - 30, "waiting": 0}
    for i in range(2 * MAX_OF_TENANT):
        made.add(request(f"r{i}", text(i + 1, 30), max_tokens=1))
        made.add(request(f"o{i}", text(i + 1, 30), max_tokens=1, tenant=f"{i}"))
        made.run()
        assert (cached(made, f"r{i}"), cached(made, f"o{i}")) == (20, 0)


def test_what_is_known_at_the_start_has_its_time() -> None:
    now = 0.0
    made = FakeEngine(engine().scheduler.limits, clock=lambda: now, seconds=lambda plan: 0.01)
    for i in range(2):
        made.scheduler.add(known(f"k{i}", text(i + 1, 20), timeout=60.0))
    made.step()
    now = 60.1
    made.run_until_idle()
    assert made.runner.num_computed == 20
    assert made.scheduler.stats().next_turns["waiting"] == 0


def test_states_within_blocks_where_rows_and_blocks_are_few(monkeypatch: pytest.MonkeyPatch) -> None:
    """Beginnings are continued while others evict their blocks and rows. The runner compares every state."""
    begin, counts = Snapshots.begin, Counter[str]()

    def counted(self: Snapshots, seq: Sequence, prefix: Prefix) -> None:
        counts["tails"] += prefix.matches[0].tail is not None
        begin(self, seq, prefix)

    monkeypatch.setattr(Snapshots, "begin", counted)
    for seed in range(30):
        rng = random.Random(seed)
        made = engine(num_blocks=rng.choice([10, 14, 20]), first_snapshot=8, num_snapshots=rng.choice([2, 3, 6]))
        made.depth = rng.choice([1, 2])
        for turn in range(8):
            known = text(rng.randrange(3), 20) + text(100 * seed + turn, rng.randint(8, 25))
            made.scheduler.add(ahead(f"n{turn}", known))
            made.run_until_idle()
            for i in range(rng.randint(1, 3)):
                prompt = known if i == 0 else text(rng.randrange(3), 20)
                made.add(request(f"r{turn}.{i}", prompt + text(rng.randrange(99), rng.randint(1, 30)), max_tokens=3))
                for _ in range(rng.randint(0, 3)):
                    made.step()
                    made.scheduler.check_integrity()
                    assert made.scheduler.kv.snapshots is not None
                    counts["left"] += len(made.scheduler.kv.snapshots._left)
            made.run()
    assert counts["tails"] > 50
    assert counts["left"]
