"""The registry, on a clock of the test's own."""

from typing import Any

import pytest

from lmkit.errors import RequestError
from lmkit.proxy.config import NodeConfig, ProxyConfig, Registration
from lmkit.proxy.prefixes import cuts
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


def test_a_node_that_went_down_and_came_back_gets_requests_at_once() -> None:
    registry, (node, other) = fleet("a", "b", unhealthy_after=1, breaker_failures=2)
    for _ in range(2):
        node.breaker.record(good=False)  # its streams, when it was killed
    assert registry.candidates("m") == [other]
    registry.succeeded(node)  # its checks were good all the time: the breaker stays as it is
    assert registry.candidates("m") == [other]
    registry.failed(node, "Connection refused")
    registry.succeeded(node)
    assert registry.candidates("m") == [node, other]


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
    assert Registry(ProxyConfig(node_wait=0.0)).absence("m").status == 404


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
    assert [entry["id"] for entry in registry.models({})] == ["m", "x", "y"]
    assert registry.models({})[0]["owned_by"] == "a"
    registry.failed(b, "x")
    assert [entry["id"] for entry in registry.models({})] == ["m", "x"]


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


def test_tokens_before_a_first_byte_are_counted_and_give_the_pace() -> None:
    clock = Clock()
    registry = Registry(ProxyConfig(), clock)
    node = registry.add(NodeConfig(url="http://a"), "config")
    with registry.prefilling(node, 1000):
        assert (node.queued, node.load) == (1000, 1000)
        clock.now += 2
    assert (node.queued, node.work / node.worked) == (0, 500.0)
    with pytest.raises(RequestError), registry.prefilling(node, 1000):
        raise RequestError("bad_gateway", "x")
    assert (node.queued, node.work / node.worked) == (0, 500.0)  # a failure says nothing about the pace


def test_prefixes_of_a_node_that_went_down_are_forgotten() -> None:
    registry, (a, b) = fleet("a", "b", unhealthy_after=1)
    prompt = cuts([b"x" * 1024])
    for node in (a, b):
        registry.prefixes.add(node, prompt)
    registry.failed(a, "x")
    assert registry.prefixes.cached(prompt) == {b: 256}
    registry.remove(b.url)
    assert len(registry.prefixes) == 0
