"""A client cannot tell from an error, or from how a key is sent, whether it talks to a server or to a proxy."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import re
from collections.abc import AsyncIterator, Callable
from typing import Any

import httpx
import pytest

from lmkit.config import ServerConfig
from lmkit.errors import ConfigError
from lmkit.proxy.app import Proxy
from lmkit.proxy.config import NodeConfig, ProxyConfig, load_config
from lmkit.proxy.server import http_server as proxy_server
from lmkit.serve.http import http_server as serve_server
from lmkit.web.listen import bind, listen, url
from lmkit.web.server import HttpServer
from tests.serve.in_process import TOKENIZER, StubEngine, one_model

KEY = "the-key"
MAX_BODY = 1000
CHAT, MESSAGES, RESPONSES = "/v1/chat/completions", "/v1/messages", "/v1/responses"


@contextlib.asynccontextmanager
async def running(make: Callable[[Callable[[], None]], HttpServer]) -> AsyncIterator[str]:
    """The URL of a running server."""
    ready = asyncio.Event()
    with contextlib.closing(bind("127.0.0.1", 0)) as sock:
        listen(sock)
        address = url(sock)
        server = make(ready.set)
        task = asyncio.create_task(server.serve(sockets=[sock]))
        await asyncio.wait_for(ready.wait(), 10)
        try:
            yield address
        finally:
            server.should_exit = True
            await task


@contextlib.asynccontextmanager
async def both(**fields: Any) -> AsyncIterator[tuple[str, str]]:
    """The URLs of a server and of a proxy that ask for the same key."""
    server_config = ServerConfig(api_keys=(KEY,), max_body_bytes=MAX_BODY, body_memory=3 * MAX_BODY, **fields)
    proxy_config = ProxyConfig(
        api_keys=(KEY,), max_body_bytes=MAX_BODY, body_memory=3 * MAX_BODY, drain_seconds=0, **fields
    )
    async with (
        Proxy(proxy_config) as proxy,
        running(
            lambda ready: serve_server(one_model(StubEngine(), server_config), [TOKENIZER], server_config, ready)
        ) as first,
        running(lambda ready: proxy_server(proxy_config, proxy, ready)) as second,
    ):
        yield first, second


JSON = {"content-type": "application/json"}
BEARER = {"authorization": f"Bearer {KEY}"}
CASES: list[tuple[int, str, str, dict[str, Any]]] = [
    (401, "GET", "/v1/models", {}),
    (401, "HEAD", "/v1/models", {}),
    (401, "GET", "/nowhere", {}),
    (401, "POST", CHAT, {"headers": {"authorization": "Bearer wrong"}, "json": {}}),
    (401, "POST", CHAT, {"headers": {"authorization": f"Basic {KEY}"}, "json": {}}),
    (401, "POST", CHAT, {"headers": {"x-api-key": "wrong"}, "json": {}}),
    (400, "POST", CHAT, {"headers": BEARER | JSON | {"x-api-key": "wrong"}, "content": b"{"}),  # one right key of two
    (404, "GET", "/nowhere", {"headers": BEARER}),
    (404, "GET", "/metric", {"headers": BEARER}),
    (400, "POST", CHAT, {"headers": BEARER | JSON, "content": b'{"model": '}),
    (400, "POST", CHAT, {"headers": BEARER | JSON, "content": b'{"model": "\xff"}'}),
    (413, "POST", CHAT, {"headers": BEARER | JSON, "content": b" " * (MAX_BODY + 1)}),
    (413, "POST", CHAT, {"headers": BEARER | JSON, "content": b" " * (3 * MAX_BODY)}),
    (401, "POST", MESSAGES, {"headers": {"x-api-key": "wrong"}, "json": {}}),
    (400, "POST", MESSAGES, {"headers": BEARER | JSON, "content": b'{"model": '}),
    (413, "POST", MESSAGES, {"headers": BEARER | JSON, "content": b" " * (MAX_BODY + 1)}),
]


@pytest.mark.anyio
async def test_errors_are_the_same() -> None:
    async with both() as addresses, httpx.AsyncClient(trust_env=False) as client:
        for status, method, path, options in CASES:
            server, proxy = [await client.request(method, address + path, **options) for address in addresses]
            assert server.status_code == proxy.status_code == status, (method, path, options)
            assert server.content == proxy.content, (method, path, options)
            dates = [dict(response.headers).pop("date") for response in (server, proxy)]
            assert all(date.endswith(" GMT") for date in dates)
            assert lasting_headers(server) == lasting_headers(proxy), (method, path, options)


@pytest.mark.anyio
async def test_the_apis_of_agents_pass_the_proxy() -> None:
    said = [{"role": "user", "content": "Hi"}]
    bodies = {MESSAGES: {"max_tokens": 2, "messages": said}, RESPONSES: {"input": said, "store": False}}
    server_config = ServerConfig(served_model_name=("m",))
    async with running(
        lambda ready: serve_server(one_model(StubEngine(), server_config), [TOKENIZER], server_config, ready)
    ) as node:
        proxy_config = ProxyConfig(nodes=(NodeConfig(url=node),), drain_seconds=0)
        async with (
            Proxy(proxy_config) as proxy,
            running(lambda ready: proxy_server(proxy_config, proxy, ready)) as front,
            httpx.AsyncClient(trust_env=False) as client,
        ):
            await proxy.checked.wait()
            for path, body in bodies.items():
                for stream in (False, True):
                    fields = {"model": "m", "stream": stream, **body}
                    texts = [(await client.post(url + path, json=fields)).text for url in (node, front)]
                    direct, passed = [re.sub(r'_[0-9a-f]{32}|"\w+_at":[0-9.]+', "", text) for text in texts]
                    assert direct == passed
                    assert ("message_stop" in passed or "response.incomplete" in passed) == stream
            counted = await client.post(f"{front}{MESSAGES}/count_tokens", json={"model": "m", "messages": said})
            assert counted.json()["input_tokens"] > 0
            refused = await client.post(front + MESSAGES, json={"model": "other", "messages": said})
            assert refused.json()["error"]["type"] == "not_found_error"


def lasting_headers(response: httpx.Response) -> dict[str, str]:
    return {name: value for name, value in response.headers.items() if name not in ("date", "x-request-id")}


@pytest.mark.anyio
async def test_every_answer_has_a_request_id() -> None:
    cases: list[tuple[str, str, dict[str, Any]]] = [
        *((method, path, options) for _, method, path, options in CASES),
        ("GET", "/health", {}),
        ("GET", "/", {"headers": BEARER}),
        ("GET", "/metrics", {"headers": BEARER}),
        ("GET", "/v1/models", {"headers": BEARER}),
        ("GET", CHAT, {"headers": BEARER}),
        ("POST", "/v1/embeddings", {"headers": BEARER | JSON, "content": b"{}"}),
    ]
    async with both() as addresses, httpx.AsyncClient(trust_env=False) as client:
        for address in addresses:
            for method, path, options in cases:
                headers = options.get("headers", {}) | {"x-request-id": "mine-1.2_3"}
                response = await client.request(method, address + path, **options | {"headers": headers})
                assert response.headers.get_list("x-request-id") == ["mine-1.2_3"], (address, method, path)
            fresh = set()
            for value in (b"a b", b"x" * 129, b"", b"a;b", "ü".encode("latin-1")):
                response = await client.get(address + "/health", headers={b"x-request-id": value})
                (given,) = response.headers.get_list("x-request-id")
                assert re.fullmatch("[0-9a-f]{32}", given)
                fresh.add(given)
            assert len(fresh) == 5


@pytest.mark.anyio
async def test_the_log_tells_who_asked_and_why_it_was_refused(caplog: pytest.LogCaptureFixture) -> None:
    body = b'{"model": 5, "messages": [{"content": "secret"}]}'
    logger = logging.getLogger("lmkit")
    logger.addHandler(caplog.handler)  # lmkit's loggers may not propagate
    try:
        with caplog.at_level(logging.INFO, "lmkit"):
            async with both() as addresses, httpx.AsyncClient(trust_env=False) as client:
                for address in addresses:
                    caplog.clear()
                    headers = BEARER | JSON | {"x-request-id": "id-7"}
                    await client.post(address + CHAT, headers=headers, content=body)
                    assert re.search(
                        r"POST /v1/chat/completions 400 \d+ ms from=127.0.0.1 key=[0-9a-f]{8} id=id-7 "
                        "code=invalid_request param='model'",
                        caplog.text,
                    )
                    assert "secret" not in caplog.text
                    assert KEY not in caplog.text
                    await client.get(address + "/v1/models", headers={"x-api-key": "other"})
                    assert len(set(re.findall("key=[0-9a-f]+", caplog.text))) == 2
    finally:
        logger.removeHandler(caplog.handler)


@pytest.mark.anyio
async def test_known_routes_of_other_servers_are_named() -> None:
    """A node may have a POST route below /v1 that this proxy does not know, so the proxy only tells of the others."""
    paths = ["/api/create", "/docs", "/lora-adapters", "/get_ppl", "/info"]
    async with both() as addresses, httpx.AsyncClient(trust_env=False, headers=BEARER) as client:
        for address in addresses:
            for path in [*paths, "/v1/threads", "/v1/threads/t1/runs", "/v1/assistants/a1"]:
                answer = await client.get(address + path)
                error = answer.json()["error"]
                assert answer.status_code == 404, path
                message = error if path.startswith("/api/") else error["message"]  # Ollama's form
                assert re.match(r"/\S+ is not supported by this server, which has ", message), path
                assert "POST /v1/chat/completions" in message
                assert (await client.get(address + path, headers={"authorization": ""})).status_code == 401
            wrong = (await client.get(address + "/v1/completions")).json()["error"]
            assert wrong["message"] == "GET is not allowed on this route; use POST"
            slip = (await client.get(address + "/metric")).json()["error"]
            assert slip["message"] == "there is no such route; did you mean /metrics?"
        for path in ("/v1/audio/speech", "/v1/threads/t/runs", "/v1/moderations"):
            error = (await client.post(addresses[0] + path, json={})).json()["error"]
            assert re.match("/v1/[a-z/]+ is not supported by this server", error["message"])
        slip = (await client.post(addresses[0] + "/v1/chat/completion", json={})).json()["error"]
        assert slip["message"] == "there is no such route; did you mean /v1/chat/completions?"


@pytest.mark.anyio
async def test_paths_of_openai_s_api_may_leave_out_v1() -> None:
    async with both() as addresses, httpx.AsyncClient(trust_env=False, headers=BEARER) as client:
        for address in addresses:
            for short in ("/chat/completions", "/completions", "/embeddings", "/responses"):
                one, other = [(await client.post(address + path, json={"model": 5})).json() for path in
                              (short, "/v1" + short)]  # fmt: skip
                assert one == other
                assert one["error"]["param"] == "model"
            assert (await client.get(address + "/models")).json()["object"] == "list"


@pytest.mark.anyio
async def test_the_root_tells_the_routes_to_those_with_a_key() -> None:
    async with both() as addresses, httpx.AsyncClient(trust_env=False) as client:
        for address in addresses:
            assert (await client.get(address + "/")).status_code == 401
            root = await client.get(address + "/", headers=BEARER)
            assert root.status_code == 200
            assert {"GET /v1/models", "POST /v1/chat/completions", "GET /health"} <= set(root.json()["routes"])
            assert (await client.head(address + "/", headers=BEARER)).status_code == 200


@pytest.mark.anyio
async def test_what_a_401_says() -> None:
    """The envelope is OpenAI's: a wrong key is an invalid_request_error there."""
    async with both() as addresses, httpx.AsyncClient(trust_env=False) as client:
        for address in addresses:
            response = await client.get(address + "/v1/models")
            assert response.json()["error"] == {
                "message": "missing or wrong API key; send Authorization: Bearer KEY",
                "type": "invalid_request_error", "param": None, "code": "invalid_api_key",
            }  # fmt: skip
            assert response.headers["www-authenticate"] == "Bearer"
            messages = (await client.post(address + "/v1/messages", json={})).json()
            assert (messages["type"], messages["error"]["type"]) == ("error", "authentication_error")
            for path in ("/api/chat", "/api/generate", "/api/show", "/api/pull", "/api/embed", "/api/embeddings"):
                refused = await client.post(address + path, json={"model": "m"})
                assert (refused.status_code, type(refused.json()["error"])) == (401, str), path
            for path in ("/api/tags", "/api/ps", "/api/version"):
                assert (await client.get(address + path)).status_code == 401, path


@pytest.mark.anyio
async def test_both_take_a_key_in_either_header() -> None:
    async with both() as addresses, httpx.AsyncClient(trust_env=False) as client:
        for address in addresses:
            for headers in (BEARER, {"x-api-key": KEY}, BEARER | {"x-api-key": KEY}):
                assert (await client.get(address + "/v1/models", headers=headers)).status_code == 200


@pytest.mark.anyio
async def test_unfinished_bodies_share_one_budget() -> None:
    """Each more makes the server refuse the largest. A small request passes beside them, and all is given back."""
    head = (
        f"POST {CHAT} HTTP/1.1\r\nHost: [::]\r\nAuthorization: Bearer {KEY}\r\nContent-Type: application/json\r\n"
        f"Content-Length: {MAX_BODY}\r\n\r\n"
    )
    async with both() as addresses, httpx.AsyncClient(trust_env=False, headers=BEARER | JSON) as client:
        for address in addresses:
            host, port = address.removeprefix("http://").split(":")
            connections = []
            for i in range(5):
                connections.append(await asyncio.open_connection(host, int(port)))
                connections[-1][1].write(head.encode() + b" " * (900 - i))
                await asyncio.sleep(0.05)
            for reader, _ in connections[:2]:  # the largest
                answer = await asyncio.wait_for(reader.read(), 10)  # to the connection's end
                assert answer.startswith(b"HTTP/1.1 503 ")
                assert b"retry-after: " in answer.lower()
                assert b'"code":"overloaded"' in answer
            small = await client.post(address + CHAT, content=b'{"model":5}')
            assert small.json()["error"]["param"] == "model"  # it was read
            for _, writer in connections:
                writer.close()
                await writer.wait_closed()
            large = await client.post(address + CHAT, content=b'{"model":5' + b" " * (MAX_BODY - 11) + b"}")
            assert large.json()["error"]["param"] == "model"


@pytest.mark.anyio
async def test_pages_of_listed_origins_may_read_answers_and_no_others() -> None:
    ours, other = "https://chat.example.com", "https://evil.example.com"
    preflight = {"access-control-request-method": "POST", "access-control-request-headers": "authorization,x-any"}
    async with both(cors_origins=(ours,)) as addresses, httpx.AsyncClient(trust_env=False) as client:
        for address in addresses:
            allowed = await client.options(address + CHAT, headers={"origin": ours} | preflight)
            assert allowed.status_code == 200
            assert allowed.headers["access-control-allow-origin"] == ours
            private = {"access-control-request-private-network": "true"}
            allowed = await client.options(address + CHAT, headers={"origin": ours} | preflight | private)
            assert allowed.headers["access-control-allow-private-network"] == "true"
            assert "x-any" in allowed.headers["access-control-allow-headers"]
            assert allowed.headers["x-request-id"]
            for path, headers in (("/v1/models", BEARER), ("/v1/models", {}), (CHAT, BEARER)):  # errors can be read too
                answer = await client.get(address + path, headers=headers | {"origin": ours})
                assert answer.headers["access-control-allow-origin"] == ours
                assert "origin" in answer.headers["vary"].lower()
                assert "access-control-allow-credentials" not in answer.headers
            for headers in (preflight, BEARER):
                refused = await client.options(address + CHAT, headers={"origin": other} | headers)
                assert "access-control-allow-origin" not in refused.headers
            read = await client.get(address + "/v1/models", headers=BEARER | {"origin": other})
            assert "access-control-allow-origin" not in read.headers


@pytest.mark.anyio
async def test_cors_is_off_by_default() -> None:
    async with both() as addresses, httpx.AsyncClient(trust_env=False, headers=BEARER) as client:
        for address in addresses:
            answer = await client.get(address + "/v1/models", headers={"origin": "https://chat.example.com"})
            assert not [name for name in answer.headers if name.startswith("access-control-allow")]
            asked = {"origin": "https://chat.example.com", "access-control-request-method": "POST"}
            preflight = await client.options(address + CHAT, headers=asked)
            assert preflight.status_code == 400
            assert "access-control-allow-origin" not in preflight.headers


@pytest.mark.parametrize("origin", ["*", "null", "chat.example.com", "https://a/", "https://A.example", "https://*.b"])
def test_an_origin_is_one_site(origin: str) -> None:
    with pytest.raises(ConfigError, match="is not an origin"):
        ServerConfig(cors_origins=(origin,))
    with pytest.raises(ConfigError, match="is not an origin"):
        load_config(None, cors_origins=(origin,))
