"""A node whose network is cut and joined again, in a namespace of its own."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator

import pytest

from benchmarks.resilience.network import Network, refusal
from tests.proxy.fakes import BODY, CHAT, Exchange, FakeNode, client, eventually, nodes, proxy_for
from tests.proxy.test_failover import DONE, END, FIRST, HEADER, NOTE, PRINT, SECOND, writes
from tests.proxy.test_faults import leaks

pytestmark = pytest.mark.anyio


@pytest.fixture
def network() -> Iterator[Network]:
    if reason := refusal():
        pytest.skip(f"no network namespaces: {reason}")
    with Network() as network:
        yield network


async def test_a_node_that_is_cut_off_loses_no_request_and_comes_back(network: Network) -> None:
    async def far(exchange: Exchange) -> None:
        if len(exchange.node.requests) > 1:
            await exchange.reply(200, {"node": "far"})
            return
        await exchange.start_events((HEADER, PRINT))
        await exchange.chunk(FIRST + NOTE)
        await exchange.until_left()

    there = FakeNode("far", api_key="k", script=far, listener=network.socket())
    here = FakeNode("near", api_key="k", script=writes(SECOND + NOTE, DONE + END, ends=True))
    async with (
        nodes(there, here) as fakes,
        proxy_for(
            *fakes,
            policy="round_robin",
            health_interval=0.05,
            health_timeout=0.2,
            connect_timeout=0.3,
            read_timeout=9.0,
        ) as (proxy, url),
        client(url) as http,
    ):
        node = proxy.registry.nodes()[0]
        async with http.stream("POST", CHAT, content=BODY) as response:
            pieces = response.aiter_bytes()
            assert await anext(pieces) == FIRST
            network.cut()
            assert b"".join([piece async for piece in pieces]) == SECOND + DONE
        assert not node.healthy
        here.script = FakeNode().script
        answers = await asyncio.gather(*(http.post(CHAT, content=BODY) for _ in range(8)))
        assert {answer.json()["node"] for answer in answers} == {"near"}
        await eventually(lambda: not leaks(proxy))
        network.join()
        await eventually(lambda: node.healthy, 30)
        answers = [await http.post(CHAT, content=BODY) for _ in range(4)]
        assert [answer.json()["node"] for answer in answers].count("far") == 2
        await eventually(lambda: not leaks(proxy))


async def test_a_request_that_was_sent_before_the_cut_is_answered_by_another(network: Network) -> None:
    got = asyncio.Event()

    async def far(exchange: Exchange) -> None:
        network.cut()
        got.set()
        await exchange.reply(200, {"node": "far"})  # which nobody gets

    there = FakeNode("far", script=far, listener=network.socket())
    async with (
        nodes(there, FakeNode("near")) as fakes,
        proxy_for(*fakes, policy="round_robin", health_interval=0.05, health_timeout=0.2) as (proxy, url),
        client(url) as http,
    ):
        assert (await http.post(CHAT, content=BODY)).json()["node"] == "near"
        assert got.is_set()
        await eventually(lambda: not leaks(proxy))
