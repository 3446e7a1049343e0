"""Nodes that come and go at run time, and what of it survives."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import stat
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from lmkit.errors import ConfigError
from lmkit.proxy.app import Proxy
from lmkit.proxy.config import NodeConfig, ProxyConfig, Registration
from lmkit.proxy.fleet import FleetState, load_state, save_state
from lmkit.proxy.registry import Registry
from tests.proxy.fakes import Exchange, FakeNode, eventually, nodes, proxy_for

pytestmark = pytest.mark.anyio


@contextlib.asynccontextmanager
async def admin(*fakes: FakeNode, **options: Any) -> AsyncIterator[tuple[Proxy, httpx.AsyncClient]]:
    options.setdefault("admin_keys", ("admin-key",))
    headers = {"authorization": "Bearer admin-key"}
    async with (
        proxy_for(*fakes, **options) as (proxy, url),
        httpx.AsyncClient(base_url=url, verify=False, trust_env=False, headers=headers) as http,
    ):
        yield proxy, http


def known(config: ProxyConfig) -> dict[str, str]:
    """What a proxy that starts with this configuration knows."""
    return {node.url: node.origin for node in Proxy(config).registry.nodes()}


async def test_add_use_remove(tmp_path: Path) -> None:
    state = str(tmp_path / "state.json")
    async with nodes(FakeNode("a"), FakeNode("b", models=("n",))) as (a, b), admin(a, state_file=state) as (_, http):
        body = {"url": b.url + "/", "weight": 2, "api_key": "node-key"}
        answer = (await http.post("/admin/nodes", json=body)).json()
        assert answer["persistent"] is True
        assert [(n["url"], n["healthy"], n["models"]) for n in answer["data"]] == [(b.url, True, ["n"])]
        assert "node-key" not in str(answer)
        assert (await http.post("/v1/completions", json={"model": "n"})).json()["node"] == "b"
        assert b.requests[0].header("authorization") == ["Bearer node-key"]
        config = ProxyConfig(nodes=(NodeConfig(url=a.url),), state_file=state)
        assert known(config) == {a.url: "config", b.url: "added"}

        listed = (await http.get("/admin/nodes")).json()["data"]
        assert [(n["url"], n["origin"], n["requests"]) for n in listed] == [(a.url, "config", 0), (b.url, "added", 1)]

        for fake in (a, b):  # also a configured node stays removed
            assert (await http.delete("/admin/nodes", params={"url": fake.url})).json()["removed"] == fake.url
        assert known(config) == {}
        assert (await http.post("/v1/completions", json={"model": "n"})).status_code == 404
        assert (await http.delete("/admin/nodes", params={"url": a.url})).status_code == 404
        await http.post("/admin/nodes", json={"url": a.url})
        assert known(config) == {a.url: "added"}


async def test_node_that_is_not_up_yet_is_added_and_used_later() -> None:
    async with nodes(FakeNode()) as (fake,):
        await fake.stop()
        async with admin(health_interval=0.02) as (proxy, http):
            answer = (await http.post("/admin/nodes", json={"url": fake.url})).json()
            assert answer["data"][0]["healthy"] is False
            assert "cannot be reached" in answer["data"][0]["reason"]
            assert answer["persistent"] is False
            await fake.start()
            await eventually(lambda: proxy.registry.nodes()[0].healthy)


async def test_adding_again_changes_a_node_and_keeps_its_requests() -> None:
    release = asyncio.Event()

    async def wait(exchange: Exchange) -> None:
        await release.wait()
        await exchange.reply(200, {})

    async with nodes(FakeNode(script=wait)) as (fake,), admin(fake) as (proxy, http):
        request = asyncio.create_task(http.post("/v1/completions", json={"model": "m"}))
        await eventually(lambda: proxy.registry.nodes()[0].in_flight == 1)
        await http.post("/admin/nodes", json={"url": fake.url, "models": ["m", "alias"]})
        (node,) = proxy.registry.nodes()
        assert node.in_flight == 1
        await http.delete("/admin/nodes", params={"url": fake.url})
        assert node.in_flight == 1  # it may finish
        release.set()
        assert (await request).status_code == 200
        await eventually(lambda: node.in_flight == 0)


async def test_leased_node_leaves_unless_it_comes_again(tmp_path: Path) -> None:
    state = str(tmp_path / "s.json")
    async with nodes(FakeNode()) as (fake,), admin(state_file=state, health_interval=0.02) as (proxy, http):
        await http.post("/admin/nodes", json={"url": fake.url, "lease_seconds": 60})
        (node,) = (await http.get("/admin/nodes")).json()["data"]
        assert 50 < node["lease_seconds_left"] <= 60
        restarted = Proxy(ProxyConfig(state_file=state))
        assert restarted.registry.status()[0]["lease_seconds_left"] > 50  # time to come again
        proxy.registry.clock = lambda: 1e9
        await eventually(lambda: proxy.registry.nodes() == [])
        assert load_state(Path(state)).added == ()


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"[]",
        b"[" * 100_000,
        b'{"url": 1}',
        b'{"url": "http://h/v1"}',
        b'{"url": "http://0.0.0.0:1"}',
        b'{"url": "http://u:p@h"}',
        b'{"url": "file:///etc"}',
        b'{"url": "http://h", "x": 1}',
        b'{"url": "http://h", "models": []}',
        b'{"url": "http://h", "lease_seconds": 0}',
        b'{"url": "http://h", "api_key": "a\\nb"}',
    ],
)
async def test_bad_registrations(body: bytes) -> None:
    async with admin() as (proxy, http):
        response = await http.post("/admin/nodes", content=body)
        assert (response.status_code, response.json()["error"]["code"]) == (400, "invalid_request")
        assert proxy.registry.nodes() == []
        for query in ("", "?url=", "?url=x", "?url=http://a&url=http://b"):
            assert (await http.delete("/admin/nodes" + query)).status_code == 400


async def test_change_that_cannot_be_saved_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    async with (
        nodes(FakeNode("a"), FakeNode("b")) as (a, b),
        admin(a, state_file=str(tmp_path / "s.json")) as (proxy, http),
    ):
        with monkeypatch.context() as patch:
            patch.setattr("lmkit.proxy.fleet.save_state", full)
            assert (await http.post("/admin/nodes", json={"url": b.url})).status_code == 500
            assert (await http.delete("/admin/nodes", params={"url": a.url})).status_code == 500
        assert [node.url for node in proxy.registry.nodes()] == [a.url]
        assert (await http.post("/admin/nodes", json={"url": b.url})).status_code == 200


async def test_admin_needs_its_key() -> None:
    async with admin(api_keys=("user",), admin_keys=("admin",)) as (proxy, http):
        calls = [("GET", {}), ("POST", {"json": {"url": "http://evil"}}), ("DELETE", {"params": {"url": "http://a"}})]
        for key, status in ((None, 401), ("user", 403), ("Admin", 401)):
            headers = {"authorization": f"Bearer {key}"} if key else {}
            for method, arguments in calls:
                response = await http.request(method, "/admin/nodes", headers=headers, **arguments)  # type: ignore[arg-type]
                assert response.status_code == status
        assert proxy.registry.nodes() == []
        assert (await http.get("/admin/nodes", headers={"authorization": "Bearer admin"})).status_code == 200


async def test_proxy_without_an_admin_key_has_no_admin() -> None:
    async with admin(admin_keys=()) as (_, http):
        assert (await http.get("/admin/nodes")).status_code == 403
        assert (await http.get("/v1/models")).status_code == 200


async def test_the_number_of_nodes_is_bounded() -> None:
    async with admin(max_nodes=2) as (proxy, http):
        for name, status in (("a", 200), ("b", 200), ("c", 400), ("a", 200)):
            body = {"url": f"http://127.0.0.1:9/{name}", "models": ["m"]}
            assert (await http.post("/admin/nodes", json=body)).status_code == status
        assert len(proxy.registry.nodes()) == 2


async def test_metrics_know_nothing_that_a_client_made_up() -> None:
    async with nodes(FakeNode()) as (fake,), admin(fake) as (_, http):
        for i in range(20):
            await http.post("/v1/completions", json={"model": f"made-up-{i}"})
            await http.get(f"/made-up-{i}")
        await http.post("/v1/completions", json={"model": "m"})
        text = (await http.get("/metrics")).text
        assert "made" not in text
        assert f'lmkit_proxy_requests_total{{model="m",node="{fake.url}",status="200"}} 1.0' in text
        assert 'lmkit_proxy_errors_total{code="model_not_found"} 20.0' in text
        assert "lmkit_proxy_first_byte_seconds_count 1.0" in text
        await http.delete("/admin/nodes", params={"url": fake.url})
        assert fake.url not in (await http.get("/metrics")).text


async def test_health_and_models() -> None:
    async with (
        nodes(FakeNode("a"), FakeNode("b", models=("m", "org/n"))) as (a, b),
        admin(a, b, api_keys=("k",)) as (proxy, http),
    ):
        assert (await http.get("/health")).json() == {"status": "ok", "nodes": 2, "healthy_nodes": 2}
        assert (await http.head("/health")).status_code == 200
        http.headers["authorization"] = "Bearer k"
        models = (await http.get("/v1/models")).json()
        assert [(entry["id"], entry["owned_by"]) for entry in models["data"]] == [("m", "a"), ("org/n", "b")]
        for name in ("org/n", "org%2Fn"):
            assert (await http.get(f"/v1/models/{name}")).json()["id"] == "org/n"
        assert (await http.get("/v1/models/none")).status_code == 404
        proxy.draining = True
        assert (await http.get("/health")).status_code == 503
        assert (await http.post("/v1/completions", json={"model": "m"})).json()["error"]["code"] == "shutting_down"


def test_state_file_is_private_and_replaced_whole(tmp_path: Path) -> None:
    path = tmp_path / "state.json"
    assert load_state(path) == FleetState()
    os.umask(old := os.umask(0))
    state = FleetState(added=(Registration(url="http://a", api_key="k", lease_seconds=5),), removed=("http://b",))
    save_state(path, state)
    assert load_state(path) == state
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    inode = path.stat().st_ino
    (tmp_path / ".state.json.new").write_text("left by a kill")
    save_state(path, FleetState())
    assert load_state(path) == FleetState()
    assert path.stat().st_ino != inode  # another file took its place: no reader sees half of it
    assert [entry.name for entry in tmp_path.iterdir()] == ["state.json"]
    assert os.umask(old) == old


@pytest.mark.parametrize("text", ["", "{", "[]", '{"version": 2}', '{"added": [{"url": "nonsense"}]}', '{"nodes": []}'])
def test_damaged_state_is_refused_and_kept(tmp_path: Path, text: str) -> None:
    path = tmp_path / "state.json"
    path.write_text(text)
    with pytest.raises(ConfigError, match=r"state\.json: .*; repair or delete it"):
        Proxy(ProxyConfig(state_file=str(path)))
    assert path.read_text() == text


def test_state_file_needs_a_directory(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="there is no directory"):
        Proxy(ProxyConfig(state_file=str(tmp_path / "no" / "state.json")))


def test_state_goes_before_the_configuration(tmp_path: Path) -> None:
    path = tmp_path / "state.json"
    added = {"url": "http://a", "models": ["new"]}
    path.write_text(json.dumps({"version": 1, "added": [added]}))
    config = ProxyConfig(nodes=(NodeConfig(url="http://a", models=("old",)),), state_file=str(path))
    registry: Registry = Proxy(config).registry
    assert sorted(registry.nodes()[0].models or ()) == ["new"]
