"""The registry and the policies, on a clock of the test's own."""

from collections import Counter
from random import Random
from typing import Any, get_args

import pytest

from lmkit.config import PolicyName
from lmkit.errors import RequestError
from lmkit.proxy.config import NodeConfig, ProxyConfig, Registration
from lmkit.proxy.policies import POLICIES, least_in_flight, random, round_robin
from lmkit.proxy.registry import Node, Registry


class Clock:
    now = 100.0

    def __call__(self) -> float:
        return self.now


def fleet(
    *names: str, models: tuple[str, ...] = ("m",), weights: tuple[float, ...] = (), **options: Any
) -> tuple[Registry, list[Node]]:
    registry = Registry(ProxyConfig(**options), Clock())
    nodes = []
    for i, name in enumerate(names):
        config = NodeConfig(url=f"http://{name}", models=models, weight=weights[i] if weights else 1.0)
        nodes.append(registry.add(config, "config"))
        registry.succeeded(nodes[-1])
    return registry, nodes


def test_thresholds_count_consecutive_checks() -> None:
    registry, (node,) = fleet("a", unhealthy_after=3, healthy_after=2)
    assert node.healthy  # the first good check is enough
    assert [registry.failed(node, "x"), registry.failed(node, "x")] == [False, False]
    assert not registry.succeeded(node)  # ends the row
    assert [registry.failed(node, "x") for _ in range(4)] == [False, False, True, False]
    assert not node.healthy
    assert node.reason == "x"
    assert [registry.succeeded(node), registry.succeeded(node)] == [False, True]
    assert node.healthy
    assert node.reason is None


def test_node_that_was_never_up_needs_good_checks_in_a_row() -> None:
    registry = Registry(ProxyConfig(healthy_after=2))
    node = registry.add(NodeConfig(url="http://a", models=("m",)), "config")
    registry.failed(node, "refused")
    assert [registry.succeeded(node), registry.succeeded(node)] == [False, True]


def test_no_candidates_is_an_empty_list_with_a_reason() -> None:
    registry, (node,) = fleet("a", unhealthy_after=1)
    assert registry.candidates("other") == []
    assert registry.absence("other").code == "model_not_found"
    registry.failed(node, "x")
    assert registry.candidates("m") == []
    error = registry.absence("m")
    assert (error.code, error.status) == ("engine_unavailable", 503)
    assert Registry(ProxyConfig()).absence("m").status == 404


def test_model_is_not_denied_before_every_node_could_say() -> None:
    registry, _ = fleet("a")
    silent = registry.add(NodeConfig(url="http://b"), "config")
    assert registry.absence("x").status == 503
    registry.succeeded(silent, {"y": {"id": "y"}})
    assert registry.absence("x").status == 404


def test_unknown_names_are_cut_in_messages() -> None:
    error = Registry(ProxyConfig()).absence("x" * 10_000 + "\n")
    assert len(error.message) < 200
    assert "\n" not in error.message


def test_models_are_a_union_of_healthy_nodes() -> None:
    registry, (a, b) = fleet("a", "b", unhealthy_after=1)
    registry.succeeded(a, {"m": {"id": "m", "owned_by": "a"}, "x": {"id": "x"}})
    registry.succeeded(b, {"m": {"id": "m", "owned_by": "b"}, "y": {"id": "y"}})
    assert [entry["id"] for entry in registry.models()] == ["m", "x", "y"]
    assert registry.models()[0]["owned_by"] == "a"
    registry.failed(b, "x")
    assert [entry["id"] for entry in registry.models()] == ["m", "x"]


def test_in_flight_survives_errors_removal_and_renewal() -> None:
    registry, (a,) = fleet("a")
    with pytest.raises(RequestError), registry.using(a):  # noqa: PT012
        with registry.using(a):
            assert a.in_flight == 2
        again = registry.add(NodeConfig(url="http://a", models=("m", "n")), "added")
        assert again is a
        assert (a.in_flight, a.healthy, sorted(a.models or ())) == (1, True, ["m", "n"])
        registry.remove("http://a")
        raise RequestError("bad_gateway", "x")
    assert a.in_flight == 0
    assert registry.remove("http://a") is None


def test_lease_runs_out_unless_renewed() -> None:
    clock = Clock()
    registry = Registry(ProxyConfig(), clock)
    registration = Registration(url="http://a", lease_seconds=10)
    registry.add(registration, "added")
    registry.add(Registration(url="http://b"), "added")
    clock.now += 9
    assert registry.expired() == []
    registry.add(registration, "added")
    clock.now += 9
    assert registry.expired() == []
    assert registry.status()[0]["lease_seconds_left"] == 1.0
    clock.now += 1
    assert registry.expired() == ["http://a"]


def test_status_never_tells_a_key() -> None:
    registry = Registry(ProxyConfig())
    registry.add(NodeConfig(url="http://a", api_key="sesame"), "config")
    assert "sesame" not in str(registry.status())


def test_latency_is_a_moving_average() -> None:
    registry, (a,) = fleet("a")
    registry.answered(a, "m", 200, 1.0)
    assert a.latency == 1.0
    for _ in range(100):
        registry.answered(a, "m", 200, 3.0)
    assert a.latency == pytest.approx(3.0, abs=0.01)
    assert a.answers["m", 200] == 101


@pytest.mark.parametrize("name", POLICIES)
def test_every_policy_gives_a_fresh_node_its_share(name: str) -> None:
    """A node without any history must not wait behind those that have one."""
    registry, nodes = fleet("a", "b")
    for node in nodes:
        registry.answered(node, "m", 200, 0.001)
    fresh = registry.add(NodeConfig(url="http://c", models=("m",)), "added")
    registry.succeeded(fresh)
    rng, picks = Random(1), Counter[str]()
    for _ in range(300):
        node = POLICIES[name](registry.candidates("m"), rng)
        with registry.using(node):
            picks[node.url] += 1
    assert min(picks.values()) > 60
    assert len(picks) == 3


def test_least_in_flight_goes_by_weight() -> None:
    registry, (a, b) = fleet("a", "b", weights=(1.0, 3.0))
    a.in_flight, b.in_flight = 1, 2
    assert least_in_flight(registry.candidates("m"), Random(0)) is b
    b.in_flight = 4
    assert least_in_flight(registry.candidates("m"), Random(0)) is a
    a.in_flight = b.in_flight = 0
    picks = Counter(least_in_flight([a, b], Random(i)).url for i in range(2000))
    assert picks["http://b"] / 2000 == pytest.approx(0.75, abs=0.05)


def test_round_robin_takes_turns_when_nodes_come_and_go() -> None:
    registry, (a, b, c) = fleet("a", "b", "c")

    def turn(*among: Node) -> Node:
        node = round_robin(among, Random(0))
        with registry.using(node):
            return node

    assert [turn(a, b, c) for _ in range(4)] == [a, b, c, a]
    assert [turn(a, c) for _ in range(3)] == [c, a, c]
    assert turn(a, b, c) is b


def test_random_is_drawn_by_weight() -> None:
    _, nodes = fleet("a", "b", weights=(1.0, 4.0))
    rng = Random(3)
    picks = Counter(random(nodes, rng).url for _ in range(2000))
    assert picks["http://b"] / 2000 == pytest.approx(0.8, abs=0.05)


def test_every_policy_can_be_asked_for() -> None:
    assert POLICIES.keys() == set(get_args(PolicyName))
