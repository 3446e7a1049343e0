"""What happens when nodes fail and clients leave."""

from __future__ import annotations

import asyncio
import contextlib
import json
import math
import socket
import time
from typing import Any

import httpx
import openai
import pytest

from lmkit.proxy.app import Proxy
from lmkit.proxy.config import NodeConfig
from lmkit.proxy.moves import MAX_RESENDS
from lmkit.web import connection
from tests.proxy.fakes import BODY, CHAT, Exchange, FakeNode, client, eventually, idle, nodes, proxy_for, streamed

pytestmark = pytest.mark.anyio


def num_busy(proxy: Proxy) -> int:
    """Connections to nodes that a request holds."""
    upstream = proxy._upstream
    return len(upstream.channels) - sum(map(len, upstream._idle.values()))


async def test_refused_connection_goes_to_another_node() -> None:
    async with (
        nodes(FakeNode("a"), FakeNode("b")) as (a, b),
        proxy_for(a, b, policy="round_robin") as (proxy, url),
        client(url) as http,
    ):
        await a.stop()
        answers = [(await http.post(CHAT, content=BODY)).json()["node"] for _ in range(6)]
        assert answers == ["b"] * 6
        dead = proxy.registry.get(a.url)
        assert dead is not None
        assert dead.failovers == 2  # then it counted as down
        assert not dead.healthy
        assert "Connection refused" in (dead.reason or "")


async def test_no_node_answers() -> None:
    async with (
        nodes(FakeNode("a"), FakeNode("b")) as (a, b),
        proxy_for(a, b, unhealthy_after=9) as (proxy, url),
        client(url) as http,
    ):
        await a.stop()
        await b.stop()
        response = await http.post(CHAT, content=BODY)
        assert (response.status_code, response.json()["error"]["code"]) == (503, "engine_unavailable")
        assert "127.0.0.1" not in response.text  # no address of a node
        assert all(node.in_flight == 0 for node in proxy.registry.nodes())


async def test_a_request_waits_for_a_node_that_went_down_lately() -> None:
    async with (
        nodes(FakeNode()) as (fake,),
        proxy_for(fake, health_interval=0.02, unhealthy_after=1, node_wait=60) as (proxy, url),
        client(url) as http,
    ):
        (node,) = proxy.registry.nodes()
        await fake.stop()
        await eventually(lambda: not node.healthy)
        waiting = asyncio.create_task(http.post(CHAT, content=BODY))
        await asyncio.sleep(0.3)
        assert not waiting.done()
        await fake.start()
        assert (await waiting).status_code == 200
        node.down_since, node.healthy = -math.inf, False  # it has been down for long
        assert not proxy.registry.may_return("m", -math.inf)


async def engine_down(exchange: Exchange) -> None:
    await exchange.reply(503, {}, ("x-lmkit-error", "engine_unavailable"))


async def test_a_node_without_its_engine_is_left_and_gets_no_more_requests() -> None:
    async with (
        nodes(FakeNode("a", script=engine_down), FakeNode("b")) as (a, b),
        proxy_for(a, b, policy="round_robin", unhealthy_after=1) as (proxy, url),
        client(url) as http,
    ):
        answers = [await http.post(CHAT, content=BODY) for _ in range(4)]
        assert [answer.status_code for answer in answers] == [200] * 4
        assert not proxy.registry.nodes()[0].healthy
        assert not any("x-lmkit-error" in answer.headers for answer in answers)


async def reset(exchange: Exchange) -> None:
    exchange.reset()


async def test_reset_before_the_first_byte_goes_to_another_node() -> None:
    async with (
        nodes(FakeNode("a", script=reset), FakeNode("b")) as (a, b),
        proxy_for(a, b, policy="round_robin") as (_, url),
        client(url) as http,
    ):
        assert (await http.post(CHAT, content=BODY)).json()["node"] == "b"
    assert [len(a.requests), len(b.requests)] == [1, 1]
    assert b.requests[0].body == BODY


async def test_request_that_kills_nodes_is_not_tried_on_all_of_them() -> None:
    fakes = [FakeNode(str(i), script=reset) for i in range(5)]
    async with nodes(*fakes), proxy_for(*fakes) as (proxy, url), client(url) as http:
        assert (await http.post(CHAT, content=BODY)).status_code == 502
        assert sum(len(fake.requests) for fake in fakes) == 1 + MAX_RESENDS
        assert all(node.healthy for node in proxy.registry.nodes())  # nor can it take them out


async def test_node_that_refuses_work_hands_over_when_another_can() -> None:
    async def busy(exchange: Exchange) -> None:
        await exchange.reply(503, {"error": {"message": f"busy {exchange.node.name}"}})

    async with (
        nodes(FakeNode("a", script=busy), FakeNode("b")) as (a, b),
        proxy_for(a, b, policy="round_robin") as (proxy, url),
    ):
        async with client(url) as http:
            assert (await http.post(CHAT, content=BODY)).json()["node"] == "b"
            b.script = busy
            last = await http.post(CHAT, content=BODY)
            assert last.status_code == 503
            assert last.json()["error"]["message"].startswith("busy")  # the node's own words
        assert all(node.in_flight == 0 for node in proxy.registry.nodes())


async def test_silent_node_is_a_timeout_not_a_success() -> None:
    async def silent(exchange: Exchange) -> None:
        await exchange.until_left()

    async with (
        nodes(FakeNode(script=silent)) as (node,),
        proxy_for(node, read_timeout=0.2) as (proxy, url),
        client(url) as http,
    ):
        response = await http.post(CHAT, content=BODY)
        assert (response.status_code, response.json()["error"]["code"]) == (504, "upstream_timeout")
        await eventually(node.left.is_set)
        assert proxy.registry.nodes()[0].in_flight == 0


async def test_black_hole_is_left_after_the_connect_timeout() -> None:
    """A listener whose backlog is full takes no connection and refuses none."""
    with socket.socket() as hole, contextlib.ExitStack() as stack:
        hole.bind(("127.0.0.1", 0))
        hole.listen(0)
        for _ in range(3):
            filler = stack.enter_context(socket.socket())
            filler.setblocking(False)
            filler.connect_ex(hole.getsockname())
        fake = FakeNode("hole", port=hole.getsockname()[1])
        async with (
            nodes(FakeNode("b")) as (b,),
            proxy_for(b, connect_timeout=0.2, policy="round_robin") as (proxy, url),
            client(url) as http,
        ):
            node = proxy.registry.add(NodeConfig(url=fake.url, models=("m",)), "config")
            node.healthy = True
            await http.post(CHAT, content=BODY)
            start = time.monotonic()
            assert (await http.post(CHAT, content=BODY)).json()["node"] == "b"
            assert 0.15 < time.monotonic() - start < 20  # the system would try for minutes
            assert node.failovers == 1


@pytest.mark.parametrize("how", ["truncate", "reset", "garbage", "silence"])
async def test_break_in_a_stream_is_an_error_event(how: str) -> None:
    begun = asyncio.Event()  # a reset may overtake what was not read

    async def script(exchange: Exchange) -> None:
        await exchange.start_events()
        await exchange.chunk(b'data: {"choices":[]}\n\n')
        await exchange.chunk(b'data: {"choices":[{"del')
        await begun.wait()
        if how == "truncate":
            exchange.writer.close()
        elif how == "reset":
            exchange.reset()
        elif how == "garbage":
            await exchange.write(b"not a chunk\r\n")
        else:
            await exchange.until_left()

    async with (
        nodes(FakeNode(script=script)) as (node,),
        proxy_for(node, read_timeout=0.3) as (proxy, url),
        client(url) as http,
    ):
        body = await streamed(http, begun)
        first, last, end = body.split(b"\n\n")
        assert (first, end) == (b'data: {"choices":[]}', b"")
        error = json.loads(last.removeprefix(b"data: "))["error"]
        assert error["code"] == ("upstream_timeout" if how == "silence" else "bad_gateway")
        assert "127.0.0.1" not in str(error)
        assert b"[DONE]" not in body
        state = proxy.registry.nodes()[0]
        assert (state.breaks, state.in_flight) == (1, 0)
        async with openai.AsyncOpenAI(base_url=url + "/v1", api_key="k", max_retries=0) as ai:
            with pytest.raises(openai.APIError):
                _ = [part async for part in await ai.chat.completions.create(model="m", messages=[], stream=True)]


@pytest.mark.parametrize("framing", ["content-length: 1048577", "transfer-encoding: chunked"])
async def test_break_in_a_body_that_is_sent_as_it_comes_is_not_a_clean_end(framing: str) -> None:
    async def script(exchange: Exchange) -> None:
        await exchange.write(f"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\n{framing}\r\n\r\n".encode())
        await exchange.write(b'{"a": 1' if "length" in framing else b'7\r\n{"a": 1\r\n')
        await asyncio.sleep(0.02)
        exchange.writer.close()

    async with nodes(FakeNode(script=script)) as (node,), proxy_for(node) as (proxy, url), client(url) as http:
        with pytest.raises(httpx.RemoteProtocolError):
            await http.post(CHAT, content=BODY)
        assert proxy.registry.nodes()[0].in_flight == 0


@pytest.mark.parametrize(
    "reply",
    [
        b"HTTP/1.1 999 Odd\r\ncontent-length: 0\r\n\r\n",
        b"HTTP/1.1 200 OK\r\ncontent-length: 3\r\ntransfer-encoding: chunked\r\n\r\n5\r\nhello\r\n0\r\n\r\n",
        b"HTTP/1.1 302 Found\r\nlocation: http://elsewhere/\r\ncontent-length: 0\r\n\r\n",
        b"HTTP/1.1 304 Not Modified\r\n\r\n",
        b"HTTP/1.1 401 Unauthorized\r\nwww-authenticate: Basic\r\ncontent-length: 0\r\n\r\n",
        b"SSH-2.0-OpenSSH\r\n",
        b"HTTP/1.1 200 OK\r\nbad header\r\n\r\n",
    ],
)
async def test_nonsense_from_a_node_is_a_bad_gateway(reply: bytes) -> None:
    async def script(exchange: Exchange) -> None:
        await exchange.write(reply)
        exchange.writer.close()

    async with nodes(FakeNode(script=script)) as (node,), proxy_for(node) as (proxy, url), client(url) as http:
        response = await http.post(CHAT, content=BODY)
        assert (response.status_code, response.json()["error"]["code"]) == (502, "bad_gateway")
        assert proxy.registry.nodes()[0].in_flight == 0


async def test_proxy_that_is_its_own_node_does_not_loop() -> None:
    async with nodes(FakeNode()) as (node,), proxy_for(node) as (proxy, url), client(url) as http:
        proxy.registry.remove(node.url)
        own = proxy.registry.add(NodeConfig(url=url, models=("m",)), "added")
        proxy.registry.succeeded(own)
        response = await http.post(CHAT, content=BODY)
        assert response.status_code == 502
        assert "loop" in response.text
        assert sum(own.answers.values()) == 1


@pytest.mark.parametrize("when", ["before the first byte", "in a stream", "in a body"])
async def test_client_that_leaves_cancels_the_node_at_once(when: str) -> None:
    async def script(exchange: Exchange) -> None:
        if when == "in a stream":
            await exchange.start_events()
            await exchange.chunk(b"data: 1\n\n")
        elif when == "in a body":
            await exchange.write(b"HTTP/1.1 200 OK\r\ncontent-length: 9999999\r\n\r\n12345")
        await exchange.until_left()

    async with nodes(FakeNode(script=script)) as (node,), proxy_for(node) as (proxy, url):
        for turn in range(1, 4):
            node.left.clear()
            reader, writer = await asyncio.open_connection("127.0.0.1", int(url.rpartition(":")[2]))
            writer.write(
                b"POST /v1/completions HTTP/1.1\r\nHost: [::]\r\nContent-Length: %d\r\n\r\n%s" % (len(BODY), BODY)
            )
            if when == "before the first byte":
                await eventually(lambda: len(node.requests) == turn)  # noqa: B023
            else:
                await reader.readuntil(b"1")
            writer.close()
            await eventually(idle(node))
            await eventually(lambda: proxy.registry.nodes()[0].in_flight == 0 and proxy.active == 0)
        assert b"lmkit_proxy_client_disconnects_total 3.0" in proxy.metrics.render()
        assert b"lmkit_proxy_errors_total{" not in proxy.metrics.render()
        await eventually(lambda: num_busy(proxy) == 0)


async def test_clients_that_do_not_read_give_their_places_back(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connection, "WRITE_SECONDS", 0.5)

    async def script(exchange: Exchange) -> None:
        if exchange.request.target != CHAT:
            await exchange.reply(200, {})
            return
        await exchange.start_events()
        while not exchange.writer.is_closing():
            await exchange.chunk(b"data: " + b"x" * 65536 + b"\n\n")

    async with (
        nodes(FakeNode(script=script)) as (node,),
        proxy_for(node, max_in_flight=4) as (proxy, url),
        client(url) as http,
    ):
        request = b"POST %s HTTP/1.1\r\nHost: [::]\r\nContent-Length: %d\r\n\r\n%s" % (CHAT.encode(), len(BODY), BODY)
        writers = []
        for _ in range(4):
            _, writer = await asyncio.open_connection("127.0.0.1", int(url.rpartition(":")[2]), limit=1024)
            writer.transport.pause_reading()  # type: ignore[attr-defined]
            writer.write(request)
            writers.append(writer)
        await eventually(lambda: proxy.active == 4)
        assert (await http.post("/v1/completions", content=BODY)).status_code == 503
        await eventually(lambda: proxy.active == 0 and num_busy(proxy) == 0, seconds=10)
        assert (await http.post("/v1/completions", content=BODY)).status_code == 200
        for writer in writers:
            writer.close()


async def test_client_that_stops_reading_slows_the_node_down() -> None:
    sent = 0

    async def script(exchange: Exchange) -> None:
        nonlocal sent
        await exchange.start_events()
        while not exchange.writer.is_closing():
            await exchange.chunk(b"data: " + b"x" * 65536 + b"\n\n")
            sent += 65536

    async with nodes(FakeNode(script=script)) as (node,), proxy_for(node) as (proxy, url):
        _, writer = await asyncio.open_connection("127.0.0.1", int(url.rpartition(":")[2]), limit=1024)
        writer.write(b"POST /v1/completions HTTP/1.1\r\nHost: [::]\r\nContent-Length: %d\r\n\r\n%s" % (len(BODY), BODY))
        last = -1
        while sent != last or not sent:  # until nothing moves any more
            last = sent
            await asyncio.sleep(0.1)
        assert sent < 64 << 20
        writer.transport.abort()
        await eventually(lambda: proxy.registry.nodes()[0].in_flight == 0)


async def test_server_of_asgi_2_4_leaks_nothing() -> None:
    """There, send raises OSError when the client has left, instead of doing nothing."""

    async def script(exchange: Exchange) -> None:
        await exchange.start_events()
        await exchange.chunk(b"data: 1\n\n")
        await exchange.until_left()

    async def receive() -> Any:
        if messages:
            return messages.pop()
        await asyncio.Event().wait()
        raise AssertionError

    async def send(message: object) -> None:
        raise OSError("gone")

    messages = [{"type": "http.request", "body": BODY}]
    async with nodes(FakeNode(script=script)) as (node,), proxy_for(node) as (proxy, _):
        scope = {"type": "http", "method": "POST", "path": CHAT, "query_string": b"", "headers": []}
        await proxy(scope, receive, send)  # type: ignore[arg-type]
        assert (proxy.active, proxy.registry.nodes()[0].in_flight) == (0, 0)
        await eventually(node.left.is_set)


async def test_client_with_its_whole_answer_has_not_left() -> None:
    """A server tells "disconnect" as soon as the last piece is sent, while the proxy still puts its connection back."""
    done = asyncio.Event()
    messages = [{"type": "http.request", "body": BODY}]

    async def receive() -> Any:
        if messages:
            return messages.pop()
        await done.wait()
        return {"type": "http.disconnect"}

    async def send(message: Any) -> None:
        if message["type"] == "http.response.body" and not message.get("more_body"):
            done.set()
            await asyncio.sleep(0.02)

    async with nodes(FakeNode()) as (node,), proxy_for(node) as (proxy, _):
        scope = {"type": "http", "method": "POST", "path": CHAT, "query_string": b"", "headers": []}
        await proxy(scope, receive, send)
        assert b"lmkit_proxy_client_disconnects_total 0.0" in proxy.metrics.render()
        assert num_busy(proxy) == 0


async def test_defect_is_one_requests_500(monkeypatch: pytest.MonkeyPatch) -> None:
    async with nodes(FakeNode()) as (node,), proxy_for(node) as (proxy, url), client(url) as http:
        with monkeypatch.context() as patch:
            patch.setattr(proxy._router, "choose", lambda candidates, routing: 1 / 0)
            response = await http.post(CHAT, content=BODY)
        assert (response.status_code, response.json()["error"]["message"]) == (500, "internal server error")
        assert proxy.active == 0
        assert (await http.post(CHAT, content=BODY)).status_code == 200


async def test_many_clients_leave_nothing_behind() -> None:
    """A mix of good, failing and abandoned requests; all counters return to zero."""

    async def script(exchange: Exchange) -> None:
        kind = json.loads(exchange.request.body)["kind"]
        if kind == 0:
            await exchange.reply(200, {})
        elif kind == 1:
            exchange.reset()
        elif kind == 2:
            await exchange.start_events()
            await exchange.chunk(b"data: 1\n\n")
            exchange.writer.close()
        else:
            await exchange.until_left()

    async def one(http: httpx.AsyncClient, kind: int) -> int:
        try:
            body = {"model": "m", "kind": kind}
            return (
                await http.post(CHAT, json=body, timeout=httpx.Timeout(10, read=0.2 if kind == 3 else 10))
            ).status_code
        except httpx.ReadTimeout:
            return 0

    fakes = [FakeNode(str(i), script=script) for i in range(3)]
    async with nodes(*fakes), proxy_for(*fakes) as (proxy, url), client(url) as http:
        results = await asyncio.gather(*(one(http, i % 4) for i in range(80)))
        assert [results[i::4] for i in range(4)] == [[200] * 20, [502] * 20, [200] * 20, [0] * 20]
        await eventually(lambda: proxy.active == 0 and all(node.in_flight == 0 for node in proxy.registry.nodes()))
        total = sum(count for node in proxy.registry.nodes() for count in node.answers.values())
        assert total == 40  # the resets and the abandoned never answered
        await eventually(lambda: num_busy(proxy) == 0)


async def test_stop_breaks_running_answers_off() -> None:
    async def script(exchange: Exchange) -> None:
        if exchange.request.target == CHAT:
            await exchange.start_events()
            await exchange.chunk(b"data: 1\n\n")
        await exchange.until_left()

    async with nodes(FakeNode(script=script)) as (node,), proxy_for(node) as (proxy, url), client(url) as http:
        begun = asyncio.Event()
        stream = asyncio.create_task(streamed(http, begun))
        whole = asyncio.create_task(http.post("/v1/completions", content=BODY))
        await begun.wait()
        await eventually(lambda: proxy.registry.nodes()[0].in_flight == 2)
        proxy.stop.set()
        first, last, _ = (await stream).split(b"\n\n")
        assert first == b"data: 1"
        assert json.loads(last[6:])["error"]["code"] == "shutting_down"
        assert ((await whole).status_code, (await whole).json()["error"]["code"]) == (503, "shutting_down")
        assert proxy.registry.nodes()[0].in_flight == 0


@pytest.mark.parametrize("other", [True, False])
async def test_a_request_without_a_first_byte_leaves_a_node_that_goes_down(other: bool) -> None:
    """Only if another node could answer: a busy node may miss a check and still answer."""
    release = asyncio.Event()

    async def silent(exchange: Exchange) -> None:
        await release.wait()
        await exchange.reply(200, {"node": "late"})

    fakes = (FakeNode("a", script=silent), FakeNode("b"))[: 1 + other]
    async with nodes(*fakes), proxy_for(fakes[0], unhealthy_after=1) as (proxy, url), client(url) as http:
        request = asyncio.create_task(http.post(CHAT, content=BODY))
        await eventually(lambda: len(fakes[0].requests) == 1)
        for fake in fakes[1:]:
            proxy.registry.succeeded(proxy.registry.add(NodeConfig(url=fake.url, models=("m",)), "config"))
        node = proxy.registry.nodes()[0]
        assert proxy.registry.failed(node, "no answer to a check")
        if other:
            await eventually(lambda: not node.in_flight)
        release.set()
        assert (await request).json()["node"] == ("b" if other else "late")
        assert (node.in_flight, node.waiting, node.failovers) == (0, {}, int(other))


async def test_a_stream_that_has_begun_stays_with_its_node() -> None:
    release = asyncio.Event()

    async def script(exchange: Exchange) -> None:
        await exchange.start_events()
        await release.wait()
        await exchange.chunk(b"data: 1\n\n")
        await exchange.end()

    async with (
        nodes(FakeNode("a", script=script), FakeNode("b", script=script)) as (a, b),
        proxy_for(a, b, unhealthy_after=1) as (proxy, url),
        client(url) as http,
        http.stream("POST", CHAT, content=BODY) as response,
    ):
        (busy,) = (node for node in proxy.registry.nodes() if node.in_flight)
        assert proxy.registry.failed(busy, "no answer to a check")
        release.set()
        assert await response.aread() == b"data: 1\n\n"
        assert len(a.requests) + len(b.requests) == 1


async def test_breaker_keeps_requests_from_a_node_that_fails_them() -> None:
    async def script(exchange: Exchange) -> None:
        await exchange.reply(500, {"error": {}})

    now = [0.0]
    async with (
        nodes(FakeNode("a", script=script), FakeNode("b")) as (a, b),
        proxy_for(a, b, policy="round_robin", breaker_failures=3, breaker_seconds=10) as (proxy, url),
        client(url) as http,
    ):
        proxy.registry.clock = lambda: now[0]

        async def ask(times: int) -> tuple[int, int]:
            before = len(a.requests), len(b.requests)
            for _ in range(times):
                await http.post(CHAT, content=BODY)
            return len(a.requests) - before[0], len(b.requests) - before[1]

        assert await ask(6) == (3, 3)
        assert await ask(6) == (0, 6)
        status, figures = proxy.registry.status()[0], proxy.metrics.render().decode()
        assert (status["breaker"], status["breaker_opened"]) == ("open", 1)
        assert f'lmkit_proxy_breaker{{node="{a.url}"}} 2.0' in figures
        assert f'lmkit_proxy_breaker_opened_total{{node="{a.url}"}} 1.0' in figures
        now[0] = 13.0
        assert proxy.registry.status()[0]["breaker"] == "half-open"
        assert await ask(4) == (1, 3)  # one trial, which fails
        now[0] = 40.0
        a.script = FakeNode().script
        assert await ask(4) == (2, 2)
        assert proxy.registry.status()[0]["breaker"] == "closed"


async def test_breakers_never_shut_every_node() -> None:
    """A client could send requests that break nodes, and so shut them for everyone."""

    async def script(exchange: Exchange) -> None:
        await exchange.reply(500, {"error": {}})

    async with (
        nodes(FakeNode("a", script=script), FakeNode("b", script=script)) as fakes,
        proxy_for(*fakes, breaker_failures=1) as (proxy, url),
        client(url) as http,
    ):
        for _ in range(4):
            assert (await http.post(CHAT, content=BODY)).status_code == 500
        assert {node.breaker.state for node in proxy.registry.nodes()} == {"open"}
        fakes[0].script = fakes[1].script = FakeNode().script
        assert (await http.post(CHAT, content=BODY)).status_code == 200


@pytest.mark.parametrize(("fault", "num_refused"), [("reset", 13), ("busy", 8)])
async def test_retries_are_a_share_of_requests(fault: str, num_refused: int) -> None:
    """A cluster in which every node fails gets little more than the clients' own requests."""

    async def script(exchange: Exchange) -> None:
        if fault == "reset":
            exchange.reset()
        else:
            await exchange.reply(503, {"error": {}})

    async with (
        nodes(FakeNode("a", script=script), FakeNode("b", script=script)) as (a, b),
        proxy_for(a, b, retry_share=0.25, max_in_flight=2, breaker_failures=100) as (proxy, url),
        client(url) as http,
    ):
        start = proxy.registry.clock()
        proxy.registry.clock = lambda: start
        for _ in range(13):
            assert (await http.post(CHAT, content=BODY)).status_code == (502 if fault == "reset" else 503)
        assert len(a.requests) + len(b.requests) == 13 + 2 + 3  # the reserve, and a quarter
        figures = proxy.metrics.render().decode()
        assert 'lmkit_proxy_retries_total{outcome="sent"} 5.0' in figures
        assert f'lmkit_proxy_retries_total{{outcome="refused"}} {num_refused}.0' in figures
        assert [node.in_flight for node in proxy.registry.nodes()] == [0, 0]


async def test_a_client_that_asks_why_is_told_of_resting_and_of_new_nodes() -> None:
    now = [0.0]
    async with (
        nodes(FakeNode("a"), FakeNode("b")) as fakes,
        proxy_for(*fakes, slow_start_seconds=10.0) as (proxy, url),
        client(url) as http,
    ):
        proxy.registry.clock = lambda: now[0]
        old, new = proxy.registry.nodes()
        old.breaker.eject("x")
        new.up_since = -5.0
        headers = {"x-lmkit-explain": "1"}
        answer = (await http.post(CHAT, content=BODY, headers=headers)).headers
        assert (answer["x-lmkit-candidates"], answer["x-lmkit-resting"]) == ("1", "1")
        assert "weight" not in answer["x-lmkit-reason"]  # nobody is there who has more
        old.breaker = new.breaker
        old.up_since, old.others = -100.0, 1000
        answer = (await http.post(CHAT, content=BODY, headers=headers)).headers
        assert answer["x-lmkit-reason"].endswith(", with 50% of its weight yet")
        assert f'lmkit_proxy_node_weight{{node="{new.url}"}} 0.5' in proxy.metrics.render().decode()
