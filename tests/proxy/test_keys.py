"""Keys of the key_store over HTTP: what is charged for each kind of answer, what is refused, who manages them."""

from __future__ import annotations

import asyncio
import csv
import io
import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest

from lmkit.proxy.accounts.account import Price
from lmkit.proxy.app import Proxy
from tests.proxy.fakes import CHAT, Exchange, FakeNode, client, eventually, nodes, proxy_for

pytestmark = pytest.mark.anyio
ADMIN = {"authorization": "Bearer admin-key"}
USAGE = {"prompt_tokens": 10, "completion_tokens": 5, "prompt_tokens_details": {"cached_tokens": 4}}
BODY: dict[str, Any] = {"model": "m", "messages": [{"role": "user", "content": "hi"}], "max_tokens": 8}


class Managed:
    """A proxy with a key_store in front of one node, and an HTTP client."""

    def __init__(self, proxy: Proxy, http: httpx.AsyncClient, node: FakeNode) -> None:
        self.proxy, self.http, self.node = proxy, http, node

    async def key(self, **fields: Any) -> tuple[str, dict[str, str]]:
        """(id, headers) of a new key."""
        made = (await self.http.post("/admin/keys", json={"name": "a", **fields}, headers=ADMIN)).json()
        return made["id"], {"authorization": f"Bearer {made['key']}"}

    async def used(self, **query: str) -> list[list[Any]]:
        rows = (await self.http.get("/admin/usage", params=query, headers=ADMIN)).json()["data"]
        return [[row["model"], *(row[name] for name in ("requests", "input", "cached", "output"))] for row in rows]


@asynccontextmanager
async def managed(tmp_path: Path, node: FakeNode, **options: Any) -> AsyncIterator[Managed]:
    options = {"admin_keys": ("admin-key",), "key_store": str(tmp_path / "keys.db"), **options}
    async with nodes(node), proxy_for(node, **options) as (proxy, url), client(url) as http:
        yield Managed(proxy, http, node)


async def answer(exchange: Exchange) -> None:
    await exchange.reply(200, {"usage": USAGE, "text": '"usage":{"prompt_tokens":99}'}, ("x-ratelimit-limit-x", "1"))


def chunk(text: str | None, usage: Any = ..., **more: Any) -> bytes:
    choices = [] if text is None else [{"index": 0, "delta": {"content": text}}]
    fields: dict[str, Any] = {"choices": choices} | ({} if usage is ... else {"usage": usage}) | more
    return b"data: " + json.dumps(fields, separators=(",", ":")).encode() + b"\n\n"


async def stream(exchange: Exchange) -> None:
    """As lmkit and vLLM stream: the usage as the request asks for it."""
    options = json.loads(exchange.request.body).get("stream_options") or {}
    each, last = options.get("continuous_usage_stats"), options.get("include_usage")
    await exchange.start_events()
    for count, text in enumerate(("a", ',"usage":{}', "c"), 1):
        so_far = {**USAGE, "completion_tokens": count}
        await exchange.chunk(chunk(text, so_far if each else None if last else ...))
    if last:
        await exchange.chunk(chunk(None, {**USAGE, "completion_tokens": 3}))
    await exchange.chunk(b"data: [DONE]\n\n")
    await exchange.end()


PLAIN = b"".join([chunk("a"), chunk(',"usage":{}'), chunk("c"), b"data: [DONE]\n\n"])
NULLS = b"".join([chunk("a", None), chunk(',"usage":{}', None), chunk("c", None)])


async def test_an_answer_is_charged_as_it_tells(tmp_path: Path) -> None:
    prices = {"m": Price(input=1, cached_input=0.5, output=2)}
    async with managed(tmp_path, FakeNode(script=answer), prices=prices) as here:
        _, key = await here.key(limits={"tokens/day": 1000, "requests/minute": 9, "money/total": 1})
        got = await here.http.post(CHAT, json=BODY, headers=key)
        assert got.json()["usage"] == USAGE
        headers = {name: value for name, value in got.headers.items() if name.startswith("x-ratelimit")}
        assert headers["x-ratelimit-limit-tokens-day"] == "1000"
        assert int(headers["x-ratelimit-remaining-tokens-day"]) < 1000
        assert re.fullmatch(r"\d+s", headers["x-ratelimit-reset-tokens-day"])
        assert headers["x-ratelimit-remaining-requests"] == "8"
        assert headers["x-ratelimit-limit-money-total"] == "1"
        assert "x-ratelimit-limit-x" not in headers  # the node's limits are not the client's
        assert await here.used() == [["m", 1, 10, 4, 5]]
        own = (await here.http.get("/v1/usage", headers=key)).json()
        assert own["used"]["total"] == {"requests": 1, "tokens": 15, "money": (6 + 4 * 0.5 + 5 * 2) / 1e6}
        assert own["left"]["tokens/day"] == 985
        text = (await here.http.get("/metrics", headers=ADMIN)).text
        assert 'lmkit_proxy_tokens_total{kind="cached",model="m"} 4.0' in text


async def test_the_access_log_tells_the_node_and_the_tokens(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    async with managed(tmp_path, FakeNode(script=answer)) as here:
        _, key = await here.key()
        with caplog.at_level("INFO", logger="lmkit"):
            await here.http.post(CHAT, json=BODY, headers={**key, "x-request-id": "r1"})
            await eventually(lambda: "id=r1" in caplog.text, 30)
        assert f"id=r1 node={here.node.url} input=10 cached=4 output=5" in caplog.text
        assert here.node.requests[0].header("x-request-id") == ["r1"]


@pytest.mark.parametrize(("asked", "seen"), [(None, PLAIN), ({"include_usage": True}, NULLS)])
async def test_a_stream_is_charged_and_keeps_its_bytes(tmp_path: Path, asked: Any, seen: bytes) -> None:
    async with managed(tmp_path, FakeNode(script=stream)) as here:
        _, key = await here.key()
        body = {**BODY, "stream": True} | ({"stream_options": asked} if asked else {})
        got = await here.http.post(CHAT, json=body, headers=key)
        assert got.content.startswith(seen)
        assert (b'"completion_tokens":3' in got.content) is bool(asked)
        assert json.loads(here.node.requests[0].body)["stream_options"]["continuous_usage_stats"] is True
        assert await here.used() == [["m", 1, 10, 4, 3]]


async def test_a_node_that_is_asked_for_the_last_usage_only(tmp_path: Path) -> None:
    async with managed(tmp_path, FakeNode(script=stream), ask_usage=False) as here:
        _, key = await here.key()
        got = await here.http.post(CHAT, json={**BODY, "stream": True}, headers=key)
        assert got.content == PLAIN
        assert json.loads(here.node.requests[0].body)["stream_options"] == {"include_usage": True}
        assert await here.used() == [["m", 1, 10, 4, 3]]


async def test_fields_after_the_usage_stay(tmp_path: Path) -> None:
    async def script(exchange: Exchange) -> None:
        await exchange.start_events()
        await exchange.chunk(chunk("a", {**USAGE, "completion_tokens": 1}, z=[1.50]))
        await exchange.chunk(b"data: [DONE]\n\n")
        await exchange.end()

    async with managed(tmp_path, FakeNode(script=script)) as here:
        _, key = await here.key()
        got = await here.http.post(CHAT, json={**BODY, "stream": True}, headers=key)
        assert got.content == chunk("a", z=[1.5]) + b"data: [DONE]\n\n"
        assert await here.used() == [["m", 1, 10, 4, 1]]


EVENTS = {
    "/v1/responses": (
        b'event: x\ndata: {"delta":"a"}\n\n'
        b'event: response.completed\ndata: {"response":{"usage":{"input_tokens":7,"output_tokens":2,'
        b'"input_tokens_details":{"cached_tokens":3}}}}\n\n',
        [7, 3, 2],
    ),
    "/v1/messages": (
        b'event: message_start\ndata: {"message":{"usage":{"input_tokens":4,"cache_read_input_tokens":3,'
        b'"output_tokens":1}}}\n\nevent: message_delta\ndata: {"delta":{},"usage":{"output_tokens":9}}\n\n',
        [7, 3, 9],
    ),
    "/generate": (  # two choices of one prompt
        b'data: {"index":0,"meta_info":{"prompt_tokens":7,"completion_tokens":1,"cached_tokens":3}}\n\n'
        b'data: {"index":1,"meta_info":{"prompt_tokens":7,"completion_tokens":2,"cached_tokens":6}}\n\n'
        b'data: {"index":0,"meta_info":{"prompt_tokens":7,"completion_tokens":4,"cached_tokens":3}}\n\n'
        b"data: [DONE]\n\n",
        [7, 3, 6],
    ),
}


@pytest.mark.parametrize("path", EVENTS)
async def test_other_streams_tell_their_usage_and_pass_unchanged(tmp_path: Path, path: str) -> None:
    data, counts = EVENTS[path]

    async def script(exchange: Exchange) -> None:
        await exchange.start_events()
        await exchange.chunk(data)
        await exchange.end()

    async with managed(tmp_path, FakeNode(script=script)) as here:
        _, key = await here.key()
        got = await here.http.post(path, json={**BODY, "stream": True, "sampling_params": {"n": 2}}, headers=key)
        assert got.content == data
        assert "stream_options" not in json.loads(here.node.requests[0].body)
        assert await here.used() == [["m", 1, *counts]]


async def test_whole_answers_of_generate_are_charged_for_each_prompt(tmp_path: Path) -> None:
    about = [{"prompt_tokens": 7, "completion_tokens": 2, "cached_tokens": 3} for _ in range(4)]

    async def script(exchange: Exchange) -> None:
        parts = [{"index": i, "meta_info": told} for i, told in enumerate(about)]
        await exchange.reply(200, parts if "n" in json.loads(exchange.request.body) else parts[0])

    async with managed(tmp_path, FakeNode(script=script)) as here:
        _, key = await here.key(limits={"tokens/day": 1000})
        await here.http.post("/generate", json={"model": "m", "text": "a", "max_new_tokens": 2}, headers=key)
        assert await here.used() == [["m", 1, 7, 3, 2]]
        await here.http.post("/generate", json={"model": "m", "text": ["a", "b"], "n": 2, "max_tokens": 2}, headers=key)
        assert await here.used() == [["m", 2, 21, 9, 10]]
        too_long = {"model": "m", "text": "a", "sampling_params": {"max_new_tokens": 1000}}
        assert (await here.http.post("/generate", json=too_long, headers=key)).status_code == 429
        for n, status in ((5, 200), (1000, 429)):
            asked = {"model": "m", "prompt": "a", "n_predict": n}
            assert (await here.http.post("/v1/completions", json=asked, headers=key)).status_code == status


@pytest.mark.parametrize("tells", [True, False])
async def test_a_client_that_leaves_is_charged_for_what_was_made(tmp_path: Path, tells: bool) -> None:
    async def script(exchange: Exchange) -> None:
        await exchange.start_events()
        for count in (1, 2):
            await exchange.chunk(chunk("a", {**USAGE, "completion_tokens": 10 * count} if tells else ...))
        await exchange.until_left()

    async with managed(tmp_path, FakeNode(script=script)) as here:
        key_id, key = await here.key()
        async with here.http.stream("POST", CHAT, json={**BODY, "stream": True}, headers=key) as got:
            pieces = got.aiter_bytes()
            seen = b""
            while seen.count(b"data:") < 2:
                seen += await anext(pieces)
        ledger = here.proxy.ledger
        assert ledger is not None
        await eventually(lambda: ledger.account("key", key_id).used["total"].requests == 1, 30)
        prompt = len(here.node.requests[0].body) // 4
        ((model, requests, *counts),) = await here.used()
        assert (model, requests) == ("m", 1)
        if tells:
            assert counts == [10, 4, 20]
        else:  # an event is a token at least, and the length of the request tells the rest
            assert counts[1:] == [0, 2]
            assert 0 < counts[0] <= prompt
        assert ledger.account("key", key_id).held.tokens == 0


LONG = {
    "/v1/responses": b'event: x\ndata: {"type":"response.output_text.delta","delta":"%s"}\n\n' % (b"abcd" * 50),
    "/v1/messages": b'event: x\ndata: {"type":"content_block_delta","delta":{"text":"%s"}}\n\n' % (b"abcd" * 50),
}


@pytest.mark.parametrize("counts", [True, False])
@pytest.mark.parametrize("path", LONG)
async def test_events_of_many_tokens_are_charged_as_many(tmp_path: Path, path: str, counts: bool) -> None:
    """A slow client gets many tokens in one event. lmkit's nodes count them in comments, which no client sees."""

    async def script(exchange: Exchange) -> None:
        await exchange.start_events()
        asked = exchange.request.header("x-lmkit-counts") == ["1"]
        for count in (70, 140):
            await exchange.chunk(LONG[path] + (b": usage 9 4 %d\n\n" % count if counts and asked else b""))
        await exchange.until_left()

    body = {"model": "m", "stream": True, "max_tokens": 200, "max_output_tokens": 200}
    async with managed(tmp_path, FakeNode(script=script)) as here:
        key_id, key = await here.key()
        async with here.http.stream("POST", path, json=body, headers=key) as got:
            pieces = got.aiter_bytes()
            seen = b""
            while len(seen) < 2 * len(LONG[path]):
                seen += await anext(pieces)
        assert seen == 2 * LONG[path]
        ledger = here.proxy.ledger
        assert ledger is not None
        await eventually(lambda: ledger.account("key", key_id).used["total"].requests == 1, 30)
        ((*_, cached, output),) = await here.used()
        assert (cached, output) == ((4, 140) if counts else (0, 100))  # else a token for four bytes of text


async def test_numbers_that_no_node_can_mean_do_not_count(tmp_path: Path) -> None:
    told: Any = {}

    async def script(exchange: Exchange) -> None:
        await exchange.reply(200, {"usage": told})

    async with managed(tmp_path, FakeNode(script=script), prices={"*": Price(output=1_000_000)}) as here:
        _, key = await here.key()
        for number in (1 << 63, 1 << 100, 1e300, -5, "7", True, None, 2.5, [], 7.0):
            told.update(prompt_tokens=1, completion_tokens=number, prompt_tokens_details={"cached_tokens": number})
            assert (await here.http.post(CHAT, json=BODY, headers=key)).status_code == 200, number
        ((_, requests, *_, output),) = await here.used()
        assert (requests, output) == (10, 2 * (1 << 31) + 7)
        for path in ("/admin/keys", "/admin/usage", "/metrics"):
            assert (await here.http.get(path, headers=ADMIN)).status_code == 200
    async with managed(tmp_path, FakeNode(script=script)) as again:
        assert (await again.used())[0][-1] == 2 * (1 << 31) + 7


@pytest.mark.parametrize(
    ("field", "value"), [("n", "16"), ("n", 0), ("max_tokens", True), ("max_tokens", 2.5), ("priority", "-9")]
)
async def test_a_number_that_cannot_be_read_is_refused(tmp_path: Path, field: str, value: Any) -> None:
    async with managed(tmp_path, FakeNode(script=answer)) as here:
        _, key = await here.key()
        refused = await here.http.post(CHAT, json={**BODY, field: value}, headers=key)
        assert (refused.status_code, refused.json()["error"]["param"]) == (400, field)
        assert not here.node.requests


async def test_a_route_that_does_not_say_what_it_uses_is_not_for_keys_with_limits(tmp_path: Path) -> None:
    async with managed(tmp_path, FakeNode(script=answer), forwarded_routes=("/v1/new",)) as here:
        for limits, status in (({"tokens/day": 10**6}, 403), ({"requests/day": 5}, 200)):
            _, key = await here.key(limits=limits)
            assert (await here.http.post("/v1/new", json=BODY, headers=key)).status_code == status


async def test_a_stream_that_breaks_off_is_charged_for_what_came(tmp_path: Path) -> None:
    async def script(exchange: Exchange) -> None:
        await exchange.start_events()
        await exchange.chunk(chunk("a", {**USAGE, "completion_tokens": 7}))
        exchange.reset()

    async with managed(tmp_path, FakeNode(script=script)) as here:
        _, key = await here.key()
        got = await here.http.post(CHAT, json={**BODY, "stream": True}, headers=key)
        assert b"bad_gateway" in got.content
        assert await here.used() == [["m", 1, 10, 4, 7]]


@pytest.mark.parametrize("status", [400, 500])
async def test_an_error_costs_nothing(tmp_path: Path, status: int) -> None:
    async def script(exchange: Exchange) -> None:
        await exchange.reply(status, {"error": {"message": "no"}, "usage": USAGE})

    async with managed(tmp_path, FakeNode(script=script)) as here:
        key_id, key = await here.key(limits={"requests/day": 1})
        for _ in range(3):
            assert (await here.http.post(CHAT, json=BODY, headers=key)).status_code == status
        assert (await here.http.post(CHAT, json={**BODY, "model": "none"}, headers=key)).status_code == 404
        assert await here.used() == []
        assert here.proxy.ledger is not None
        assert here.proxy.ledger.account("key", key_id).held.requests == 0


async def test_a_used_up_budget_is_one_clear_refusal_that_clients_do_not_repeat(tmp_path: Path) -> None:
    async with managed(tmp_path, FakeNode(script=answer)) as here:
        _, key = await here.key(limits={"requests/total": 2})
        results = await asyncio.gather(*(here.http.post(CHAT, json=BODY, headers=key) for _ in range(20)))
        assert sorted(result.status_code for result in results) == [200] * 2 + [429] * 18
        refused = next(result for result in results if result.status_code == 429)
        error = (await here.http.post(CHAT, json=BODY, headers=key)).json()["error"]
        assert error == {
            "message": "this key may use 2 requests in total: 2 are used",
            "type": "insufficient_quota", "param": None, "code": "insufficient_quota",
        }  # fmt: skip
        assert refused.headers["x-should-retry"] == "false"
        assert "retry-after" not in refused.headers
        assert len(here.node.requests) == 2
        _, daily = await here.key(limits={"requests/day": 0})
        assert int((await here.http.post(CHAT, json=BODY, headers=daily)).headers["retry-after"]) > 0


async def test_models_and_priorities_of_a_key(tmp_path: Path) -> None:
    async with managed(tmp_path, FakeNode(models=("m", "other"), script=answer)) as here:
        _, key = await here.key(models=["m"], min_priority=5)
        listed = (await here.http.get("/v1/models", headers=key)).json()["data"]
        assert [entry["id"] for entry in listed] == ["m"]
        hidden, unknown = [await here.http.get(f"/v1/models/{name}", headers=key) for name in ("other", "o-her")]
        assert (hidden.status_code, hidden.text) == (404, unknown.text.replace("o-her", "other"))
        refused = await here.http.post(CHAT, json={**BODY, "model": "other"}, headers=key)
        assert (refused.status_code, refused.json()["error"]["param"]) == (403, "model")
        for soon in (4, 4.0, -1e3):
            assert (await here.http.post(CHAT, json={**BODY, "priority": soon}, headers=key)).status_code == 403
        inner = {"model": "m", "text": "a", "sampling_params": {"priority": -1000}}
        assert (await here.http.post("/generate", json=inner, headers=key)).status_code == 403
        assert (await here.http.post(CHAT, json={**BODY, "priority": 6}, headers=key)).status_code == 200
        assert (await here.http.post(CHAT, json=BODY, headers=key)).status_code == 200
        assert [json.loads(request.body)["priority"] for request in here.node.requests] == [6, 5]


async def test_keys_of_a_store_are_needed_and_are_tenants_of_their_own(tmp_path: Path) -> None:
    async with managed(tmp_path, FakeNode(script=answer)) as here:
        assert (await here.http.post(CHAT, json=BODY)).status_code == 401
        (id_a, a), (_, b) = await here.key(), await here.key()
        for key in (a, b, a):
            await here.http.post(CHAT, json=BODY, headers=key)
        names = [request.header("x-lmkit-tenant")[0] for request in here.node.requests]
        assert names[0] == names[2] != names[1]
        revoked = await here.http.delete("/admin/keys", params={"id": id_a}, headers=ADMIN)
        assert revoked.json()["revoked"] is True
        assert (await here.http.post(CHAT, json=BODY, headers=a)).status_code == 401


async def test_only_an_admin_manages_keys_and_no_list_shows_one(tmp_path: Path) -> None:
    async with managed(tmp_path, FakeNode()) as here:
        key_id, key = await here.key()
        calls = [
            ("GET", "/admin/keys"), ("POST", "/admin/keys"), ("PATCH", f"/admin/keys?id={key_id}"),
            ("DELETE", f"/admin/keys?id={key_id}"), ("GET", "/admin/teams"), ("PATCH", "/admin/teams?name=x"),
            ("DELETE", "/admin/teams?name=x"), ("GET", "/admin/usage"),
        ]  # fmt: skip
        for method, path in calls:
            assert (await here.http.request(method, path, json={})).status_code == 401
            assert (await here.http.request(method, path, json={}, headers=key)).status_code == 403
        secret = key["authorization"].removeprefix("Bearer ")
        assert here.node.url in (await here.http.get("/metrics", headers=ADMIN)).text
        assert here.node.url not in (await here.http.get("/metrics", headers=key)).text
        for path in ("/admin/keys", "/admin/usage", "/admin/teams", "/metrics"):
            assert secret not in (await here.http.get(path, headers=ADMIN)).text


async def test_the_admin_api(tmp_path: Path) -> None:
    async with managed(tmp_path, FakeNode(script=answer)) as here:
        made = await here.http.patch("/admin/teams?name=shop", json={"limits": {"tokens/day": 1000}}, headers=ADMIN)
        assert made.json()["left"] == {"tokens/day": 1000}
        key_id, key = await here.key(team="shop", limits={"tokens/day": 900, "requests/day": 5})
        changed = await here.http.patch(
            f"/admin/keys?id={key_id}", json={"limits": {"requests/day": None, "tokens/week": 7}}, headers=ADMIN
        )
        assert changed.json()["limits"] == {"tokens/day": 900, "tokens/week": 7}
        for path, fields in (
            (f"/admin/keys?id={key_id}", {"id": "x"}),
            ("/admin/keys?id=none", {}),
            ("/admin/keys", {}),
        ):
            wrong = await here.http.patch(path, json=fields, headers=ADMIN)
            assert wrong.status_code in (400, 404), path
        await here.http.patch(f"/admin/keys?id={key_id}", json={"limits": {"tokens/week": None}}, headers=ADMIN)
        got = await here.http.post(CHAT, json=BODY, headers=key)
        assert got.headers["x-ratelimit-limit-team-tokens-day"] == "1000"
        assert (await here.http.get("/admin/teams", headers=ADMIN)).json()["data"][0]["used"]["day"]["tokens"] == 15
        assert await here.used(by="model", **{"from": "2000-01-01", "to": "2000-01-02"}) == []
        assert (await here.http.get("/admin/usage?by=secret", headers=ADMIN)).status_code == 400
        assert (await here.http.get("/admin/usage?from=now", headers=ADMIN)).status_code == 400


async def test_the_table_of_usage_holds_no_formula(tmp_path: Path) -> None:
    async with managed(tmp_path, FakeNode(models=("=HYPERLINK(1)",), script=answer)) as here:
        _, key = await here.key(name="a")
        await here.http.post(CHAT, json={**BODY, "model": "=HYPERLINK(1)"}, headers=key)
        got = await here.http.get("/admin/usage?format=csv", headers=ADMIN)
        assert got.headers["content-type"].startswith("text/csv")
        (row,) = csv.DictReader(io.StringIO(got.text))
        assert (row["model"], row["name"], row["input"]) == ("'=HYPERLINK(1)", "a", "10")


async def test_without_a_store_there_are_no_keys_to_manage() -> None:
    async with proxy_for(admin_keys=("admin-key",)) as (_, url), client(url) as http:
        refused = await http.get("/admin/keys", headers=ADMIN)
        assert (refused.status_code, refused.json()["error"]["code"]) == (404, "not_found")


async def test_each_whole_answer_is_counted_after_a_kill(tmp_path: Path) -> None:
    """The proxy is killed in the middle of many requests, started again, and knows each answer that a client got."""
    config = tmp_path / "proxy.json"
    async with nodes(FakeNode(script=answer)) as (node,):
        fields = {"port": 0, "nodes": [{"url": node.url}], "admin_keys": ["admin-key"], "key_store": "keys.db"}
        config.write_text(json.dumps(fields))
        process, url = await started(config)
        async with client(url) as http:
            made = (await http.post("/admin/keys", json={"name": "a"}, headers=ADMIN)).json()
            key = {"authorization": f"Bearer {made['key']}"}
            whole = 0

            async def ask() -> None:
                nonlocal whole
                while True:
                    got = await http.post(CHAT, json=BODY, headers=key)
                    whole += got.status_code == 200

            asking = [asyncio.create_task(ask()) for _ in range(8)]
            await eventually(lambda: whole >= 50, 30)
            os.kill(process.pid, signal.SIGKILL)
            await asyncio.gather(*asking, return_exceptions=True)
            process.wait()
        process, url = await started(config)
        async with client(url) as http:
            (row,) = (await http.get("/admin/usage", headers=ADMIN)).json()["data"]
            assert whole <= row["requests"] <= whole + 8  # of those that run, an answer may have been on its way
            assert row["input"] == 10 * row["requests"]
        process.terminate()
        assert process.wait(30) == 0


async def started(config: Path) -> tuple[subprocess.Popen[str], str]:
    command = [sys.executable, "-m", "lmkit", "proxy", "--config", str(config)]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    line = await asyncio.to_thread(process.stdout.readline)
    return process, line.split()[-1]


async def test_what_cannot_be_charged_is_refused(tmp_path: Path) -> None:
    async with managed(tmp_path, FakeNode("a", script=answer)) as it:
        _, headers = await it.key()
        later = {"model": "m", "input": "hi", "background": True}
        for path, body in (("/v1/batches", {"input_file_id": "file-a"}), ("/v1/responses", later)):
            refused = await it.http.post(path, json=body, headers=headers)
            assert (refused.status_code, refused.json()["error"]["code"]) == (403, "permission_denied")
        assert not it.node.requests
