"""Stored responses behind the proxy: each request goes to the node that keeps what it names."""

from __future__ import annotations

import json
from typing import Any

import httpx
import pytest

from lmkit.proxy import stored
from lmkit.proxy.config import NodeConfig
from tests.proxy.fakes import Exchange, FakeNode, client, nodes, proxy_for

pytestmark = pytest.mark.anyio
PATH = "/v1/responses"


class Keeper:
    """A node that keeps the responses that it makes. It writes JSON as no encoder of ours would."""

    def __init__(self, name: str) -> None:
        self.kept: list[str] = []
        self.node = FakeNode(name=name, script=self._answer)

    async def _answer(self, exchange: Exchange) -> None:
        request = exchange.request
        if request.method != "POST" or request.target.endswith("/cancel"):
            id = request.target.split("?")[0].removeprefix(PATH + "/").split("/")[0]
            status = 200 if id in self.kept else 404
            await exchange.reply(status, b'{ "id" :"%s", "at": "%s"}' % (id.encode(), self.node.name.encode()))
            return
        body = json.loads(request.body)
        if (previous := body.get("previous_response_id")) and previous not in self.kept:
            await exchange.reply(400, {"error": {"message": "not stored here"}})
            return
        id = f"resp_{self.node.name}{len(self.kept)}"
        self.kept.append(id)
        made = b'{"id":"%s","object":"response"}' % id.encode()
        if body.get("stream"):
            await exchange.start_events()
            await exchange.chunk(b'event: response.created\ndata: {"type":"response.created","response":%s}\n\n' % made)
            await exchange.end()
        else:
            await exchange.reply(200, made)

    @property
    def seen(self) -> list[tuple[str, str]]:
        return [(request.method, request.target) for request in self.node.requests]


async def create(http: httpx.AsyncClient, previous: str | None = None, **fields: Any) -> str:
    body = {"model": "m", "input": "hi", "previous_response_id": previous, **fields}
    answer = await http.post(PATH, json=body)
    assert answer.status_code == 200, answer.text
    text = answer.text
    return "resp_" + text.partition("resp_")[2].partition('"')[0]


@pytest.mark.parametrize("stream", [False, True])
async def test_a_conversation_stays_with_the_node_that_keeps_it(stream: bool) -> None:
    keepers = [Keeper(name) for name in "abcd"]
    own = [keeper.node for keeper in keepers]
    async with nodes(*own), proxy_for(*own, policy="random") as (_, url), client(url) as http:
        for _ in range(6):
            last = await create(http, stream=stream)
            home = last[5]
            for _ in range(3):
                last = await create(http, last, stream=stream)
                assert last[5] == home
    assert {method for keeper in keepers for method, _ in keeper.seen} == {"POST"}  # no node had to be asked


async def test_a_proxy_that_was_started_again_asks_the_nodes() -> None:
    a, b, c = (Keeper(name) for name in "abc")
    b.kept.append("resp_old")
    async with nodes(a.node, b.node, c.node) as fakes, proxy_for(*fakes) as (_, url), client(url) as http:
        assert (await create(http, "resp_old"))[5] == "b"
        asked = [("GET", f"{PATH}/resp_old")]
        assert a.seen == c.seen == asked
        assert (await create(http, "resp_old"))[5] == "b"
        assert a.seen == c.seen == asked  # once


async def test_all_routes_of_a_response_lead_to_its_node_and_pass_unchanged() -> None:
    a, b = Keeper("a"), Keeper("b")
    b.kept.append("resp_x")
    async with nodes(a.node, b.node) as fakes, proxy_for(*fakes) as (_, url), client(url) as http:
        for method, path in (
            ("GET", f"{PATH}/resp_x?include[]=a"),
            ("GET", f"{PATH}/resp_x/input_items?limit=2"),
            ("POST", f"{PATH}/resp_x/cancel"),
            ("DELETE", f"{PATH}/resp_x"),
        ):
            answer = await http.request(method, path)
            assert (answer.status_code, answer.content) == (200, b'{ "id" :"resp_x", "at": "b"}'), path
            assert b.seen[-1] == (method, path)
        absent = await http.get(f"{PATH}/resp_y")
        assert (absent.status_code, absent.json()["error"]["code"]) == (404, "not_found")
        refused = await http.post(PATH, json={"model": "m", "input": "hi", "previous_response_id": "resp_y"})
        assert (refused.status_code, refused.json()["error"]["message"]) == (400, "not stored here")


async def test_a_response_whose_node_is_down_is_not_looked_for_elsewhere() -> None:
    a, b = Keeper("a"), Keeper("b")
    async with nodes(a.node, b.node) as fakes, proxy_for(*fakes, policy="random") as (_, url), client(url) as http:
        id = await create(http)
        keeper, other = (a, b) if id[5] == "a" else (b, a)
        before = len(other.seen)
        await keeper.node.stop()
        answer = await http.post(PATH, json={"model": "m", "input": "hi", "previous_response_id": id})
        assert (answer.status_code, answer.json()["error"]["code"]) == (503, "engine_unavailable")
        answer = await http.get(f"{PATH}/{id}")
        assert (answer.status_code, answer.json()["error"]["code"]) == (502, "bad_gateway")
        assert len(other.seen) == before


async def test_the_node_learns_whose_response_is_meant() -> None:
    a, b = Keeper("a"), Keeper("b")
    a.kept.append("resp_x")
    b.kept.append("resp_x")
    async with nodes(a.node, b.node) as fakes, proxy_for(*fakes, api_keys=("k", "l")) as (proxy, url):
        proxy.registry.add(NodeConfig(url=b.node.url, models=("m",), tenants="cache_salt"), "config")
        async with client(url) as http:
            for key in ("k", "l"):
                answer = await http.get(f"{PATH}/resp_x", headers={"authorization": f"Bearer {key}"})
                assert answer.json()["at"] == "a"
            assert (await http.get(f"{PATH}/resp_x")).status_code == 401
    assert b.seen == []  # it would show a response to every client
    names = [request.header("x-lmkit-tenant")[0] for request in a.node.requests]
    assert len(set(names)) == 2


async def test_only_the_routes_of_responses_go_on() -> None:
    async with nodes(FakeNode()) as (node,), proxy_for(node) as (_, url), client(url) as http:
        for method, path, status in (
            ("PUT", f"{PATH}/resp_x", 405),
            ("GET", f"{PATH}/resp_x/cancel", 405),
            ("GET", f"{PATH}/resp_x/secret", 404),
            ("GET", f"{PATH}/resp_x%2F..", 404),
            ("GET", f"{PATH}/" + "x" * 129, 404),
        ):
            assert (await http.request(method, path)).status_code == status, path
        assert node.requests == []
    async with nodes(FakeNode()) as (node,), proxy_for(node, forwarded_routes=("/v1/x",)) as (_, url):
        async with client(url) as http:
            assert (await http.get(f"{PATH}/resp_x")).status_code == 404
        assert node.requests == []


async def test_ids_are_forgotten_in_the_order_of_their_use(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stored, "REMEMBERED", 2)
    a = Keeper("a")
    async with nodes(a.node) as fakes, proxy_for(*fakes) as (_, url), client(url) as http:
        first, *_ = [await create(http) for _ in range(3)]
        await create(http, first)
        assert ("GET", f"{PATH}/{first}") in a.seen
