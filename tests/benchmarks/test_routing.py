"""The simulation of the routing layer: it repeats itself, loses nothing, and prefixes pay."""

from __future__ import annotations

from random import Random

import pytest

from benchmarks.routing.__main__ import PHASES, ideal, machines, policy, smg, storm
from benchmarks.routing.sim import Machine, Simulation
from benchmarks.routing.trace import Ask, Conversation, Shape
from lmkit.proxy.prefixes import cuts

SMALL = Shape(requests=600, rate=1.0)


def test_a_seed_gives_the_same_run() -> None:
    runs = [Simulation("power_of_two", [Machine()] * 4, SMALL, seed=seed).run() for seed in (1, 1, 2)]
    assert runs[0] == runs[1]
    assert runs[0].ttft != runs[2].ttft


def test_the_made_up_cuts_are_those_of_a_text() -> None:
    ask = Ask(conversation=1, group=2, group_tokens=700, tokens=3000, output=1)
    real = cuts([bytes(4 * ask.tokens)])
    assert [cut.end for cut in ask.cuts()] == [cut.end for cut in real]
    other = Ask(conversation=9, group=2, group_tokens=700, tokens=3000, output=1)
    same = [a == b for a, b in zip(ask.cuts(), other.cuts(), strict=True)]
    assert sum(same) == 700 * 4 // 256


def test_a_conversation_grows_by_its_answers() -> None:
    conversation = Conversation(1, 1, Shape(1, 1.0, turns=30), Random(0))
    conversation.left = 3
    first, second, third = (conversation.next() for _ in range(3))
    assert second.tokens > first.tokens + first.output
    assert third.tokens > second.tokens + second.output
    assert conversation.left == 0


def test_conversations_find_95_percent_of_what_one_ideal_node_finds() -> None:
    shape = Shape(requests=3000, rate=0.8)
    best = Simulation("prefix", [ideal(4)], shape).run().hit_rate
    ours, theirs, blind = (
        Simulation(policy(name), [Machine()] * 4, shape).run() for name in ("prefix", "smg", "least_tokens")
    )
    assert ours.hit_rate >= 0.95 * best
    assert ours.hit_rate >= theirs.hit_rate - 0.005
    assert blind.hit_rate < 0.7 * best
    assert ours.quantile(0.99) < blind.quantile(0.99)


def test_a_prompt_that_all_share_makes_no_node_hot() -> None:
    shape = Shape(requests=1500, rate=9.0, turns=1, groups=1, system=6000, user=300, output=50)
    ours, blind, theirs = (
        Simulation(policy(name), [Machine()] * 4, shape).run() for name in ("prefix", "least_tokens", "smg")
    )
    assert ours.quantile(0.99) < theirs.quantile(0.99) / 2
    assert ours.quantile(0.5) < 5 * blind.quantile(0.5)


@pytest.mark.parametrize("name", ["prefix", "session", "least_tokens", "smg"])
def test_a_storm_loses_no_request_and_leaves_no_count(name: str) -> None:
    shape = Shape(requests=1200, rate=5.0, turns=3)
    sim = Simulation(policy(name), machines(20), shape, disturbances=storm(90.0, 20, shape, 3))
    result = sim.run()
    assert result.ends > 90
    assert len(result.ttft) == sim.started >= shape.requests
    assert result.retries > 20
    for node, engine in sim.engines.items():
        assert (node.in_flight, node.queued, len(engine.running)) == (0, 0, 0)
    assert all(result.quantile(0.99, 90 * start, 90 * end) < 60 for start, end in PHASES.values())


def test_the_policy_of_smg_is_as_described() -> None:
    from lmkit.proxy.policies import Ask as Known
    from tests.proxy.test_registry import fleet

    _, (a, b) = fleet("a", "b")
    assert smg([a, b], Known(100, cached={b: 31}), Random(0)).node is b
    b.in_flight = 60
    assert smg([a, b], Known(100, cached={b: 31}), Random(0)).node is b
    assert smg([a, b], Known(100, cached={b: 30}), Random(0)).node is a
    b.in_flight = 65
    assert smg([a, b], Known(100, cached={b: 31}), Random(0)).node is a
