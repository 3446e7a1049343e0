"""Who may do what, by the pure function, by the application, and over a socket with hostile request lines."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from lmkit.errors import RequestError
from lmkit.proxy.app import Proxy, resolve
from lmkit.proxy.auth import Access, Keys, authorize
from lmkit.proxy.config import ProxyConfig
from lmkit.web.listen import is_loopback
from tests.proxy.fakes import FakeNode, nodes, proxy_for

USER, ADMIN = "user-key", "admin-key"
BOTH = Keys.of([USER, "other"], [ADMIN])
LOCAL = [(b"host", b"127.0.0.1:8080")]


def outcome(keys: Keys, role: Access, *headers: tuple[bytes, bytes]) -> str | None:
    try:
        authorize(keys, role, [*LOCAL, *headers])
    except RequestError as error:
        return error.code
    return None


def bearer(key: str) -> tuple[bytes, bytes]:
    return (b"authorization", f"Bearer {key}".encode())


@pytest.mark.parametrize(
    ("role", "headers", "expected"),
    [
        (Access.OPEN, [], None),
        (Access.USER, [], "invalid_api_key"),
        (Access.USER, [bearer(USER)], None),
        (Access.USER, [bearer("other")], None),
        (Access.USER, [bearer(ADMIN)], None),
        (Access.USER, [(b"x-api-key", USER.encode())], None),
        (Access.USER, [(b"authorization", b"bearer   " + USER.encode() + b" ")], None),
        (Access.USER, [bearer(USER.upper())], "invalid_api_key"),
        (Access.USER, [bearer(USER[:-1])], "invalid_api_key"),
        (Access.USER, [bearer("u")], "invalid_api_key"),  # a key is not a list of letters
        (Access.USER, [bearer("")], "invalid_api_key"),
        (Access.USER, [(b"authorization", USER.encode())], "invalid_api_key"),
        (Access.USER, [(b"authorization", b"Basic " + USER.encode())], "invalid_api_key"),
        (Access.USER, [bearer("wrong"), bearer(USER)], "invalid_api_key"),
        (Access.USER, [(b"x-api-key", b"wrong"), bearer(USER)], None),
        (Access.USER, [(b"x-api-key", ADMIN.encode()), bearer(USER)], "invalid_api_key"),  # who asks?
        (Access.ADMIN, [(b"x-api-key", b"wrong"), bearer(USER)], "permission_denied"),
        (Access.USER, [(b"x-api-key", USER.encode()), bearer(USER)], None),
        (Access.USER, [bearer("\xff")], "invalid_api_key"),
        (Access.ADMIN, [], "invalid_api_key"),
        (Access.ADMIN, [bearer(USER)], "permission_denied"),
        (Access.ADMIN, [bearer(ADMIN)], None),
        (Access.ADMIN, [bearer("wrong")], "invalid_api_key"),
    ],
)
def test_with_keys(role: Access, headers: list[tuple[bytes, bytes]], expected: str | None) -> None:
    assert outcome(BOTH, role, *headers) == expected


def test_without_an_admin_key_nobody_manages_nodes() -> None:
    for lines in ([], [USER], ["p role=proxy"]):
        assert outcome(Keys.of(lines, []), Access.ADMIN) == "permission_denied"
        assert outcome(Keys.of(lines, []), Access.ADMIN, bearer(USER)) == "permission_denied"
    assert outcome(Keys.of([], [ADMIN]), Access.ADMIN) == "invalid_api_key"
    assert outcome(Keys.of([], [ADMIN]), Access.USER) is None


def test_roles_stand_beside_keys() -> None:
    keys = Keys.of([USER, "boss role=admin", "outer role=proxy"], [])
    assert outcome(keys, Access.ADMIN, bearer("boss")) is None
    for key in (USER, "outer"):
        assert outcome(keys, Access.USER, bearer(key)) is None
        assert outcome(keys, Access.ADMIN, bearer(key)) == "permission_denied"
    with pytest.raises(ValueError, match="entry 2") as error:
        ProxyConfig(api_keys=(USER, "secret role=root"))
    assert "secret" not in str(error.value)


def test_is_loopback() -> None:
    assert all(map(is_loopback, ("127.0.0.1", "127.1.2.3", "::1", "localhost", "LOCALHOST")))
    assert not any(map(is_loopback, ("0.0.0.0", "::", "10.0.0.1", "example.org", "127.0.0.1.nip.io", "")))


def test_routes_are_exact() -> None:
    roles = {
        ("GET", "/health"): Access.OPEN, ("HEAD", "/health"): Access.OPEN,
        ("GET", "/health/"): Access.USER, ("GET", "/Health"): Access.USER, ("GET", "//health"): Access.USER,
        ("GET", "/healthz"): Access.USER,
        ("GET", "/v1/../health"): Access.USER, ("GET", "/metrics"): Access.USER, ("GET", "/v1/models"): Access.USER,
        ("POST", "/v1/chat/completions"): Access.USER, ("OPTIONS", "/v1/chat/completions"): Access.USER,
        ("GET", "/"): Access.USER,
        ("GET", "/admin/nodes"): Access.ADMIN, ("HEAD", "/admin/nodes"): Access.ADMIN,
        ("PUT", "/admin/nodes"): Access.ADMIN,
        ("OPTIONS", "/admin/nodes"): Access.ADMIN, ("GET", "/docs"): Access.USER, ("GET", ""): Access.USER,
    }  # fmt: skip
    for (method, path), role in roles.items():
        assert resolve(method, path).access is role, (method, path)


async def call(proxy: Proxy, method: str, path: str, headers: list[tuple[bytes, bytes]], **scope: Any) -> int:
    sent: list[dict[str, Any]] = []
    messages = [{"type": "http.request", "body": b'{"model": "m"}'}]

    async def receive() -> dict[str, Any]:
        return messages.pop() if messages else await asyncio.Event().wait()  # type: ignore[return-value]

    async def send(message: Any) -> None:
        sent.append(message)

    full = {"type": "http", "method": method, "path": path, "query_string": b"", "headers": headers, **scope}
    await proxy(full, receive, send)
    return int(sent[0]["status"])


@pytest.mark.anyio
@pytest.mark.parametrize("method", ["GET", "HEAD", "OPTIONS", "POST", "PUT", "DELETE", "TRACE", "BREW"])
async def test_everything_but_health_needs_a_key(method: str) -> None:
    proxy = Proxy(ProxyConfig(api_keys=(USER,), admin_keys=(ADMIN,)))
    paths = ["/", "/v1/models", "/v1/models/m", "/v1/chat/completions", "/admin/nodes", "/metrics", "/openapi.json",
    "/v1/../health",
             "//v1/models", "/health/", "/HEALTH", "/v1%2fmodels", "/health/../v1/models", "/docs"]  # fmt: skip
    for path in paths:
        assert await call(proxy, method, path, LOCAL) == 401, path
        for host in (b"x/health?", b"/health", b"127.0.0.1/health?x=", b""):
            assert await call(proxy, method, path, [(b"host", host)]) == 401, (path, host)
    # A server's root path is not taken off: what is not literally /health is not /health.
    assert await call(proxy, method, "/v/health", LOCAL, root_path="/v") == 401
    assert await call(proxy, method, "/v1/health", LOCAL, root_path="/v1") == 401


@pytest.mark.anyio
async def test_unknown_routes_and_methods_for_a_known_client() -> None:
    proxy = Proxy(ProxyConfig(api_keys=(USER,), admin_keys=(ADMIN,), node_wait=0.0))
    headers = [*LOCAL, bearer(USER)]
    assert await call(proxy, "GET", "/nope", headers) == 404
    assert await call(proxy, "GET", "/v1/completions", headers) == 405
    assert await call(proxy, "OPTIONS", "/v1/completions", headers) == 405
    assert await call(proxy, "DELETE", "/v1/models", headers) == 405
    assert await call(proxy, "POST", "/v1/chat/completions", headers) == 404  # the model
    for method in ("GET", "POST", "DELETE", "PUT"):
        assert await call(proxy, method, "/admin/nodes", headers) == 403


@pytest.mark.anyio
async def test_websockets_are_closed() -> None:
    sent: list[Any] = []

    async def send(message: Any) -> None:
        sent.append(message)

    await Proxy(ProxyConfig())({"type": "websocket", "path": "/health"}, send, send)  # type: ignore[arg-type]
    assert sent == [{"type": "websocket.close", "code": 1008}]


async def raw(url: str, request: bytes) -> bytes:
    reader, writer = await asyncio.open_connection("127.0.0.1", int(url.rpartition(":")[2]))
    writer.write(request)
    status = (await asyncio.wait_for(reader.readline(), 2)).split(b" ")[1]
    writer.close()
    return status


@pytest.mark.anyio
async def test_hostile_request_lines() -> None:
    body = b'{"model": "m"}'
    targets = [b"//v1/chat/completions", b"/v1//chat/completions", b"/v1/../v1/chat/completions",
    b"/v1/chat/../completions", b"/v1/%2e%2e/admin",
               b"/v1%2fchat/completions", b"/v1/chat%2fcompletions", b"/v1/chat/completions/", b"/v1/",
               b"/V1/chat/completions", b"/v1/./x",
               b"/v1/x;y", b"/v1/a\\b", b"http://127.0.0.1/v1/../v1/chat/completions", b"*"]  # fmt: skip
    async with nodes(FakeNode()) as (node,), proxy_for(node, api_keys=(USER,)) as (_, url):
        for target in targets:
            head = b"POST %s HTTP/1.1\r\nHost: [::]\r\nContent-Length: %d\r\n" % (target, len(body))
            assert await raw(url, head + b"\r\n" + body) == b"401", target
            assert await raw(url, head + b"Authorization: Bearer user-key\r\n\r\n" + body) == b"404", target
        assert (
            await raw(url, b"POST /v1/chat/completions HTTP/1.1\r\nHost: x/health?\r\nContent-Length: 0\r\n\r\n")
            == b"401"
        )
        assert await raw(url, b"HEAD /v1/models HTTP/1.1\r\nHost: x/health?\r\n\r\n") == b"401"
        assert await raw(url, b"GET /health HTTP/1.1\r\nHost: [::]\r\n\r\n") == b"200"
        assert await raw(url, b"GET /health HTTP/1.1\r\nHost: [::]\r\nX: " + b"y" * 100_000 + b"\r\n\r\n") == b"431"
        assert await raw(url, b"GET /health HTTP/1.1\r\nHost: [::]\r\n" + b"a: b\r\n" * 10_000 + b"\r\n") == b"431"
        assert node.requests == []
        whole = b"POST http://127.0.0.1/v1/chat/completions HTTP/1.1\r\nHost: x\r\nContent-Length: 14\r\n"
        assert await raw(url, whole + b"\r\n" + body) == b"401"
        assert await raw(url, whole + b"Authorization: Bearer user-key\r\n\r\n" + body) == b"200"


@pytest.mark.anyio
async def test_no_cross_origin_permission_is_given() -> None:
    async with proxy_for() as (_, url):
        reader, writer = await asyncio.open_connection("127.0.0.1", int(url.rpartition(":")[2]))
        head = b"GET /v1/models HTTP/1.1\r\nHost: [::]\r\nOrigin: http://evil.example\r\n"
        writer.write(head + b"Connection: close\r\n\r\n")
        assert b"access-control" not in (await reader.read()).lower()
        writer.close()
