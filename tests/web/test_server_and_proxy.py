"""A client cannot tell from an error, or from how a key is sent, whether it talks to a server or to a proxy."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable
from typing import Any

import httpx
import pytest

from lmkit.config import ServerConfig
from lmkit.proxy.app import Proxy
from lmkit.proxy.config import ProxyConfig
from lmkit.proxy.server import http_server as proxy_server
from lmkit.serve.http import http_server as serve_server
from lmkit.web.listen import bind, listen, url
from lmkit.web.server import HttpServer
from tests.serve.in_process import TOKENIZER, StubEngine

KEY = "the-key"
MAX_BODY = 1000
CHAT = "/v1/chat/completions"


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
async def both() -> AsyncIterator[tuple[str, str]]:
    """The URLs of a server and of a proxy that ask for the same key."""
    server_config = ServerConfig(api_keys=(KEY,), max_body_bytes=MAX_BODY)
    proxy_config = ProxyConfig(api_keys=(KEY,), max_body_bytes=MAX_BODY, drain_seconds=0)
    async with (
        Proxy(proxy_config, loopback=True) as proxy,
        running(lambda ready: serve_server(StubEngine(), TOKENIZER, server_config, ready)) as first,
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
    (401, "POST", CHAT, {"headers": BEARER | {"x-api-key": "wrong"}, "json": {}}),
    (404, "GET", "/nowhere", {"headers": BEARER}),
    (400, "POST", CHAT, {"headers": BEARER | JSON, "content": b'{"model": '}),
    (400, "POST", CHAT, {"headers": BEARER | JSON, "content": b'{"model": "\xff"}'}),
    (413, "POST", CHAT, {"headers": BEARER | JSON, "content": b" " * (MAX_BODY + 1)}),
    (413, "POST", CHAT, {"headers": BEARER | JSON, "content": b" " * (3 * MAX_BODY)}),
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
            assert without_date(server) == without_date(proxy), (method, path, options)


def without_date(response: httpx.Response) -> dict[str, str]:
    return {name: value for name, value in response.headers.items() if name != "date"}


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


@pytest.mark.anyio
async def test_both_take_a_key_in_either_header() -> None:
    async with both() as addresses, httpx.AsyncClient(trust_env=False) as client:
        for address in addresses:
            for headers in (BEARER, {"x-api-key": KEY}, BEARER | {"x-api-key": KEY}):
                assert (await client.get(address + "/v1/models", headers=headers)).status_code == 200
