"""A server without keys answers to addresses and its own names only, so that no page can make it its own site."""

from __future__ import annotations

from typing import Any

import httpx
import pytest

from lmkit.config import ServerConfig
from lmkit.errors import ConfigError
from lmkit.web.hosts import Hosts
from tests.proxy.fakes import FakeNode, nodes, proxy_for
from tests.serve.in_process import App, ScriptedEngine

OURS = (
    "localhost", "LocalHost:8000", "localhost.", "app.localhost:1", "127.0.0.1", "127.0.0.1:8000", "192.168.1.7:8000",
    "[::1]:8000", "[::1]", "gpu1:8000", "node_2:8000", "x", "a.example.com.", "llm.example.com:443",
)  # fmt: skip
STRANGE = (
    "evil.example", "evil.example:8000", "localhost.evil.example", "127.0.0.1.evil.example", "evil-localhost.example",
    "example.com", "evil.example@localhost", "localhost/evil.example", "0x7f.1", "2130706433", "[evil.example]",
    "", ":80", "localhost,evil.example", "evil.example:localhost", "127.0.0.1:80:80",
)  # fmt: skip
PATHS = ("/", "/v1/models", "/metrics", "/page/page.js", "/openapi.json", "/no/such/route")


@pytest.mark.parametrize("host", [*OURS, *STRANGE])
def test_names(host: str) -> None:
    async def app(*_: Any) -> None:
        raise AssertionError

    assert Hosts(app, ("gpu1", "*.example.com")).knows(host) is (host in OURS)
    assert Hosts(app, ("*",)).knows("evil.example")


@pytest.mark.parametrize("name", ["evil.example:80", "https://a", "*a", "a*", "", "[::1]"])
def test_a_wrong_name_is_refused(name: str) -> None:
    with pytest.raises(ConfigError, match="is not a host"):
        ServerConfig(allowed_hosts=(name,))


def check(answer: httpx.Response) -> None:
    assert answer.status_code == 403
    assert "--allowed-host evil.example " in answer.json()["error"]["message"]
    assert "access-control-allow-origin" not in answer.headers


def test_a_server_refuses_a_page_that_took_its_address() -> None:
    app = App(ScriptedEngine(), ServerConfig(allowed_hosts=("llm.example",), cors_origins=("http://evil.example",)))
    evil = {"host": "evil.example:8000", "origin": "http://evil.example:8000", "accept": "text/html"}
    for path in PATHS:
        check(app.request("GET", path, headers=evil))
        check(app.request("POST", path, headers=evil | {"x-lmkit-resume": "5"}, json={}))
    assert app.request("GET", "/health", headers=evil).status_code == 200
    assert app.request("GET", "/v1/models", headers={"host": "llm.example"}).status_code == 200
    keyed = App(ScriptedEngine(), ServerConfig(api_keys=("k" * 16,)))
    assert keyed.request("GET", "/v1/models", headers=evil).status_code == 401
    assert keyed.request("GET", "/v1/models", headers=evil | {"x-api-key": "k" * 16}).status_code == 200


@pytest.mark.anyio
async def test_a_proxy_refuses_a_page_that_took_its_address() -> None:
    evil = {"host": "evil.example", "origin": "http://evil.example", "accept": "text/html"}
    async with nodes(FakeNode("a")) as (a,), httpx.AsyncClient() as http:
        async with proxy_for(a, admin_keys=("admin",)) as (_, url):
            for path in (*PATHS, "/dashboard", "/admin/nodes"):
                check(await http.get(url + path, headers=evil))
            check(await http.post(url + "/v1/completions", headers=evil, json={"model": "m"}))
            check(await http.get(url + "/admin/events", headers=evil | {"x-api-key": "admin"}))
            head = {"host": "evil.example", "connection": "upgrade", "upgrade": "websocket"}
            check(await http.get(url + "/v1/realtime", headers=head))
        async with proxy_for(a, api_keys=("user",)) as (_, url):
            assert (await http.get(url + "/v1/models", headers=evil | {"x-api-key": "user"})).status_code == 200
        assert not a.requests
