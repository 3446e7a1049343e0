"""Rules, aliases, canaries, shadows and fallbacks, and a configuration that changes under a running proxy."""

from __future__ import annotations

import asyncio
import json
import logging
from collections import Counter
from pathlib import Path
from typing import Any

import msgspec
import pytest

from lmkit.errors import ConfigError
from lmkit.proxy.app import Proxy
from lmkit.proxy.config import NodeConfig, load_config
from lmkit.proxy.reload import ConfigFile
from lmkit.proxy.rules import Request, Rule, Target, When, drawn, first_match
from lmkit.web.auth import key_id
from tests.proxy.fakes import BODY, CHAT, Exchange, FakeNode, client, eventually, nodes, proxy_for
from tests.proxy.test_admin import admin

pytestmark = pytest.mark.anyio
REQUEST = Request("m", {"x-team": "search-eu"}, "0a1b2c3d", 1000, -5)


def rules(*fields: dict[str, Any]) -> tuple[Rule, ...]:
    return msgspec.convert([{"name": f"r{i}", **rule} for i, rule in enumerate(fields)], tuple[Rule, ...])


@pytest.mark.parametrize(
    ("when", "holds"),
    [
        ({}, True),
        ({"model": "m"}, True),
        ({"model": ["x", "m"]}, True),
        ({"model": "n"}, False),
        ({"header": {"X-Team": "search-*"}}, True),
        ({"header": {"x-team": "search"}}, False),
        ({"header": {"x-other": "?*"}}, False),
        ({"key": "0a1b2c3d"}, True),
        ({"key": ["ffffffff"]}, False),
        ({"min_tokens": 1000, "max_tokens": 1000}, True),
        ({"min_tokens": 1001}, False),
        ({"max_tokens": 999}, False),
        ({"max_priority": -5}, True),
        ({"min_priority": -4}, False),
        ({"model": "m", "key": "0a1b2c3d", "max_tokens": 5}, False),
    ],
)
async def test_conditions(when: dict[str, Any], holds: bool) -> None:
    assert msgspec.convert(when, When).holds(REQUEST) is holds


async def test_the_first_rule_that_fits_counts() -> None:
    found = rules({"when": {"model": "n"}}, {"when": {"min_tokens": 10}}, {})
    match = first_match(found, REQUEST)
    assert match is not None
    assert match.name == "r1"
    assert first_match(found[:1], REQUEST) is None


async def test_targets_are_drawn_by_weight() -> None:
    targets = (Target(model="a", weight=3), Target(model="b"))
    picks = Counter(drawn(targets, i / 1000) for i in range(1000))
    assert picks == {"a": 750, "b": 250}
    assert drawn(targets, 1.0) == "b"


async def answer(http: Any, **fields: Any) -> Any:
    headers = fields.pop("headers", {})
    body = {"model": "m", "messages": [{"role": "user", "content": "x"}], **fields}
    return await http.post(CHAT, json=body, headers=headers)


async def test_an_alias_is_listed_and_stands_for_its_model() -> None:
    async with nodes(FakeNode()) as (fake,), proxy_for(fake, aliases={"gpt": "m", "other": "none"}) as (_, url):
        async with client(url) as http:
            assert [entry["id"] for entry in (await http.get("/v1/models")).json()["data"]] == ["gpt", "m"]
            assert (await http.get("/v1/models/gpt")).json()["id"] == "gpt"
            assert (await http.post(CHAT, content=BODY.replace(b'"m"', b'"gpt"'))).status_code == 200
            assert (await answer(http, model="other")).status_code == 404
        (request,) = fake.requests
    assert json.loads(request.body) == json.loads(BODY)
    assert b"\\u00e9" in request.body  # other values keep their bytes


async def test_a_canary_gets_its_share_and_keeps_its_sessions() -> None:
    split = rules({"to": [{"model": "m", "weight": 3}, {"model": "new"}]})
    fakes = FakeNode("old"), FakeNode("new", models=("new",))
    async with nodes(*fakes), proxy_for(*fakes, rules=split) as (_, url), client(url) as http:
        picks = Counter([(await answer(http)).json()["node"] for _ in range(200)])
        assert 20 < picks["new"] < 90
        for name in map(str, range(10)):
            assert len({(await answer(http, user=name)).json()["node"] for _ in range(4)}) == 1
    assert {json.loads(request.body)["model"] for request in fakes[1].requests} == {"new"}


async def test_rules_on_keys_headers_and_tags_lead_to_nodes_of_a_class() -> None:
    fakes = FakeNode("small"), FakeNode("big")
    only = rules({"when": {"key": key_id([(b"x-api-key", b"vip")])}, "nodes": ["big"]}, {"nodes": ["small"]})
    async with nodes(*fakes) as (small, big), proxy_for(api_keys=("vip", "plain"), rules=only) as (proxy, url):
        for fake in (small, big):
            proxy.registry.add(NodeConfig(url=fake.url, tags=(fake.name,)), "config")
        await proxy.health.check_all()
        async with client(url) as http:
            for key, name in (("vip", "big"), ("plain", "small")) * 3:
                headers = {"x-api-key": key, "x-lmkit-explain": "1"}
                response = await answer(http, headers=headers)
                assert response.json()["node"] == name
                assert response.headers["x-lmkit-rule"] == ("r0" if key == "vip" else "r1")
            proxy.registry.remove(big.url)
            refused = await answer(http, headers={"x-api-key": "vip"})
            assert (refused.status_code, refused.json()["error"]["code"]) == (503, "engine_unavailable")


async def busy(exchange: Exchange) -> None:
    await exchange.reply(503, {"error": {"message": "busy"}})


async def reset(exchange: Exchange) -> None:
    exchange.reset()


@pytest.mark.parametrize("script", [busy, reset, None])
async def test_another_model_answers_if_none_of_the_first_does(script: Any) -> None:
    fakes = FakeNode("first", script=script or busy), FakeNode("second", models=("n",))
    async with (
        nodes(*fakes) as (first, second),
        proxy_for(*fakes, rules=rules({"fallback": ["gone", "n"]})) as (proxy, url),
        client(url) as http,
    ):
        if script is None:
            proxy.registry.remove(first.url)
        response = await answer(http, headers={"x-lmkit-explain": "1"})
        assert response.json()["node"] == "second"
        assert json.loads(second.requests[0].body)["model"] == "n"
        assert len(response.headers.get_list("x-lmkit-node")) == 1
        assert all(node.in_flight == node.queued == 0 for node in proxy.registry.nodes())


async def test_the_last_models_own_answer_reaches_the_client() -> None:
    fakes = FakeNode("first", script=busy), FakeNode("second", models=("n",), script=busy)
    async with nodes(*fakes), proxy_for(*fakes, rules=rules({"fallback": ["n"]})) as (_, url), client(url) as http:
        response = await answer(http)
    assert (response.status_code, response.json()) == (503, {"error": {"message": "busy"}})


async def test_a_mistake_of_the_client_does_not_fall_back() -> None:
    async def refuse(exchange: Exchange) -> None:
        await exchange.reply(400, {"error": {"message": "no"}})

    fakes = FakeNode("first", script=refuse), FakeNode("second", models=("n",))
    async with nodes(*fakes), proxy_for(*fakes, rules=rules({"fallback": ["n"]})) as (_, url), client(url) as http:
        assert (await answer(http)).status_code == 400
    assert fakes[1].requests == []


async def test_shadows_get_copies_and_are_bounded() -> None:
    release = asyncio.Event()

    async def slow(exchange: Exchange) -> None:
        await release.wait()
        await exchange.reply(500, {"secret": 1})

    fakes = FakeNode("main"), FakeNode("shadow", models=("new",), script=slow)
    copies = rules({"shadow": {"model": "new"}})
    async with nodes(*fakes), proxy_for(*fakes, rules=copies, max_shadows=2) as (proxy, url), client(url) as http:
        for _ in range(4):
            assert (await answer(http)).json()["node"] == "main"  # nobody waits for a shadow
        await eventually(lambda: len(fakes[1].requests) == 2, 30)
        assert b'lmkit_proxy_shadows_total{outcome="left_out"} 2.0' in proxy.metrics.render()
        release.set()
        await eventually(lambda: b'shadows_total{outcome="answered"} 2.0' in proxy.metrics.render(), 30)
        assert {json.loads(request.body)["model"] for request in fakes[1].requests} == {"new"}
        assert proxy._bodies.used == 0


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (
            "rules:\n- name: a\n  wen: {}\n",
            ":3: Object contains unknown field `wen` - at `$.rules[0]`; did you mean when?",
        ),
        ("rules:\n- name: a\n  when: {min_token: 1}\n", ":3: Object contains unknown field `min_token`"),
        ("rules:\n- {name: a}\n- {name: a}\n", "two rules have the name 'a'"),
        ("aliases: {a: b, b: c}\n", "alias 'a' leads to another alias"),
        (
            "rules:\n- {name: a, policy: best}\n",
            ":2: Invalid enum value 'best' - at `$.rules[0].policy`; expected least_in_flight, ",
        ),
        ("rules:\n- {name: a, to: [{model: m, weight: 0}]}\n", ":2: Expected `float` > 0.0"),
    ],
)
async def test_mistakes_in_rules_name_their_line(text: str, message: str, tmp_path: Path) -> None:
    path = tmp_path / "proxy.yaml"
    path.write_text(text)
    with pytest.raises(ConfigError) as error:
        load_config(path)
    assert message in str(error.value)


async def test_a_changed_file_is_taken_and_a_bad_one_changes_nothing(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = tmp_path / "proxy.yaml"
    path.write_text("nodes: [{url: 'http://a:1'}, {url: 'http://b:1'}]\n")
    file = ConfigFile(str(path), lambda: load_config(path))
    proxy = Proxy(file.config, file)
    before = proxy.registry.get("http://b:1")

    path.write_text(
        "port: 1\npolicy: prefix\naliases: {x: m}\nnodes: [{url: 'http://b:1', weight: 2}, {url: 'http://c:1'}]"
    )
    with caplog.at_level(logging.WARNING):
        file.look(proxy.configure)
    assert "a change of port takes effect when the proxy is started again" in caplog.text
    assert [node.url for node in proxy.registry.nodes()] == ["http://b:1", "http://c:1"]
    assert proxy.registry.get("http://b:1") is before
    assert before is not None
    assert before.config.weight == 2
    assert (proxy._router.policy, proxy._router.model("x")) == ("prefix", "m")

    caplog.clear()
    for bad in ("polic: x\n", "nodes: [{url: 'http://a:1'}, {url: 'http://a:1'}]\n", "[", None):
        path.unlink() if bad is None else path.write_text(bad)
        file.look(proxy.configure)
        file.look(proxy.configure)  # one line, not one for each look
    assert len([record for record in caplog.records if record.levelname == "ERROR"]) == 4
    assert [node.url for node in proxy.registry.nodes()] == ["http://b:1", "http://c:1"]


async def test_a_file_does_not_undo_what_was_done_at_run_time(tmp_path: Path) -> None:
    state = str(tmp_path / "state.json")
    async with nodes(FakeNode("a"), FakeNode("b")) as (a, b), admin(a, state_file=state) as (proxy, http):
        await http.post("/admin/nodes", json={"url": b.url, "weight": 5})
        await http.delete("/admin/nodes", params={"url": a.url})
        both = (NodeConfig(url=a.url), NodeConfig(url=b.url))
        proxy.configure(msgspec.structs.replace(proxy.config, nodes=both))
        assert [(node.url, node.config.weight) for node in proxy.registry.nodes()] == [(b.url, 5.0)]


async def test_a_drained_node_gets_nothing_new_also_after_a_restart(tmp_path: Path) -> None:
    state = str(tmp_path / "state.json")
    release = asyncio.Event()

    async def wait(exchange: Exchange) -> None:
        await release.wait()
        await exchange.reply(200, {"node": exchange.node.name})

    fakes = FakeNode("a", script=wait), FakeNode("b")
    async with nodes(*fakes) as (a, _), admin(*fakes, state_file=state, policy="round_robin") as (proxy, http):
        running = asyncio.create_task(answer(http))
        await eventually(lambda: len(a.requests) == 1, 30)
        (shown,) = (await http.post("/admin/nodes/drain", params={"url": a.url})).json()["data"]
        assert (shown["url"], shown["draining"], shown["in_flight"]) == (a.url, True, 1)
        assert {(await answer(http)).json()["node"] for _ in range(4)} == {"b"}
        assert [node.draining for node in Proxy(proxy.config).registry.nodes()] == [True, False]
        release.set()
        assert (await running).json()["node"] == "a"
        assert (await http.delete("/admin/nodes/drain", params={"url": a.url})).json()["data"][0]["draining"] is False
        assert {(await answer(http)).json()["node"] for _ in range(4)} == {"a", "b"}
        assert (await http.post("/admin/nodes/drain", params={"url": "http://x:1"})).status_code == 404
        assert (await http.post("/admin/nodes/drain")).status_code == 400


async def test_draining_needs_an_admin_key() -> None:
    async with (
        nodes(FakeNode()) as (fake,),
        proxy_for(fake, api_keys=("k",), admin_keys=("admin",)) as (_, url),
        client(url) as http,
    ):
        for headers in ({}, {"authorization": "Bearer k"}):
            for method in ("POST", "DELETE"):
                response = await http.request(method, "/admin/nodes/drain", params={"url": fake.url}, headers=headers)
                assert response.status_code in (401, 403)
        assert (await http.post(CHAT, content=BODY, headers={"authorization": "Bearer k"})).status_code == 200
