"""What reaches a node and the client when nothing goes wrong, and what is refused at the door."""

from __future__ import annotations

import asyncio
import contextlib
import json
import re
import socket
from collections.abc import AsyncIterator

import openai
import pytest

from lmkit.proxy.config import ROUTES, NodeConfig
from lmkit.web.auth import client_name
from tests.proxy.fakes import BODY, CHAT, Exchange, FakeNode, client, eventually, nodes, proxy_for, server_for

pytestmark = pytest.mark.anyio


async def test_request_arrives_unchanged_without_the_clients_credentials() -> None:
    async with nodes(FakeNode()) as (node,), proxy_for(node, api_keys=("sesame",)) as (proxy, url), client(url) as http:
        proxy.registry.add(NodeConfig(url=node.url, models=("m",), api_key="node-key"), "config")
        headers = {
            "Authorization": "Bearer sesame", "Cookie": "c=1", "X-Forwarded-For": "1.2.3.4", "X-Custom": "dropped",
            "X-Hop": "dropped",
            "Connection": "keep-alive, X-Hop", "TE": "trailers", "Content-Type": "application/json; charset=utf-8",
            "X-Request-Id": "req-1",
        }  # fmt: skip
        response = await http.post(CHAT + "?a=b%20c&d=%2F/e", content=BODY, headers=headers)
        assert (response.status_code, response.headers["x-request-id"]) == (200, "req-1")
    (request,) = node.requests
    assert request.body == BODY
    assert request.target == CHAT + "?a=b%20c&d=%2F/e"
    assert request.header("authorization") == ["Bearer node-key"]
    assert request.header("host") == [f"127.0.0.1:{node.port}"]
    assert request.header("x-request-id") == ["req-1"]
    assert request.header("content-type") == ["application/json; charset=utf-8"]
    for name in ("cookie", "x-forwarded-for", "x-custom", "x-hop", "te", "transfer-encoding"):
        assert request.header(name) == []


async def test_client_key_never_reaches_a_node_without_a_key() -> None:
    async with nodes(FakeNode()) as (node,), proxy_for(node, api_keys=("sesame",)) as (_, url), client(url) as http:
        for headers in ({"Authorization": "Bearer sesame"}, {"x-api-key": "sesame"}):
            assert (await http.post(CHAT, content=BODY, headers=headers)).status_code == 200
    assert len(node.requests) == 2
    for request in node.requests + node.checks:
        assert "sesame" not in str(request.headers)


async def test_harmful_request_id_is_replaced() -> None:
    async with nodes(FakeNode()) as (node,), proxy_for(node) as (_, url), client(url) as http:
        response = await http.post(CHAT, content=BODY, headers={"X-Request-Id": "a b;drop" + "x" * 200})
    (value,) = node.requests[0].header("x-request-id")
    assert len(value) == 32
    assert response.headers.get_list("x-request-id") == [value]


FORGED = {
    "X-Original-URL": "/admin/nodes", "X-Rewrite-URL": "/admin", "X-HTTP-Method-Override": "DELETE",
    "Via": "1.1 trusted",
    "Forwarded": "for=127.0.0.1", "X-Forwarded-User": "root", "X-Forwarded-Host": "h", "X-Real-IP": "127.0.0.1",
    "X-Lmkit-Tenant": "1" * 32, "X-Accel-Redirect": "/", "OpenAI-Organization": "o", "Proxy-Authorization": "x",
}  # fmt: skip


async def test_headers_that_a_node_could_trust_are_never_the_clients() -> None:
    async with nodes(FakeNode()) as (node,), proxy_for(node) as (_, url), client(url) as http:
        kept = {"Anthropic-Version": "1", "X-Stainless-Lang": "python", "Traceparent": "00-1-2-01"}
        assert (await http.post(CHAT, content=BODY, headers=FORGED | kept)).status_code == 200
    (request,) = node.requests
    for name, value in FORGED.items():
        assert value not in request.header(name.lower()), name
    for name, value in kept.items():
        assert request.header(name.lower()) == [value]


@pytest.mark.parametrize("status", [200, 201, 204, 400, 404, 422, 429, 500, 503, 529])
async def test_a_node_sets_no_cookies_or_policies_for_the_client(status: int) -> None:
    body = b"" if status == 204 else b'{"error": {"message": "from the node"}}'
    dropped = {
        "strict-transport-security": "max-age=1", "access-control-allow-origin": "*", "location": "http://elsewhere/",
        "www-authenticate": "Basic", "proxy-authenticate": "Basic", "clear-site-data": "*", "x-node": "1",
        "server": "n",
        "refresh": "0", "alt-svc": "h3", "link": "<x>", "connection": "x-ratelimit-hop", "x-ratelimit-hop": "1",
    }  # fmt: skip
    kept = {"retry-after": "7", "x-ratelimit-limit-requests": "9", "openai-processing-ms": "3"}

    async def script(exchange: Exchange) -> None:
        cookies = ("set-cookie", "a=1; Path=/"), ("set-cookie", "b=2")
        await exchange.reply(status, body, *dropped.items(), *kept.items(), *cookies)

    async with nodes(FakeNode(script=script)) as (node,), proxy_for(node) as (proxy, url), client(url) as http:
        response = await http.post(CHAT, content=BODY)
        again = await http.post(CHAT, content=BODY)
        await proxy.health.check_all()
    assert (response.status_code, response.content) == (status, body)
    assert not {*dropped, "set-cookie"} & {*response.headers} - {"connection"}
    assert kept.items() <= dict(response.headers).items()
    assert again.status_code == status
    for request in (node.requests[1], *node.checks):  # one client's cookies are for nobody else
        assert request.header("cookie") == []


async def test_only_listed_routes_go_on_with_the_nodes_key() -> None:
    async with nodes(FakeNode()) as (node,), proxy_for(node) as (_, url), client(url) as http:
        for route in ("/v1/load_lora_adapter", "/v1/a/b.c:d", "/v1/chat/completions/", "/v1/x"):
            response = await http.post(route, content=BODY)
            assert (response.status_code, response.json()["error"]["code"]) == (404, "not_found"), route
        assert node.requests == []
        forms = {f"/v1/audio/{kind}" for kind in ("transcriptions", "translations")}  # test_forms.py
        for route in set(ROUTES) - {"/v1/batches"} - forms:  # the first needs a file: test_kept.py
            answer = await http.post(route, content=BODY)
            assert answer.json().get("target") == route, answer.text
    own = ("/v1/a/b.c:d",)
    async with nodes(FakeNode()) as (node,), proxy_for(node, forwarded_routes=own) as (_, url), client(url) as http:
        assert (await http.post(own[0], content=BODY)).status_code == 200
        assert (await http.post(CHAT, content=BODY)).status_code == 404


def tenants(node: FakeNode) -> list[str]:
    return [(request.header("x-lmkit-tenant") or [""])[0] for request in node.requests]


async def test_every_client_key_is_a_tenant_of_the_node() -> None:
    keys = ("a", "b", "outer role=proxy")
    async with nodes(FakeNode()) as (node,), proxy_for(node, api_keys=keys) as (_, url), client(url) as http:
        for key, name in (("a", ""), ("b", ""), ("a", ""), ("outer", "1" * 32), ("outer", "2" * 32), ("outer", "")):
            headers = {"authorization": f"Bearer {key}"} | ({"x-lmkit-tenant": name} if name else {})
            assert (await http.post(CHAT, content=BODY, headers=headers)).status_code == 200
        headers = {"authorization": "Bearer a", "x-lmkit-tenant": "x"}
        assert (await http.post(CHAT, content=BODY, headers=headers)).status_code == 400
    names = tenants(node)
    assert names[0] == names[2]
    assert len(set(names)) == 5
    assert all(re.fullmatch("[0-9a-f]{32}", name) for name in names)


async def test_clients_without_keys_are_one_tenant_and_the_nodes_key_changes_the_name() -> None:
    async with nodes(FakeNode()) as (node,), proxy_for(node) as (_, url), client(url) as http:
        await http.post(CHAT, content=BODY, headers={"authorization": "Bearer made-up"})
        assert tenants(node) == [""]
    assert len({client_name("a", "", key) for key in ("", "k", "l")}) == 3


async def test_a_node_that_takes_salts_gets_one_of_the_client_and_of_its_own() -> None:
    async with nodes(FakeNode()) as (node,), proxy_for(node, api_keys=("a", "b")) as (proxy, url), client(url) as http:
        proxy.registry.add(NodeConfig(url=node.url, models=("m",), tenants="cache_salt"), "config")
        for key, salt in (("a", {}), ("b", {}), ("a", {"cache_salt": "s"}), ("b", {"cache_salt": "s"}), ("a", {})):
            headers = {"authorization": f"Bearer {key}"}
            await http.post(CHAT, json={"model": "m", "big": 1 << 80, "n": 1.5} | salt, headers=headers)
        wrong = await http.post(CHAT, json={"model": "m", "cache_salt": 1}, headers=headers)
        assert (wrong.status_code, wrong.json()["error"]["param"]) == (400, "cache_salt")
    bodies = [json.loads(request.body) for request in node.requests]
    salts = [body.pop("cache_salt") for body in bodies]
    assert salts[0] == salts[4]
    assert len(set(salts)) == 4
    assert all(body == {"model": "m", "big": 1 << 80, "n": 1.5} for body in bodies)
    assert tenants(node) == [""] * 5


async def test_node_below_a_path() -> None:
    async with nodes(FakeNode(script=echo_target)) as (node,), proxy_for(node) as (proxy, url), client(url) as http:
        proxy.registry.remove(node.url)
        below = proxy.registry.add(NodeConfig(url=node.url + "/deep/er", models=("m",)), "config")
        proxy.registry.succeeded(below)
        assert (await http.post(CHAT + "?q", content=BODY)).text == '"/deep/er/v1/chat/completions?q"'


async def echo_target(exchange: Exchange) -> None:
    await exchange.reply(200, exchange.request.target)


ODD_STREAM = [
    b"event: message_start\ndata: {\"a\":", b"1}\n\n", b": ping\n\n", b"data: one\r\ndata: two\r\n\r\n", b"\n\n",
    b"id: 1\rdata: x\r\r",
    b"data: \xe2\x80\xa8 \xf0\x9f", b"\x98\x80\n", b"\ndata:{}\n\ndata: [DONE]\n\n", b"retry: 5\n\nunterminated",
]  # fmt: skip


async def test_event_stream_is_byte_exact() -> None:
    async def script(exchange: Exchange) -> None:
        await exchange.start_events(("cache-control", "no-cache"))
        for piece in ODD_STREAM:
            await exchange.chunk(piece)
            await asyncio.sleep(0.002)
        await exchange.end()

    async with nodes(FakeNode(script=script)) as (node,), proxy_for(node) as (proxy, url), client(url) as http:
        response = await http.post("/v1/messages", content=BODY)
    assert response.content == b"".join(ODD_STREAM)
    assert response.headers["content-type"] == "text/event-stream; charset=utf-8"
    assert response.headers["cache-control"] == "no-cache"
    assert proxy.registry.nodes()[0].breaks == 0


async def test_events_arrive_as_they_are_made() -> None:
    seen: asyncio.Queue[None] = asyncio.Queue()

    async def script(exchange: Exchange) -> None:
        await exchange.start_events()
        for i in range(3):
            await exchange.chunk(b"data: %d\n\n" % i)
            await asyncio.wait_for(seen.get(), 2)  # the next one only when the client has this one
        await exchange.end()

    async with nodes(FakeNode(script=script)) as (node,), proxy_for(node) as (_, url), client(url) as http:
        got = b""
        async with http.stream("POST", CHAT, content=BODY) as response:
            async for piece in response.aiter_raw():
                got += piece
                seen.put_nowait(None)
    assert got == b"data: 0\n\ndata: 1\n\ndata: 2\n\n"


async def test_pieces_are_not_held_back_for_an_ack() -> None:
    async with server_for() as (server, _, url):
        _, writer = await asyncio.open_connection("127.0.0.1", int(url.rpartition(":")[2]))
        writer.write(b"G")
        await eventually(lambda: len(server.server_state.connections) == 1)
        (connection,) = server.server_state.connections
        assert connection.transport.get_extra_info("socket").getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY)  # type: ignore[union-attr]
        writer.close()


async def test_large_body_both_ways() -> None:
    async def script(exchange: Exchange) -> None:
        await exchange.reply(200, exchange.request.body)

    body = b'{"model": "m", "x": "' + b"y" * 3_000_000 + b'"}'
    async with nodes(FakeNode(script=script)) as (node,), proxy_for(node) as (_, url), client(url) as http:
        assert (await http.post(CHAT, content=body)).content == body


async def test_connections_to_a_node_are_pooled() -> None:
    async with nodes(FakeNode()) as (node,), proxy_for(node) as (_, url), client(url) as http:
        before = node.connections
        for _ in range(5):
            await http.post(CHAT, content=BODY)
        assert len(node.requests) == 5
        assert node.connections - before <= 1


async def test_openai_client() -> None:
    chunk = {"id": "c", "object": "chat.completion.chunk", "created": 1, "model": "m"}
    message = {"role": "assistant", "content": "hello"}

    async def script(exchange: Exchange) -> None:
        if not json.loads(exchange.request.body).get("stream"):
            choice = {"index": 0, "message": message, "finish_reason": "stop"}
            await exchange.reply(200, {**chunk, "object": "chat.completion", "choices": [choice]})
            return
        await exchange.start_events()
        for text in ("hel", "lo", None):
            choice = {"index": 0, "delta": {"content": text} if text else {}, "finish_reason": None if text else "stop"}
            await exchange.chunk(b"data: " + json.dumps({**chunk, "choices": [choice]}).encode() + b"\n\n")
        await exchange.chunk(b"data: [DONE]\n\n")
        await exchange.end()

    async with nodes(FakeNode(script=script)) as (node,), proxy_for(node, api_keys=("k",)) as (_, url):
        async with openai.AsyncOpenAI(base_url=url + "/v1", api_key="k", max_retries=0) as ai:
            whole = await ai.chat.completions.create(model="m", messages=[])
            stream = await ai.chat.completions.create(model="m", messages=[], stream=True)
            text = "".join([part.choices[0].delta.content or "" async for part in stream])
            assert [model.id async for model in ai.models.list()] == ["m"]
            assert (await ai.models.retrieve("m")).id == "m"
            with pytest.raises(openai.NotFoundError) as missing:
                await ai.chat.completions.create(model="other", messages=[])
            assert missing.value.code == "model_not_found"
        async with openai.AsyncOpenAI(base_url=url + "/v1", api_key="wrong", max_retries=0) as ai:
            with pytest.raises(openai.AuthenticationError):
                await ai.models.list()
    assert whole.choices[0].message.content == text == "hello"


@pytest.mark.parametrize(
    ("body", "status", "code", "param"),
    [
        (b"", 400, "invalid_request", None),
        (b"{", 400, "invalid_request", None),
        (b'{"model": "m"} x', 400, "invalid_request", None),
        (b'{"model": "m", "x": NaN}', 400, "invalid_request", None),
        (b'{"model": "\\ud800"}', 400, "invalid_request", None),
        (b'{"model": "m", "x": ' + b"[" * 100_000 + b"]" * 100_000 + b"}", 400, "invalid_request", None),
        (b"[1]", 400, "invalid_request", "model"),
        (b"{}", 400, "invalid_request", "model"),
        (b'{"model": null}', 400, "invalid_request", "model"),
        (b'{"model": ["m"]}', 400, "invalid_request", "model"),
        (b'{"model": "other"}', 404, "model_not_found", "model"),
        (b'{"model": ""}', 404, "model_not_found", "model"),
    ],
)
async def test_bad_bodies(body: bytes, status: int, code: str, param: str | None) -> None:
    async with nodes(FakeNode()) as (node,), proxy_for(node) as (proxy, url), client(url) as http:
        response = await http.post(CHAT, content=body)
    assert response.status_code == status
    error = response.json()["error"]
    assert (error["code"], error["param"]) == (code, param)
    assert set(error) == {"message", "type", "param", "code"}
    assert node.requests == []
    assert proxy.active == 0


@pytest.mark.parametrize("size", [1001, 1999, 50_000])
@pytest.mark.parametrize("chunked", [False, True])
async def test_body_limit(size: int, chunked: bool) -> None:
    body = b'{"model": "m", "x": "' + b"y" * (size - 23) + b'"}'
    assert len(body) == size

    async def stream() -> AsyncIterator[bytes]:
        yield body

    async with nodes(FakeNode()) as (node,), proxy_for(node, max_body_bytes=1000) as (_, url), client(url) as http:
        response = await http.post(CHAT, content=stream() if chunked else body)
        assert (response.status_code, response.json()["error"]["code"]) == (413, "request_too_large")
        assert node.requests == []
        fits = await http.post(CHAT, content=b'{"model": "m"}'.ljust(1000))
        assert fits.status_code == 200


async def test_slow_body_and_slow_head(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("lmkit.web.connection.HEAD_SECONDS", 0.2)
    async with proxy_for(body_timeout=0.2) as (proxy, url):
        port = int(url.rpartition(":")[2])
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(b"POST /v1/completions HTTP/1.1\r\nHost: [::]\r\nContent-Length: 10\r\n\r\n{")
        assert (await asyncio.wait_for(reader.read(), 10)).startswith(b"HTTP/1.1 408")
        writer.close()
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        received = b""
        with contextlib.suppress(ConnectionError):  # a reset, if a byte was on its way when the proxy closed
            for byte in b"POST /v1/completions HTTP/1.1\r\nHost: slow.example\r\n":
                writer.write(bytes([byte]))
                await asyncio.sleep(0.02)
                if reader.at_eof():
                    break
            received = await asyncio.wait_for(reader.read(), 10)
        assert received == b""
        writer.close()
        await eventually(lambda: proxy.active == 0)


async def test_requests_beyond_the_limit_are_refused_but_not_health() -> None:
    release = asyncio.Event()

    async def script(exchange: Exchange) -> None:
        await release.wait()
        await exchange.reply(200, {})

    async with (
        nodes(FakeNode(script=script)) as (node,),
        proxy_for(node, max_in_flight=2) as (proxy, url),
        client(url) as http,
    ):
        running = [asyncio.create_task(http.post(CHAT, content=BODY)) for _ in range(2)]
        await eventually(lambda: len(node.requests) == 2)
        refused = await http.post(CHAT, content=BODY)
        assert (refused.status_code, refused.json()["error"]["code"]) == (503, "queue_full")
        assert int(refused.headers["retry-after"]) >= 1
        assert (await http.get("/health")).status_code == 200
        release.set()
        assert [(await task).status_code for task in running] == [200, 200]
        await eventually(lambda: proxy.active == 0)
        assert (await http.post(CHAT, content=BODY)).status_code == 200


async def test_known_model_without_a_healthy_node() -> None:
    async with nodes(FakeNode()) as (node,), proxy_for(node, unhealthy_after=1) as (proxy, url), client(url) as http:
        proxy.registry.failed(proxy.registry.nodes()[0], "down")
        for response in (await http.post(CHAT, content=BODY), await http.get("/v1/models/m")):
            assert (response.status_code, response.json()["error"]["code"]) == (503, "engine_unavailable")
            assert int(response.headers["retry-after"]) >= 1
        assert (await http.get("/v1/models/other")).status_code == 404
        assert (await http.get("/v1/models")).json()["data"] == []
