"""Nodes that register themselves: what they may say, how long it holds, and what others cannot take from them."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import httpx
import pytest

from lmkit.errors import RequestError
from lmkit.proxy.announce import MAX_NAMES, Announcement, no_names, no_place, registration
from lmkit.proxy.app import Proxy
from lmkit.proxy.config import NodeConfig, ProxyConfig
from lmkit.proxy.fleet import load_state
from lmkit.proxy.registry import Registry
from tests.proxy.fakes import BODY, CHAT, Exchange, FakeNode, client, eventually, nodes, proxy_for
from tests.proxy.test_prefixes import cuts

pytestmark = pytest.mark.anyio
KEYS = ("first-owner-key-1 role=node", "other-owner-key-2 role=node", "user")


async def announce(http: httpx.AsyncClient, fake: FakeNode, key: str = "first-owner-key-1", **fields: Any) -> Any:
    body = {"port": fake.port, "models": dict.fromkeys(fake.models, "w1"), "instance": "i1", **fields}
    return await http.post("/nodes", json=body, headers={"authorization": f"Bearer {key}"})


async def test_registration_needs_a_node_key() -> None:
    async with nodes(FakeNode()) as (fake,):
        async with proxy_for(api_keys=KEYS, admin_keys=("admin",)) as (proxy, url), client(url) as http:
            assert (await announce(http, fake, "wrong")).status_code == 401
            assert (await announce(http, fake, "user")).status_code == 403
            assert proxy.registry.nodes() == []
            assert (await announce(http, fake)).json() == {"url": fake.url, "healthy": True}
            key = {"authorization": "Bearer first-owner-key-1"}  # is good for nothing else
            assert (await http.post(CHAT, content=BODY, headers=key)).status_code == 403
            assert (await http.get("/admin/nodes", headers=key)).status_code == 403
            assert (await http.post(CHAT, content=BODY, headers={"authorization": "Bearer user"})).status_code == 200
        async with proxy_for() as (_, url), client(url) as http:
            answer = await announce(http, fake)
            assert (answer.status_code, "no key with role=node" in answer.text) == (403, True)
        async with proxy_for(api_keys=KEYS[:2]) as (_, url), client(url) as http:  # clients need no key then
            assert (await announce(http, fake)).status_code == 200
            assert (await http.post(CHAT, content=BODY)).status_code == 200


def announced(**fields: Any) -> Announcement:
    return Announcement(**{"port": 8000, "models": {"m": ""}, "instance": "i", **fields})


@pytest.mark.parametrize(
    ("peer", "url", "allowed", "expected"),
    [
        ("10.0.0.5", None, (), "http://10.0.0.5:8000"),
        ("::ffff:10.0.0.5", None, (), "http://[::ffff:10.0.0.5]:8000"),
        ("fd00::5", None, (), "http://[fd00::5]:8000"),
        ("10.0.0.5", "http://10.0.0.5:9000/x", (), "http://10.0.0.5:9000/x"),
        ("::ffff:10.0.0.5", "http://10.0.0.5:9000", (), "http://10.0.0.5:9000"),
        ("10.0.0.5", "http://10.0.0.6:8000", (), None),
        ("10.0.0.5", "http://10.0.0.6:8000", ("10.0.0.0/24",), "http://10.0.0.6:8000"),
        ("10.0.0.5", "http://10.0.1.6:8000", ("10.0.0.0/24",), None),
        ("10.0.0.5", "http://a.nodes.example", (), None),
        ("10.0.0.5", "http://a.nodes.example", ("*.nodes.example",), "http://a.nodes.example"),
        ("10.0.0.5", "http://nodes.example.evil", ("*.nodes.example",), None),
        ("10.0.0.5", "http://169.254.169.254", ("0.0.0.0/0", "*"), None),
        ("10.0.0.5", "http://metadata.google.internal", ("*",), None),
        ("10.0.0.5", "http://0x0a000005:8000", ("*",), None),
        ("169.254.169.254", None, (), None),
        ("", None, (), None),
    ],
)
async def test_a_node_names_no_host_but_its_own(
    peer: str, url: str | None, allowed: tuple[str, ...], expected: str | None
) -> None:
    if expected is None:
        with pytest.raises(RequestError):
            registration(announced(url=url), peer, allowed)
    else:
        assert registration(announced(url=url), peer, allowed).url == expected


async def test_no_connection_is_made_to_a_host_that_may_not_be_named() -> None:
    async with nodes(FakeNode()) as (fake,), proxy_for(api_keys=KEYS) as (proxy, url), client(url) as http:
        answer = await announce(http, fake, url=f"http://localhost:{fake.port}")
        assert (answer.status_code, "its own address only" in answer.text) == (403, True)
        assert fake.connections == 0
        assert proxy.registry.nodes() == []


async def test_a_name_is_not_taken_over() -> None:
    fakes = FakeNode("a"), FakeNode("b"), FakeNode("c")
    async with nodes(*fakes) as (a, b, c), proxy_for(api_keys=KEYS) as (proxy, url), client(url) as http:
        assert (await announce(http, a)).status_code == 200
        other = await announce(http, b, "other-owner-key-2")
        assert (other.status_code, "belongs to another owner" in other.text) == (403, True)
        stolen = await announce(http, a, "other-owner-key-2")
        assert (stolen.status_code, "node of another owner" in stolen.text) == (403, True)
        assert (await announce(http, a, "other-owner-key-2", state="leaving")).status_code == 403
        weights = await announce(http, b, models={"m": "w2"})
        assert (weights.status_code, "with other weights" in weights.text) == (403, True)
        assert [node.url for node in proxy.registry.nodes()] == [a.url]
        assert (await announce(http, b, "other-owner-key-2", models={"n": "w2"})).status_code == 200
        assert (await announce(http, c)).status_code == 200
        for fake in (a, c):  # a new version of the weights, once the old one is gone
            assert (await announce(http, fake, state="leaving")).status_code == 200
        assert (await announce(http, a, models={"m": "w2"})).status_code == 200


async def test_a_name_stays_its_owners_while_no_node_of_theirs_is_here(tmp_path: Path) -> None:
    """Not when the node restarts, nor when the proxy does, until an administrator removes it."""
    fakes, options = (FakeNode("a"), FakeNode("b")), {"state_file": str(tmp_path / "state.json"), "api_keys": KEYS}
    async with nodes(*fakes) as (a, b):
        async with proxy_for(**options) as (_, url), client(url) as http:
            assert (await announce(http, a)).status_code == 200
            assert (await announce(http, a, state="leaving")).status_code == 200
            taken = await announce(http, b, "other-owner-key-2", lease_seconds=3600)
            assert (taken.status_code, "belongs to another owner" in taken.text) == (403, True)
        async with proxy_for(**options, admin_keys=("admin",)) as (_, url), client(url) as http:
            assert (await announce(http, b, "other-owner-key-2")).status_code == 403
            assert (await announce(http, a)).status_code == 200
            admin = {"authorization": "Bearer admin"}
            assert (await http.delete("/admin/nodes", params={"url": a.url}, headers=admin)).status_code == 200
            assert (await announce(http, b, "other-owner-key-2")).status_code == 200


async def test_names_of_an_administrators_nodes_are_no_one_elses(tmp_path: Path) -> None:
    """Also while they are away and the proxy starts anew, and a node that was there before is removed."""
    fakes, options = (FakeNode("a"), FakeNode("b")), {"state_file": str(tmp_path / "state.json"), "api_keys": KEYS}
    options |= {"health_interval": 0.05, "aliases": {"short": "m"}}
    async with nodes(*fakes) as (a, b):
        a.health = 500
        async with proxy_for(a, **options) as (proxy, url), client(url) as http:
            assert (await announce(http, b)).status_code == 200
            a.health = 200
            await eventually(lambda: [node.url for node in proxy.registry.nodes()] == [a.url])
            for name in ("m", "m:latest", "short", "short:latest"):
                taken = await announce(http, b, models={name: "w1"})
                assert (taken.status_code, "belongs to another owner" in taken.text) == (403, True), name
        a.health = 500
        async with proxy_for(a, **options) as (proxy, url), client(url) as http:
            assert (await announce(http, b)).status_code == 403
        async with proxy_for(**options) as (proxy, url), client(url) as http:  # they have left the configuration
            assert (await announce(http, b)).status_code == 200


def test_one_key_takes_only_a_share_of_the_names() -> None:
    owners, names = {"a", "b"}, {str(i): "a" for i in range(MAX_NAMES)}
    assert no_names("a", owners, names)
    few = dict(list(names.items())[: MAX_NAMES * 3 // 4])
    assert not no_names("a", owners, few)
    assert no_names("a", owners, few | {"x": "a"})
    assert not no_names("b", owners, few | {"x": "b"})


async def test_a_model_whose_node_is_away_is_expected_back(tmp_path: Path) -> None:
    """503, which clients repeat, after a lease has ended, a node has left, and the proxy has started anew."""
    fakes, options = (FakeNode("a"), FakeNode("b")), {"state_file": str(tmp_path / "state.json"), "api_keys": KEYS[:2]}
    async with nodes(*fakes) as (a, b):
        async with proxy_for(**options) as (proxy, url), client(url) as http:

            async def asked(model: str) -> tuple[int, bool]:
                answer = await http.post(CHAT, json={"model": model})
                return answer.status_code, "retry-after" in answer.headers

            assert (await announce(http, a)).status_code == 200
            assert (await announce(http, b, models={"n": ""})).status_code == 200
            assert (await announce(http, a, state="leaving")).status_code == 200
            now = proxy.registry.clock()
            proxy.registry.clock = lambda: now + 60
            assert await proxy.fleet.expire() == [b.url]
            assert [await asked(model) for model in ("m", "n")] == [(503, True)] * 2
            assert (await asked("never-here"))[0] == 404
            assert not proxy.registry.may_return("n", now)  # of the tests, node_wait is 0
        async with proxy_for(**options, node_wait=30.0) as (proxy, url), client(url) as http:
            asking = [asyncio.create_task(http.post(CHAT, json={"model": model})) for model in ("m", "never-here")]
            await eventually(lambda: set(proxy.registry.held) == {"m", "never-here"})  # a node may not know yet
            assert (await announce(http, a)).status_code == 200
            assert [(await task).status_code for task in asking] == [200, 404]


async def test_one_key_does_not_fill_all_places() -> None:
    owners = {"a", "b"}

    def full(owner: str, *counts: int) -> bool:
        registry = Registry(ProxyConfig())
        for i, name in enumerate(name for name, count in zip("ab", counts, strict=True) for _ in range(count)):
            registry.add(NodeConfig(url=f"http://10.0.0.{i}"), "registered").owner = name
        return bool(no_place(owner, owners, registry.nodes(), 16))

    assert not full("a", 11, 0)
    assert full("a", 12, 0)  # four are kept for the other
    assert not full("b", 12, 3)
    assert not full("b", 4, 11)
    assert full("b", 8, 8)


async def test_a_node_key_changes_no_node_of_an_administrator() -> None:
    fakes = FakeNode("a"), FakeNode("b")
    async with nodes(*fakes) as (a, b), proxy_for(a, api_keys=KEYS) as (proxy, url), client(url) as http:
        assert (await announce(http, b)).status_code == 403  # the name belongs to the administrator's node
        load = {"running": 3, "waiting": 2, "kv_use": 0.5}
        assert (await announce(http, a, models={"x": ""}, weight=9, load=load)).status_code == 200
        (node,) = proxy.registry.nodes()
        assert (node.origin, sorted(node.models or ()), node.config.weight) == ("config", ["m"], 1.0)
        assert (node.others, node.kv_use, node.lease_until, node.admits) == (5, 0.5, None, True)
        assert (await announce(http, a, state="leaving")).status_code == 200
        assert proxy.registry.nodes() == [node]
        assert not node.admits


async def test_a_lease_is_renewed_and_ends(tmp_path: Path) -> None:
    state = str(tmp_path / "state.json")
    options: dict[str, Any] = {"api_keys": KEYS, "state_file": state, "health_interval": 0.02}
    async with nodes(FakeNode()) as (fake,), proxy_for(**options) as (proxy, url), client(url) as http:
        now = 1000.0
        proxy.registry.clock = lambda: now
        for _ in range(3):
            assert (await announce(http, fake, lease_seconds=10)).status_code == 200
            (node,) = proxy.registry.nodes()
            assert node.lease_until == now + 10
            now += 9
        now += 2
        await eventually(lambda: proxy.registry.nodes() == [], 30)
        assert load_state(Path(state)).added == ()  # it comes again by itself, also to a proxy that starts anew
        assert (await announce(http, fake)).json()["healthy"] is True


async def test_draining_leaving_and_coming_again() -> None:
    fakes = FakeNode("a"), FakeNode("b")
    async with nodes(*fakes) as (a, b), proxy_for(api_keys=KEYS) as (proxy, url), client(url) as http:
        for fake in fakes:
            await announce(http, fake)
        await announce(http, a, state="draining")
        user = {"authorization": "Bearer user"}
        assert {(await http.post(CHAT, content=BODY, headers=user)).json()["node"] for _ in range(6)} == {"b"}
        await announce(http, a, state="leaving")
        assert [node.url for node in proxy.registry.nodes()] == [b.url]
        await announce(http, a, instance="i2")
        assert {(await http.post(CHAT, content=BODY, headers=user)).json()["node"] for _ in range(20)} == {"a", "b"}


async def test_a_node_that_was_removed_stays_away_until_an_administrator_adds_it(tmp_path: Path) -> None:
    options: dict[str, Any] = {"api_keys": KEYS, "admin_keys": ("admin",), "state_file": str(tmp_path / "state.json")}
    admin = {"authorization": "Bearer admin"}
    async with nodes(FakeNode()) as (fake,), proxy_for(**options) as (proxy, url), client(url) as http:
        await announce(http, fake)
        await http.delete("/admin/nodes", params={"url": fake.url}, headers=admin)
        answer = await announce(http, fake)
        assert (answer.status_code, "lmkit proxy add" in answer.text) == (403, True)
        assert Proxy(proxy.config).fleet._state.removed == (fake.url,)
        await http.post("/admin/nodes", json={"url": fake.url}, headers=admin)
        assert (await announce(http, fake)).status_code == 200


async def test_a_node_that_starts_anew_has_an_empty_cache() -> None:
    async with nodes(FakeNode()) as (fake,), proxy_for(api_keys=KEYS) as (proxy, url), client(url) as http:
        await announce(http, fake, load={"kv_tokens": 4096})
        (node,) = proxy.registry.nodes()
        assert node.kv_tokens == 4096
        prompt = cuts([b"x" * 1024])
        proxy.registry.prefixes.add(node, prompt)
        await announce(http, fake)
        assert proxy.registry.prefixes.cached(prompt)
        await announce(http, fake, instance="i2")
        assert not proxy.registry.prefixes.cached(prompt)


async def test_a_node_says_since_when_it_has_lost_nothing() -> None:
    async with nodes(FakeNode()) as (fake,), proxy_for(api_keys=KEYS) as (proxy, url), client(url) as http:
        await announce(http, fake, load={"kept_seconds": 5.0})
        (node,) = proxy.registry.nodes()
        now, index = proxy.registry.clock(), proxy.registry.prefixes
        old, new = cuts([b"x" * 1024]), cuts([b"y" * 1024])
        index.add(node, old, now=now - 1000)
        index.add(node, new, now=now + 1000)
        assert (index.cached(old), index.cached(new)) == ({node: 256}, {node: 256})
        await announce(http, fake, load={"kept_seconds": 5.0})
        assert (index.cached(old), index.cached(new)) == ({}, {node: 256})
        assert node.tells_losses
        await announce(http, fake)
        assert not node.tells_losses


async def test_the_nodes_own_key_is_used_and_not_told() -> None:
    async with (
        nodes(FakeNode()) as (fake,),
        proxy_for(api_keys=KEYS, admin_keys=("a",)) as (_, url),
        client(url) as http,
    ):
        answer = await announce(http, fake, api_key="secret-of-the-node")
        await http.post(CHAT, content=BODY, headers={"authorization": "Bearer user"})
        status = await http.get("/admin/nodes", headers={"authorization": "Bearer a"})
    assert fake.requests[0].header("authorization") == ["Bearer secret-of-the-node"]
    assert "secret-of-the-node" not in answer.text + status.text


@pytest.mark.parametrize(
    "fields",
    [
        {"port": 0}, {"port": 70000}, {"models": {}}, {"models": ["m"]}, {"state": "gone"}, {"lease_seconds": 0},
        {"role": "prefill"}, {"load": {"running": -1}}, {"load": {"kv_use": 2}}, {"x": 1}, {"instance": "i" * 65},
        {"weight": 0}, {"tags": ["a b"]}, {"scheme": "ftp"}, {"url": "file:///etc"},
    ],
)  # fmt: skip
async def test_bad_announcements(fields: dict[str, Any]) -> None:
    async with nodes(FakeNode()) as (fake,), proxy_for(api_keys=KEYS) as (proxy, url), client(url) as http:
        assert (await announce(http, fake, **fields)).status_code == 400
        assert proxy.registry.nodes() == []


async def test_the_number_of_nodes_is_bounded() -> None:
    fakes = FakeNode("a"), FakeNode("b")
    async with nodes(*fakes), proxy_for(api_keys=KEYS, max_nodes=1) as (_, url), client(url) as http:
        assert [(await announce(http, fake)).status_code for fake in fakes] == [200, 400]


def test_roles_and_short_keys_are_refused_with_their_reason() -> None:
    with pytest.raises(ValueError, match="kv_port"):
        NodeConfig(url="http://a", role="prefill")
    with pytest.raises(ValueError, match="at least 16 characters"):
        ProxyConfig(api_keys=("short role=node",))


async def test_requests_wait_for_a_model_on_demand() -> None:
    """Its name is listed, the wait is counted, and a node that registers gets the request."""
    async with (
        nodes(FakeNode()) as (fake,),
        proxy_for(api_keys=KEYS[:1], admin_keys=("admin",), on_demand={"m": 60.0}) as (proxy, url),
        client(url) as http,
    ):
        assert [model["id"] for model in (await http.get("/v1/models")).json()["data"]] == ["m"]
        waiting = asyncio.create_task(http.post(CHAT, content=BODY))
        await eventually(lambda: "m" in proxy.registry.held)
        told = await http.get("/admin/nodes", headers={"authorization": "Bearer admin"})
        assert told.json()["held"] == {"m": {"requests": 1, "tokens": proxy.registry.held["m"].tokens}}
        assert 'lmkit_proxy_held_requests{model="m"} 1.0' in (await http.get("/metrics")).text
        assert (await announce(http, fake)).status_code == 200
        assert (await waiting).json()["node"] == fake.name
        assert proxy.registry.held == {}
        assert 'lmkit_proxy_held_requests{model="m"} 0.0' in (await http.get("/metrics")).text


async def test_nobody_waits_longer_than_the_configuration_says() -> None:
    async with proxy_for(on_demand={"m": 0.3}) as (proxy, url), client(url) as http:
        answer = await http.post(CHAT, content=BODY)
        assert (answer.status_code, "no node for 'm' came within 0.3 s" in answer.text) == (503, True)
        assert proxy.registry.held == {}


async def test_a_request_that_meets_a_draining_node_waits_for_the_next() -> None:
    """The node drains, but its announcement has not come yet."""

    async def drains(exchange: Exchange) -> None:
        error = {"error": {"message": "", "type": "", "code": "shutting_down"}}
        await exchange.reply(503, error, ("x-lmkit-error", "shutting_down"))

    fakes = FakeNode("a", script=drains), FakeNode("b")
    async with (
        nodes(*fakes) as (a, b),
        proxy_for(api_keys=KEYS[:1], on_demand={"m": 60.0}) as (proxy, url),
        client(url) as http,
    ):
        assert (await announce(http, a)).status_code == 200
        waiting = asyncio.create_task(http.post(CHAT, content=BODY))
        await eventually(lambda: "m" in proxy.registry.held)
        assert len(a.requests) == 1
        assert (await announce(http, b)).status_code == 200
        assert (await waiting).json()["node"] == "b"
        assert len(a.requests) == 1


async def test_other_weights_under_one_name_where_the_configuration_allows_them() -> None:
    fakes = FakeNode("a"), FakeNode("b")
    async with nodes(*fakes) as (a, b), proxy_for(api_keys=KEYS, mixed_weights=True) as (_, url), client(url) as http:
        assert (await announce(http, a)).status_code == 200
        assert (await announce(http, b, models={"m": "w2"})).status_code == 200
        assert (await announce(http, b, "other-owner-key-2", models={"m": "w1"})).status_code == 403
