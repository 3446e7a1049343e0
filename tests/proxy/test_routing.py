"""Where a proxy sends requests, and what it says about it."""

from __future__ import annotations

import json

import httpx
import pytest

from lmkit.config import PolicyName
from tests.proxy.fakes import CHAT, FakeNode, client, nodes, proxy_for

pytestmark = pytest.mark.anyio
EXPLAIN = {"x-lmkit-explain": "1"}


def conversation(name: str, turns: int) -> bytes:
    messages = [{"role": "user", "content": f"{name} {i} " * 100} for i in range(turns)]
    return json.dumps({"model": "m", "messages": messages}).encode()


async def ask(http: httpx.AsyncClient, body: bytes, **headers: str) -> str:
    response = await http.post(CHAT, content=body, headers=headers)
    assert response.status_code == 200
    return str(response.json()["node"])


async def test_conversations_stay_with_their_nodes() -> None:
    fakes = [FakeNode(name) for name in "abcd"]
    async with nodes(*fakes), proxy_for(*fakes, policy="prefix") as (_, url), client(url) as http:
        homes = {name: await ask(http, conversation(name, 1)) for name in map(str, range(8))}
        for turns in (2, 3):
            for name, home in homes.items():
                assert await ask(http, conversation(name, turns)) == home


async def test_tenants_share_no_prefixes() -> None:
    """A tenant must not learn from the choice of a node what another one has asked."""
    fakes = [FakeNode(name) for name in "ab"]
    async with (
        nodes(*fakes),
        proxy_for(*fakes, policy="prefix", api_keys=("one", "two")) as (_, url),
        client(url) as http,
    ):
        reasons = []
        for key in ("one", "one", "two", "two"):
            headers = {"authorization": f"Bearer {key}", **EXPLAIN}
            response = await http.post(CHAT, content=conversation("x", 2), headers=headers)
            reasons.append(response.headers["x-lmkit-reason"].partition(" ")[0])
    assert reasons[0] == reasons[2] == "0"
    assert int(reasons[1]) > 100
    assert int(reasons[3]) > 100


@pytest.mark.parametrize("header", ["x-session-token", "x-session-id"])
async def test_sessions_stay_with_their_nodes(header: str) -> None:
    fakes = [FakeNode(name) for name in "abcd"]
    async with nodes(*fakes), proxy_for(*fakes, policy="session") as (_, url), client(url) as http:
        homes = {name: await ask(http, conversation(name, 1), **{header: name}) for name in map(str, range(20))}
        assert len(set(homes.values())) > 1
        for name, home in homes.items():
            assert await ask(http, conversation("other", 1), **{header: name}) == home
    assert all(request.header(header) == [] for fake in fakes for request in fake.requests)


@pytest.mark.parametrize("policy", ["prefix", "least_tokens", "session", "min_expected_latency", "round_robin"])
async def test_the_reason_is_told_to_a_client_that_asks_and_no_address(policy: PolicyName) -> None:
    fakes = [FakeNode("a"), FakeNode("b")]
    async with nodes(*fakes), proxy_for(*fakes, policy=policy) as (proxy, url), client(url) as http:
        plain = await http.post(CHAT, content=conversation("x", 1))
        assert not [name for name in plain.headers if name.startswith("x-lmkit")]
        response = await http.post(CHAT, content=conversation("x", 1), headers=EXPLAIN)
        ids = {fake.name: node.id for fake in fakes for node in proxy.registry.nodes() if node.url == fake.url}
    assert response.headers["x-lmkit-node"] == ids[response.json()["node"]]
    assert response.headers["x-lmkit-policy"] == policy
    assert response.headers["x-lmkit-candidates"] == "2"
    assert response.headers["x-lmkit-reason"]
    assert "127.0.0.1" not in str(response.headers)


async def test_counters_return_to_zero() -> None:
    async with nodes(FakeNode()) as (fake,), proxy_for(fake, policy="prefix") as (proxy, url), client(url) as http:
        for i in range(3):
            await ask(http, conversation(str(i), 2))
        (node,) = proxy.registry.nodes()
        assert (node.in_flight, node.queued, node.load) == (0, 0, 0)
        assert node.pace is not None
        assert (await http.post(CHAT, content=conversation("x", 1), headers=EXPLAIN)).headers["x-lmkit-reason"]
