"""Outliers, slow start and the budget of retries, under a virtual clock."""

from __future__ import annotations

from random import Random
from typing import Any

import pytest

from lmkit.proxy.breaker import WINDOW
from lmkit.proxy.outliers import FIRST_SHARE, MIN_SAMPLES, ramps
from lmkit.proxy.policies import Ask, least_tokens, random
from lmkit.proxy.registry import Node, Registry
from lmkit.proxy.retries import FIRST_PAUSE, LONGEST_PAUSE, REFILL, RetryBudget
from tests.proxy.test_registry import Clock, fleet


def answer(registry: Registry, node: Node, seconds: float, *, tokens: int = 1000, times: int = MIN_SAMPLES) -> None:
    for _ in range(times):
        with registry.prefilling(node, tokens):
            registry.clock.now += seconds  # type: ignore[attr-defined]
        registry.answered(node, "m", 200, seconds)


def measured(count: int, slow: int = 0, **options: Any) -> tuple[Registry, list[Node]]:
    """So many nodes, the first of which are ten times as slow as the others."""
    registry, nodes = fleet(*(f"n{i}" for i in range(count)), **options)
    for i, node in enumerate(nodes):
        answer(registry, node, 5.0 + 0.1 * i if i < slow else 0.5)
    return registry, nodes


def test_a_slow_node_is_ejected_and_judged_anew() -> None:
    registry, (slow, *others) = measured(4, slow=1)
    assert list(registry.eject()) == [slow]
    assert registry.candidates("m") == others
    shown = registry.status()[0]
    assert (shown["breaker"], shown["ejections"]) == ("open", 1)
    assert shown["breaker_reason"] == "its first bytes take 5 s, those of others 0.5 s"
    assert registry.resting("m") == 1
    assert registry.eject() == {}
    registry.clock.now += 20  # type: ignore[attr-defined]
    assert slow in registry.candidates("m")
    for left in reversed(range(MIN_SAMPLES)):
        with registry.using(slow):
            assert slow not in registry.candidates("m")  # one request after the other
            answer(registry, slow, 5.0, times=1)
            slow.breaker.record(good=True)
        assert slow.breaker.state == ("half-open" if left else "closed")
    assert list(registry.eject()) == [slow]


@pytest.mark.parametrize(("seconds", "tokens"), [(5.0, 12_000), (0.5, 80)])
def test_a_node_with_other_prompts_is_no_outlier(seconds: float, tokens: int) -> None:
    """Long prompts take long at a good pace; short ones are quick at a bad pace."""
    registry, nodes = fleet("a", "b", "c")
    for node in nodes[1:]:
        answer(registry, node, 0.5)
    answer(registry, nodes[0], seconds, tokens=tokens)
    assert registry.eject() == {}


def test_at_most_a_share_of_the_nodes_rests() -> None:
    registry, nodes = measured(10, slow=4)
    assert list(registry.eject()) == [nodes[3], nodes[2], nodes[1]]  # the worst ones
    assert len(registry.candidates("m")) == 7
    registry, nodes = measured(10, slow=4)
    for node in nodes[8:]:
        node.breaker.eject("of another reason")
    assert list(registry.eject()) == [nodes[3]]
    assert measured(10, slow=4, max_ejected=0.0)[0].eject() == {}
    assert measured(2, slow=1)[0].eject() == {}  # nobody knows which of two is the outlier


def test_nodes_of_another_kind_are_not_compared() -> None:
    registry, nodes = fleet("a", "b", "c", "d", weights=(0.1, 1.0, 1.0, 1.0))
    for node in nodes:
        answer(registry, node, 5.0 if node is nodes[0] else 0.5)
    assert registry.eject() == {}


def test_a_node_that_fails_more_often_than_others_is_ejected() -> None:
    registry, (bad, *others) = measured(4)
    bad.firsts.clear()  # it has not answered at all
    for i in range(WINDOW):
        bad.breaker.record(good=bool(i % 4))
        others[0].breaker.record(good=i > 0)
    assert bad.breaker.state == "closed"  # by itself
    assert list(registry.eject()) == [bad]
    assert bad.breaker.why == "25% of its last requests failed, of others' 0%"
    registry, nodes = measured(4)
    for node in nodes:  # requests that break every node
        for i in range(WINDOW):
            node.breaker.record(good=bool(i % 4))
    assert registry.eject() == {}


def test_outliers_can_be_left_alone() -> None:
    registry, _ = measured(4, slow=1, outlier_factor=None)
    assert registry.eject() == {}


def test_the_weight_of_a_node_that_comes_grows() -> None:
    registry, (a, b) = fleet("a", "b", slow_start_seconds=10.0, unhealthy_after=1)
    clock = registry.clock
    assert isinstance(clock, Clock)
    assert registry.ramps([a, b]) == {}  # both came at one time
    clock.now += 60
    registry.failed(a, "x")
    registry.succeeded(a)
    for seconds, share in ((0, FIRST_SHARE), (5, 0.5), (9, 0.9), (10, None)):
        clock.now = 160.0 + seconds
        assert registry.ramps([a, b]).get(a) == share
        assert b not in registry.ramps([a, b])
    assert registry.ramps([a]) == {}
    a.breaker.eject("x")
    clock.now += 60
    a.breaker.record(good=True)
    assert registry.ramps([a, b]) == {a: FIRST_SHARE}
    assert registry.status()[0]["ramp"] == FIRST_SHARE
    assert ramps({}, 10.0) == {}


def test_policies_go_by_the_weight_that_has_grown() -> None:
    _, (a, b) = fleet("a", "b")
    ask, rng = Ask(ramps={a: 0.1}), Random(0)
    assert 100 < sum(random([a, b], ask, rng).node is a for _ in range(2000)) < 260
    a.queued, b.queued = 50, 400
    assert least_tokens([a, b], ask, rng).node is b
    assert least_tokens([a, b], Ask(), rng).node is a


def test_a_dead_cluster_gets_a_share_of_retries() -> None:
    clock = Clock()
    budget = RetryBudget(0.2, 100, clock, Random(0))
    sent = 0
    for _ in range(10_000):  # in a hundred seconds
        clock.now += 0.01
        budget.earn()
        sent += budget.spend()
    assert sent == pytest.approx(100 + 0.2 * 10_000 + REFILL * 100, abs=2)
    assert (budget.spent, budget.refused) == (sent, 10_000 - sent)
    clock.now += 3600
    assert budget.left == 100


def test_pauses_grow_and_differ() -> None:
    budget = RetryBudget(0.2, 1, Clock(), Random(0))
    for number, longest in ((1, FIRST_PAUSE), (2, 2 * FIRST_PAUSE), (20, LONGEST_PAUSE)):
        pauses = [budget.pause(number) for _ in range(200)]
        assert 0 <= min(pauses) < longest / 10
        assert 0.9 * longest < max(pauses) <= longest
