"""Fair shares between tenants: the bound of lmkit.turbo.scheduling.fairness, priorities, seats and debts."""

from __future__ import annotations

import random
from collections import Counter

import pytest

from lmkit.turbo.request import Request
from lmkit.turbo.scheduling.scheduler import Scheduler
from tests.turbo.fakes import FakeEngine, limits, request
from tests.turbo.scheduling.test_scheduler_promises import Clock, started, text


def served(scheduler: Scheduler) -> Counter[str]:
    """Tokens of each tenant in the oldest plan under way."""
    tokens: Counter[str] = Counter()
    for seq, chunk in zip(scheduler._under_way[0].sequences, scheduler._under_way[0].plan.chunks, strict=True):
        tokens[seq.request.tenant] += chunk.num_tokens
    return tokens


@pytest.mark.parametrize("seed", range(12))
def test_tenants_that_wait_get_tokens_by_weight_within_the_bound(seed: int) -> None:
    """Each tenant sends requests of its own kind, one of them a thousand at once, and all wait all the time."""
    rng = random.Random(seed)
    clock = Clock()
    bounds = limits(
        num_blocks=rng.choice([16, 40]), max_batch_size=rng.choice([1, 4, 6]), max_model_len=24, max_queue=10_000,
        max_step_tokens=rng.choice([8, 24]),
    )  # fmt: skip
    engine = FakeEngine(bounds, clock=clock)
    weights = {"a": 1.0, "b": rng.choice([1.0, 3.0]), "c": rng.choice([0.5, 1.0])}
    shapes = {name: (rng.randint(1, 16), rng.randint(1, 8)) for name in weights}
    waiting, total, reached = dict.fromkeys(weights, 0), Counter[str](), 0.0
    history: list[dict[str, float]] = []
    bound = 2 * bounds.max_batch_size * bounds.max_model_len / min(weights.values())
    for step in range(1500):
        clock.now += 0.1
        for name, weight in weights.items():
            waiting[name] = len(engine.scheduler._waiting.of(name))
            flood = name == "a" and step == 0
            for i in range(1000 if flood else 0 if waiting[name] > 1 else 3):
                prompt, new = shapes[name]
                engine.add(request(f"{name}{step}-{i}", prompt, max_tokens=new, seed=i, tenant=name, weight=weight))
        plan = engine.schedule()
        assert plan is not None
        total += served(engine.scheduler)
        engine.land()
        history.append({name: total[name] / weight for name, weight in weights.items()})
        for one in weights:
            for other in weights:
                gaps = [now[one] - now[other] for now in (history[-1], history[rng.randrange(len(history))])]
                reached = max(reached, abs(gaps[0] - gaps[1]))
        assert reached <= bound
    assert sum(total.values()) > 10 * bound, "too few tokens to tell fair from unfair"


def test_a_flood_of_one_tenant_does_not_block_another() -> None:
    """The flood holds all seats with long answers. The other gets half of them, one in each step."""
    engine = FakeEngine(limits(max_batch_size=8, num_blocks=512, max_queue=2000, max_model_len=200, prefix_cache=True))
    engine.add(*(request(f"flood{i}", text(i, 3), max_tokens=190, tenant="a") for i in range(1024)))
    for _ in range(10):
        engine.step()
    engine.add(*(request(f"r{i}", text(5000 + i, 3), max_tokens=190, tenant="b") for i in range(10)))
    for _ in range(12):
        engine.step()
    running = Counter(seq.request.tenant for seq in engine.scheduler._slots.running.values())
    assert running == {"a": 4, "b": 4}
    assert engine.scheduler.stats().preemptions == 4
    assert engine.scheduler.stats().decisions["preempted: over its share"] == 4


def test_a_tenant_that_needs_a_block_takes_it_from_the_one_with_the_most_seats() -> None:
    engine = FakeEngine(limits(max_batch_size=4, num_blocks=8, block_size=4, prefix_cache=True))
    engine.add(*(request(f"a{i}", text(i, 5), max_tokens=12, tenant="a") for i in range(3)))
    engine.step()
    engine.add(request("b", text(9, 5), max_tokens=12, tenant="b"))
    while "b" not in engine.scheduler._slots.running:
        engine.step()
    while not (engine.outputs["b"] and engine.reason("b")):
        assert "b" in engine.scheduler._slots.running, (
            "the last to come was preempted, not one of the tenant's with most"
        )
        engine.step()
    assert engine.scheduler.stats().preemptions > 0
    engine.run()


@pytest.mark.parametrize("priority", [0, 1, 3])
def test_a_lower_priority_counts_until_its_time_of_waiting_is_over(priority: int) -> None:
    clock = Clock()
    engine = FakeEngine(limits(max_batch_size=1, priority_seconds=10.0, max_queue=500), clock=clock)
    engine.add(*(request(f"a{i}", 3, max_tokens=2, tenant="a") for i in range(200)))
    engine.add(request("low", 3, max_tokens=2, tenant="b", priority=priority))
    order: list[str] = []
    while "low" not in order:
        clock.now += 1.0
        engine.step()
        started(engine, order)
    assert 10 * priority <= clock.now <= 10 * priority + 8


def test_a_raised_priority_is_ahead_by_its_seconds_and_not_more() -> None:
    clock = Clock()
    engine = FakeEngine(limits(max_batch_size=1, priority_seconds=10.0, max_queue=5000), clock=clock)
    engine.add(*(request(f"a{i}", 3, max_tokens=2, tenant="a", priority=-2) for i in range(1000)))
    engine.add(*(request(f"b{i}", 3, max_tokens=2, tenant="b") for i in range(100)))
    order: list[str] = []
    while clock.now < 100:
        clock.now += 1.0
        engine.step()
        started(engine, order)
    first = next(i for i, name in enumerate(order) if name.startswith("b"))
    assert 8 <= first <= 12  # two steps for each
    later = Counter(name[0] for name in order[first:])
    assert abs(later["a"] - later["b"]) <= 2


def test_a_tenant_saves_nothing_up_while_it_asks_for_nothing() -> None:
    engine = FakeEngine(limits(max_batch_size=1, max_queue=5000))
    engine.add(*(request(f"a{i}", 3, max_tokens=2, tenant="a") for i in range(300)))
    engine.add(*(request(f"c{i}", 3, max_tokens=2, tenant="c") for i in range(300)))
    for _ in range(400):
        engine.step()
    engine.add(*(request(f"b{i}", 3, max_tokens=2, tenant="b") for i in range(100)))
    order: list[str] = []
    for _ in range(60):
        engine.step()
        started(engine, order)
    late = Counter(name[0] for name in order[-30:])
    assert max(late.values()) - min(late.values()) <= 2


def test_a_long_prompt_of_one_tenant_does_not_hold_up_short_ones_of_another() -> None:
    engine = FakeEngine(limits(num_blocks=200, max_model_len=600, max_step_tokens=16))
    engine.add(request("long", 500, max_tokens=1, tenant="a"), request("next", 100, max_tokens=1, tenant="a"))
    for _ in range(3):
        engine.step()
    engine.add(*(request(f"b{i}", 10, max_tokens=1, tenant="b") for i in range(2)))
    for _ in range(4):
        engine.step()
    assert all(engine.outputs[f"b{i}"] for i in range(2))
    engine.run()


def test_requests_of_one_tenant_are_admitted_as_without_tenants() -> None:
    def order(tenant: str) -> list[str]:
        clock = Clock()
        engine, rng = FakeEngine(limits(max_batch_size=2, prefix_cache=True), clock=clock), random.Random(1)
        names: list[str] = []
        requests: list[Request] = []
        for i in range(60):
            clock.now += rng.random()
            requests.append(
                request(f"r{i}", text(i % 9, rng.randint(1, 30)), tenant=tenant, priority=rng.choice([0, 0, 1, -1]))
            )
            engine.add(requests[-1])
            engine.step()
            started(engine, names)
        engine.run()
        started(engine, names)
        return names

    assert order("") == order("somebody")
