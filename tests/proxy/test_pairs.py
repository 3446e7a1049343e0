"""Which requests two nodes answer, what each of them is told, and that the second goes on if the first fails."""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import httpx
import pytest

from lmkit.proxy.announce import Announcement, registration
from lmkit.proxy.app import Proxy
from lmkit.proxy.config import NodeConfig
from lmkit.proxy.pairs import kv_address
from lmkit.web.auth import client_name, tenant_of
from tests.proxy.fakes import CHAT, Exchange, FakeNode, client, nodes, proxy_for
from tests.proxy.test_announce import KEYS, announce

pytestmark = pytest.mark.anyio
LONG = {"model": "m", "messages": [{"role": "user", "content": "word " * 400}]}
PAIR = "x-lmkit-pair"
HERE = "prefill-node-key", "decode-node-key"


@asynccontextmanager
async def pair(prefill: FakeNode, decode: FakeNode, **options: Any) -> AsyncIterator[tuple[Proxy, httpx.AsyncClient]]:
    async with nodes(prefill, decode), proxy_for(api_keys=KEYS, **options) as (proxy, url), client(url) as http:
        answer = await announce(http, prefill, role="prefill", kv_port=7400, api_key=HERE[0])
        assert answer.json()["healthy"], answer.text
        assert (await announce(http, decode, role="decode", api_key=HERE[1])).json()["healthy"]
        http.headers["authorization"] = "Bearer user"
        yield proxy, http


async def test_a_long_prompt_goes_to_both_and_a_short_one_does_not() -> None:
    prefill, decode = FakeNode("prefill"), FakeNode("decode")
    async with pair(prefill, decode) as (_, http):
        answer = await http.post(CHAT, json=LONG, headers={PAIR: "decode 10.0.0.1:1"})  # a client's own is dropped
        assert answer.json()["node"] == "decode"
        (first,), (second,) = prefill.requests, decode.requests
        assert json.loads(first.body) == json.loads(second.body) == LONG
        assert second.header(PAIR) == ["decode 127.0.0.1:7400"]
        tenant = tenant_of(HERE[1], client_name("user", "", HERE[1]))  # as the decode node knows the client
        assert second.header("x-lmkit-tenant") == [client_name("user", "", HERE[1])]
        assert first.header(PAIR) == [f"prefill {tenant}"]

        unpaired = [{**LONG, "messages": []}, {**LONG, "session_id": "s"}, {**LONG, "input": "x"}]
        for body, path in zip(unpaired, (CHAT, CHAT, "/v1/embeddings"), strict=True):
            assert (await http.post(path, json=body)).status_code == 200
            assert decode.requests[-1].header(PAIR) == []
        assert len(prefill.requests) == 1
        assert 'lmkit_proxy_pairs_total{outcome="paired"} 1.0' in (await http.get("/metrics")).text


async def test_the_rest_of_the_prompt_is_given_up_when_the_answer_has_come() -> None:
    async def begin(exchange: Exchange) -> None:
        await exchange.start_events()
        await exchange.chunk(b": begun\n\n")
        await exchange.until_left()

    prefill = FakeNode("prefill", script=begin)
    async with pair(prefill, FakeNode("decode")) as (proxy, http):
        assert (await http.post(CHAT, json=LONG)).json()["node"] == "decode"
        await asyncio.wait_for(prefill.left.wait(), 5)
        assert [node.in_flight for node in proxy.registry.nodes()] == [0, 0]
        assert [node.queued for node in proxy.registry.nodes()] == [0, 0]


@pytest.mark.parametrize("how", ["busy", "broken", "silent", "gone", "another version"])
async def test_without_a_prefill_node_the_decode_node_computes(how: str) -> None:
    async def fail(exchange: Exchange) -> None:
        match how:
            case "busy":
                await exchange.reply(503, {})
            case "broken":
                exchange.reset()
            case "another version":
                await exchange.reply(400, {})
            case _:
                await exchange.until_left()

    prefill, decode = FakeNode("prefill", script=fail), FakeNode("decode")
    async with pair(prefill, decode, pair_wait=0.2) as (proxy, http):
        if how == "gone":
            await prefill.stop()
        for _ in range(2):
            answer = await http.post(CHAT, json=LONG)
            assert (answer.status_code, answer.json()["node"]) == (200, "decode")
        assert [request.header(PAIR) for request in decode.requests] == [[], []]
        assert [node.in_flight for node in proxy.registry.nodes()] == [0, 0]


async def test_a_prefill_node_answers_if_nobody_else_can() -> None:
    prefill, decode = FakeNode("prefill"), FakeNode("decode")
    async with pair(prefill, decode) as (_, http):
        await decode.stop()
        for _ in range(2):
            assert (await http.post(CHAT, json=LONG)).json()["node"] == "prefill"


def test_a_node_names_a_port_and_never_a_host() -> None:
    told = {"port": 8000, "models": {"m": ""}, "instance": "i", "role": "prefill", "kv_port": 7400}
    node = registration(Announcement(**told), "fd00::5", ())  # type: ignore[arg-type]
    assert kv_address(node) == "[fd00::5]:7400"


@pytest.mark.parametrize(
    ("fields", "part"),
    [
        ({"role": "prefill"}, "kv_port"),
        ({"kv_port": 7400}, "kv_port"),
        ({"role": "decode", "tenants": "cache_salt"}, "by a header"),
    ],
)
def test_roles_of_nodes_are_checked(fields: dict[str, Any], part: str) -> None:
    with pytest.raises(ValueError, match=re.escape(part)):
        NodeConfig(url="http://127.0.0.1:1", **fields)
