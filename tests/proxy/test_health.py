from __future__ import annotations

import asyncio
import time

import httpx
import pytest

from lmkit.errors import ConfigError
from lmkit.proxy.config import NodeConfig
from lmkit.proxy.health import MAX_ANSWER_BYTES, parse_models
from tests.proxy.fakes import Exchange, FakeNode, eventually, nodes, proxy_for

pytestmark = pytest.mark.anyio


async def hang(exchange: Exchange) -> None:
    await exchange.until_left()


async def drip(exchange: Exchange) -> None:
    await exchange.write(b"HTTP/1.1 200 OK\r\ncontent-length: 1000\r\n\r\n")
    while not exchange.writer.is_closing():
        await exchange.write(b" ")
        await asyncio.sleep(0.05)


async def test_node_goes_down_and_comes_back() -> None:
    async with nodes(FakeNode()) as (fake,), proxy_for(fake, unhealthy_after=2, healthy_after=2) as (proxy, _):
        (node,) = proxy.registry.nodes()
        for health, expected in [
            (500, True),
            (200, True),
            (503, True),
            (503, False),
            (200, False),
            (503, False),
            (200, False),
            (200, True),
        ]:
            fake.health = health
            await proxy.health.check(node)
            assert node.healthy is expected
        assert proxy.registry.candidates("m") == [node]


async def test_node_that_restarts_is_used_again_without_help() -> None:
    async with nodes(FakeNode()) as (fake,), proxy_for(fake, health_interval=0.02, unhealthy_after=1) as (proxy, url):
        (node,) = proxy.registry.nodes()
        async with httpx.AsyncClient(base_url=url, verify=False, trust_env=False) as http:
            await http.post("/v1/completions", json={"model": "m"})
            await fake.stop()
            await eventually(lambda: not node.healthy)
            assert (await http.post("/v1/completions", json={"model": "m"})).status_code == 503
            fake.models = ("m", "new")
            await fake.start()
            await eventually(lambda: node.healthy)
            assert (await http.post("/v1/completions", json={"model": "new"})).status_code == 200


async def test_node_that_starts_after_the_proxy() -> None:
    async with nodes(FakeNode()) as (fake,):
        await fake.stop()
        async with proxy_for(fake, health_interval=0.02) as (proxy, _):
            (node,) = proxy.registry.nodes()
            assert not node.healthy
            assert "cannot be reached" in (node.reason or "")
            await fake.start()
            await eventually(lambda: node.healthy)


@pytest.mark.parametrize("script", [hang, drip])
async def test_hung_check_ends_in_time_and_holds_up_no_other(script: object) -> None:
    bad = [FakeNode(str(i), health_script=script) for i in range(4)]  # type: ignore[arg-type]
    async with nodes(FakeNode("good"), *bad) as (good, *_):
        start = time.monotonic()
        async with proxy_for(*bad, good, health_timeout=1.0) as (proxy, _):
            assert time.monotonic() - start < 3.5  # four after another would take 4 s
            states = {node.url: node.healthy for node in proxy.registry.nodes()}
            assert states == {good.url: True, **{fake.url: False for fake in bad}}
            assert "1 s" in (proxy.registry.nodes()[0].reason or "")


async def test_model_list_is_read_again() -> None:
    async with nodes(FakeNode()) as (fake,), proxy_for(fake) as (proxy, _):
        (node,) = proxy.registry.nodes()
        fake.models = ("x", "y")
        await proxy.health.check(node)
        assert proxy.registry.candidates("m") == []
        assert proxy.registry.candidates("y") == [node]


async def not_a_list(exchange: Exchange) -> None:
    await exchange.reply(200, {"models": []})


async def failing(exchange: Exchange) -> None:
    await exchange.reply(500, {})


async def endless(exchange: Exchange) -> None:
    await exchange.reply(200, b" " * (MAX_ANSWER_BYTES + 1))


@pytest.mark.parametrize("script", [not_a_list, failing, endless, hang])
async def test_failing_model_list(script: object) -> None:
    """A node without a list is not used; one that had a list keeps it; neither disturbs the others."""
    fakes = FakeNode("a", models=("m",)), FakeNode("b", models=("n",))
    fakes[1].models_script = script  # type: ignore[assignment]
    async with nodes(*fakes) as (a, b), proxy_for(a, b, health_timeout=1.0, unhealthy_after=1) as (proxy, url):
        first, second = proxy.registry.nodes()
        assert (first.healthy, second.healthy) == (True, False)
        async with httpx.AsyncClient(base_url=url, verify=False, trust_env=False) as http:
            answer = (await http.get("/v1/models")).json()
        assert [entry["id"] for entry in answer["data"]] == ["m"]
        a.models_script = script  # type: ignore[assignment]
        await proxy.health.check(first)
        if script is not hang:
            assert first.healthy
            assert "/v1/models" in (first.reason or "")
        assert sorted(first.models or ()) == ["m"]


async def test_configured_models_are_not_asked_for() -> None:
    async with nodes(FakeNode(models_script=failing)) as (fake,), proxy_for() as (proxy, _):
        node = proxy.registry.add(NodeConfig(url=fake.url, models=("given",)), "config")
        await proxy.health.check(node)
        assert node.healthy
        assert [request.target for request in fake.checks] == ["/health"]


async def test_checks_follow_no_redirect_and_send_the_nodes_key() -> None:
    async def away(exchange: Exchange) -> None:
        await exchange.reply(302, {}, ("location", f"{other.url}/health"))

    async with nodes(FakeNode(health_script=away), FakeNode()) as (fake, other), proxy_for() as (proxy, _):
        node = proxy.registry.add(NodeConfig(url=fake.url, api_key="node-key"), "config")
        await proxy.health.check(node)
        assert not node.healthy
        assert other.checks == []
        assert fake.checks[0].header("authorization") == ["Bearer node-key"]


async def test_check_of_a_node_that_is_removed_meanwhile() -> None:
    async with nodes(FakeNode()) as (fake,), proxy_for(fake) as (proxy, _):
        (node,) = proxy.registry.nodes()
        check = asyncio.create_task(proxy.health.check(node))
        await asyncio.sleep(0)
        proxy.registry.remove(node.url)
        await check
        assert proxy.registry.nodes() == []


async def test_defect_in_the_checks_is_not_silent(monkeypatch: pytest.MonkeyPatch) -> None:
    async def until_the_checks_end() -> None:
        async with proxy_for(health_interval=0.01) as (proxy, _):
            monkeypatch.setattr(proxy.health, "check_all", lambda: 1 / 0)
            assert proxy.checks is not None
            await asyncio.wait([proxy.checks], timeout=2)

    with pytest.raises(ZeroDivisionError):
        await until_the_checks_end()


@pytest.mark.parametrize(
    "body",
    [b"", b"[]", b"{}", b"null", b'{"data": 1}', b'{"data": [1]}', b'{"data": [{}]}', b'{"data": [{"id": 1}]}',
     b'{"data": [{"id": ""}]}', b'{"data": [{"id": "a\\u001b"}]}',
     b'{"data": [{"id": "' + b"x" * 257 + b'"}]}', b"[" * 100_000,
     b'{"data": [' + b",".join([b'{"id": "x"}'] * 1001) + b"]}"],
)  # fmt: skip
def test_parse_models_refuses(body: bytes) -> None:
    with pytest.raises(ConfigError, match="/v1/models"):
        parse_models(body)


def test_parse_models_keeps_what_a_node_says() -> None:
    body = b'{"data": [{"id": "a", "max_model_len": 5}, {"id": "b"}]}'
    assert parse_models(body) == {"a": {"id": "a", "max_model_len": 5}, "b": {"id": "b"}}


async def test_a_server_without_health_is_up_while_it_lists_its_models() -> None:
    """llama-cpp-python has no /health."""
    async with nodes(FakeNode(health=404)) as (fake,), proxy_for(fake, unhealthy_after=1) as (proxy, _):
        (node,) = proxy.registry.nodes()
        assert node.healthy

        async def gone(exchange: Exchange) -> None:
            await exchange.reply(404, {})

        fake.models_script = gone
        await proxy.health.check_all()
        assert (node.healthy, node.reason) == (False, "/v1/models answered 404")
