"""The policies, on nodes that have neither sockets nor a clock."""

from collections import Counter
from random import Random
from typing import get_args

import pytest

from lmkit.config import PolicyName
from lmkit.proxy import policies
from lmkit.proxy.policies import POLICIES, Ask
from lmkit.proxy.registry import Node
from tests.proxy.test_registry import fleet

ASK = Ask()


def test_every_policy_can_be_asked_for() -> None:
    assert POLICIES.keys() == set(get_args(PolicyName))


@pytest.mark.parametrize("name", POLICIES)
def test_every_policy_gives_a_fresh_node_its_share(name: PolicyName) -> None:
    """A node without any history must not wait behind those that have one."""
    registry, nodes = fleet("a", "b")
    for node in nodes:
        with registry.prefilling(node, 10):
            registry.clock.now += 0.001  # type: ignore[attr-defined]
    for node in nodes:
        registry.answered(node, "m", 200, 0.001)
    fresh, _ = fleet("c")
    nodes.append(registry.add(fresh.nodes()[0].config, "added"))
    registry.succeeded(nodes[-1])
    rng, picks = Random(1), Counter[str]()
    for i in range(300):
        node = POLICIES[name](registry.candidates("m"), Ask(10, str(i), now=registry.clock()), rng).node
        with registry.using(node):
            picks[node.url] += 1
    assert len(picks) == 3
    assert min(picks.values()) > 60


@pytest.mark.parametrize("name", sorted(POLICIES.keys() - {"round_robin", "random", "session"}))
def test_load_counts_for_the_weight(name: PolicyName) -> None:
    _, nodes = fleet("a", "b", weights=(1.0, 3.0))
    a, b = nodes
    for node in nodes:
        node.latency, node.latency_at = 1.0, 0.0
    a.in_flight, b.in_flight = 2, 8
    assert POLICIES[name](nodes, ASK, Random(0)).node is a
    a.in_flight, b.in_flight = 8, 2
    assert POLICIES[name](nodes, ASK, Random(0)).node is b


def test_least_in_flight_goes_by_weight() -> None:
    _, (a, b) = fleet("a", "b", weights=(1.0, 3.0))
    a.in_flight, b.in_flight = 1, 2
    assert policies.least_in_flight([a, b], ASK, Random(0)).node is b
    b.in_flight = 4
    assert policies.least_in_flight([a, b], ASK, Random(0)).node is a
    a.in_flight = b.in_flight = 0
    picks = Counter(policies.least_in_flight([a, b], ASK, Random(i)).node.url for i in range(2000))
    assert picks["http://b"] / 2000 == pytest.approx(0.75, abs=0.05)


def test_requests_of_others_count() -> None:
    _, (a, b) = fleet("a", "b")
    a.others, b.in_flight = 5, 4
    for policy in (policies.least_in_flight, policies.least_tokens, policies.power_of_two, policies.prefix):
        assert policy([a, b], ASK, Random(0)).node is b


def test_round_robin_takes_turns_when_nodes_come_and_go() -> None:
    registry, (a, b, c) = fleet("a", "b", "c")

    def turn(*among: Node) -> Node:
        node = policies.round_robin(among, ASK, Random(0)).node
        with registry.using(node):
            return node

    assert [turn(a, b, c) for _ in range(4)] == [a, b, c, a]
    assert [turn(a, c) for _ in range(3)] == [c, a, c]
    assert turn(a, b, c) is b


def test_random_is_drawn_by_weight() -> None:
    _, nodes = fleet("a", "b", weights=(1.0, 4.0))
    rng = Random(3)
    picks = Counter(policies.random(nodes, ASK, rng).node.url for _ in range(2000))
    assert picks["http://b"] / 2000 == pytest.approx(0.8, abs=0.05)


def test_prefix_stays_until_the_queue_costs_more_than_the_cache_saves() -> None:
    _, (a, b) = fleet("a", "b")
    a.queued = b.queued = 9000
    ask = Ask(tokens=2000, cached={a: 1500})
    a.queued += int(policies.STAY * 1500) - 1
    assert policies.prefix([a, b], ask, Random(0)).node is a
    a.queued += 2
    choice = policies.prefix([a, b], ask, Random(0))
    assert (choice.node, choice.reason) == (b, "0 of 2000 tokens cached, 9000 before it")


def test_prefix_leaves_a_node_with_far_more_load_than_the_others() -> None:
    """A beginning that all prompts share must not make one node hot while the others idle."""
    _, nodes = fleet("a", "b", "c", "d")
    ask = Ask(tokens=4000, cached={nodes[0]: 3900})
    for load, stays in ((1000, True), (10_000, False)):
        nodes[0].queued = load
        choice = policies.prefix(nodes, ask, Random(0))
        assert (choice.node is nodes[0]) is stays
        assert ("overloaded" in choice.reason) is not stays


def test_power_of_two_never_takes_the_worst_and_not_always_the_best() -> None:
    _, nodes = fleet("a", "b", "c")
    for i, node in enumerate(nodes):
        node.in_flight = i
    picks = Counter(policies.power_of_two(nodes, ASK, Random(i)).node.url for i in range(300))
    assert picks.keys() == {"http://a", "http://b"}
    assert min(picks.values()) > 60


def test_sessions_move_only_from_a_node_that_leaves() -> None:
    _, nodes = fleet("a", "b", "c", "d", weights=(1, 1, 1, 3))
    before = {str(i): policies.session(nodes, Ask(session=str(i)), Random(i)).node for i in range(2000)}
    counts = Counter(node.url for node in before.values())
    assert counts["http://d"] / 2000 == pytest.approx(0.5, abs=0.05)
    assert counts["http://a"] / 2000 == pytest.approx(1 / 6, abs=0.04)
    left = nodes[1:]
    for name, node in before.items():
        now = policies.session(left, Ask(session=name), Random(0)).node
        assert now is node or node is nodes[0]


def test_session_without_a_name_goes_by_load() -> None:
    _, (a, b) = fleet("a", "b")
    a.queued = 1
    assert all(policies.session([a, b], ASK, Random(i)).node is b for i in range(20))


def test_expected_latency_goes_by_the_pace_and_what_waits() -> None:
    _, (a, b) = fleet("a", "b")
    a.work, a.worked, b.work, b.worked = 1000.0, 1.0, 1000.0, 4.0
    ask = Ask(tokens=100)
    assert policies.min_expected_latency([a, b], ask, Random(0)).node is a
    a.queued = 200
    assert policies.min_expected_latency([a, b], ask, Random(0)).node is a
    a.queued = 400
    assert policies.min_expected_latency([a, b], ask, Random(0)).node is b


def test_observed_latency_fades_so_that_a_node_is_tried_again() -> None:
    _, (a, b) = fleet("a", "b")
    a.latency, a.latency_at = 10.0, 0.0
    b.latency = 0.1
    for now, chosen in ((1.0, b), (100.0, b), (250.0, a)):
        b.latency_at = now
        assert policies.min_observed_latency([a, b], Ask(now=now), Random(0)).node is chosen
    b.in_flight, a.latency_at = 200, 250.0
    assert policies.min_observed_latency([a, b], Ask(now=250.0), Random(0)).node is a
