"""Ollama's and llama.cpp's own routes through the proxy: names, keys, what is charged, and streams of lines."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import pytest

from lmkit.proxy import downstream
from tests.proxy.fakes import Exchange, FakeNode, client, nodes, proxy_for
from tests.proxy.test_keys import managed

pytestmark = pytest.mark.anyio
CHAT = "/api/chat"
BODY: dict[str, Any] = {"model": "m:latest", "messages": [{"role": "user", "content": "hi"}]}
LAST = {"message": {"content": ""}, "done": True, "done_reason": "stop", "prompt_eval_count": 10, "eval_count": 3}


def part(text: str) -> dict[str, Any]:
    return {"message": {"role": "assistant", "content": text}, "done": False}


async def lines(exchange: Exchange, *parts: dict[str, Any]) -> None:
    head = "HTTP/1.1 200 OK\r\ncontent-type: application/x-ndjson\r\ntransfer-encoding: chunked\r\n\r\n"
    await exchange.write(head.encode())
    whole = b"".join(json.dumps(one).encode() + b"\n" for one in parts)
    for i in range(0, len(whole), 7):  # cut anywhere
        await exchange.chunk(whole[i : i + 7])


async def stream(exchange: Exchange) -> None:
    await lines(exchange, part("a"), part(""), part("b"), LAST)
    await exchange.end()


async def whole(exchange: Exchange) -> None:
    await exchange.reply(200, LAST)


@pytest.mark.parametrize("script", [stream, whole])
async def test_an_answer_is_charged_by_its_counts_under_the_models_own_name(tmp_path: Path, script: Any) -> None:
    async with managed(tmp_path, FakeNode(script=script)) as here:
        _, key = await here.key(models=["m"])
        got = await here.http.post(CHAT, json=BODY, headers=key)
        assert got.status_code == 200
        assert json.loads(got.text.splitlines()[-1]) == LAST
        assert await here.used() == [["m", 1, 10, 0, 3]]
        assert json.loads(here.node.requests[0].body)["model"] == "m"
        refused = await here.http.post(CHAT, json=BODY | {"model": "x:latest"}, headers=key)
        assert (refused.status_code, type(refused.json()["error"])) == (403, str)


@pytest.mark.parametrize("ends", [True, False])
async def test_a_nodes_usage_so_far_is_counted_and_kept_from_the_client(tmp_path: Path, ends: bool) -> None:
    async def counting(exchange: Exchange) -> None:
        assert exchange.request.header("x-lmkit-counts") == ["1"]
        await lines(exchange, part("a"))
        await exchange.chunk(b": usage 10 4 2\n\n")
        await lines_of(exchange, LAST) if ends else exchange.writer.close()

    async def lines_of(exchange: Exchange, last: dict[str, Any]) -> None:
        await exchange.chunk(json.dumps(last).encode() + b"\n: usage 10 4 3\n\n")
        await exchange.end()

    async with managed(tmp_path, FakeNode(script=counting)) as here:
        _, key = await here.key()
        got = await here.http.post(CHAT, json=BODY, headers=key)
        told = [json.loads(line) for line in got.text.split("\n")[:-1]]
        assert told[0] == part("a")
        assert (told[1:] == [LAST]) is ends
        assert await here.used() == [["m", 1, 10, 4, 3 if ends else 2]]


async def test_only_num_predict_bounds_what_is_reserved(tmp_path: Path) -> None:
    async with managed(tmp_path, FakeNode(script=stream)) as here:
        _, key = await here.key(limits={"tokens/day": 500})
        refused = await here.http.post(CHAT, json=BODY | {"options": {"num_predict": 9000.0}}, headers=key)
        assert (refused.status_code, type(refused.json()["error"])) == (429, str)
        for fields in ({"max_tokens": 1}, {"n_predict": 1}, {"options": {"num_predict": -1}}):  # open: it is set
            assert (await here.http.post(CHAT, json=BODY | fields, headers=key)).status_code == 200
            assert 9 < json.loads(here.node.requests[-1].body)["options"]["num_predict"] < 500, fields
        assert (await here.http.post(CHAT, json=BODY | {"options": {"num_predict": 9}}, headers=key)).status_code == 200


async def test_a_stream_that_breaks_off_is_charged_by_its_parts_and_ends_with_an_error(tmp_path: Path) -> None:
    async def breaks(exchange: Exchange) -> None:
        await lines(exchange, part("a"), part(""), part("b"))
        await exchange.chunk(b'{"message":')
        exchange.writer.close()  # a reset would take with it what the proxy has not read

    async with managed(tmp_path, FakeNode(script=breaks)) as here:
        _, key = await here.key()
        got = await here.http.post(CHAT, json=BODY, headers=key)
        *texts, last = map(json.loads, got.text.splitlines())
        assert [one["message"]["content"] for one in texts] == ["a", "", "b"]
        assert list(last) == ["error"]
        ((_, _, _, _, output),) = await here.used()
        assert output == 2  # the empty part only keeps the connection open


@pytest.mark.parametrize("path", [CHAT, "/completion"])
async def test_an_answer_that_is_not_utf_8_is_passed_on_and_charged(tmp_path: Path, path: str) -> None:
    mark = b"" if path == CHAT else b"data: "
    event = mark + b'{"message": {"content": "\xff"}, "index": "\xff"}\n' + (b"\n" if mark else b"")

    async def strange(exchange: Exchange) -> None:
        await (lines(exchange) if path == CHAT else exchange.start_events())
        await exchange.chunk(event)
        await exchange.end()

    async with managed(tmp_path, FakeNode(script=strange)) as here:
        _, key = await here.key()
        body = BODY if path == CHAT else {"model": "m", "prompt": "hi", "stream": True}
        got = await here.http.post(path, json=body, headers=key)
        assert got.content == event
        ((_, num_requests, prompt, _, output),) = await here.used()
        assert num_requests == 1
        assert prompt > 0
        assert output > 0


async def test_a_client_that_is_held_gets_empty_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(downstream, "HOLD_SECONDS", 0.0)

    async def late(exchange: Exchange) -> None:
        await seen()
        await stream(exchange)

    async def seen() -> None:
        while not begun:
            await asyncio.sleep(0.01)

    begun: list[bytes] = []
    async with (
        nodes(FakeNode(script=late)) as (node,),
        proxy_for(node) as (_, url),
        client(url) as http,
        http.stream("POST", CHAT, json=BODY) as got,
    ):
        assert got.headers["content-type"] == "application/x-ndjson"
        async for line in got.aiter_lines():
            begun.append(line.encode())
    first, *rest = map(json.loads, begun)
    assert (first["message"]["content"], first["done"]) == ("", False)
    assert [one["message"]["content"] for one in rest] == ["a", "", "b", ""]


@pytest.mark.parametrize("streamed", [False, True])
async def test_llama_cpps_answers_are_charged_by_their_counts(tmp_path: Path, streamed: bool) -> None:
    def event(index: int, count: int) -> dict[str, Any]:
        return {"index": index, "content": "a", "stop": count == 3, "tokens_evaluated": 10, "tokens_predicted": count}

    async def script(exchange: Exchange) -> None:
        if not streamed:
            await exchange.reply(200, [event(0, 3), event(1, 3)])
            return
        await exchange.start_events()
        for index, count in ((0, 1), (1, 1), (0, 3), (1, 3)):
            await exchange.chunk(f"data: {json.dumps(event(index, count))}\n\n".encode())
        await exchange.end()

    async with managed(tmp_path, FakeNode(script=script)) as here:
        _, key = await here.key()
        body = {"model": "m", "prompt": "a", "n": 2, "stream": streamed}
        assert (await here.http.post("/completion", json=body, headers=key)).status_code == 200
        assert await here.used() == [["m", 1, 10, 0, 6]]


async def test_the_lists_have_the_models_that_a_key_may_use(tmp_path: Path) -> None:
    async with managed(tmp_path, FakeNode(models=("m", "secret"))) as here:
        _, key = await here.key(models=["m"])
        for path in ("/api/tags", "/api/ps"):
            found = (await here.http.get(path, headers=key)).json()["models"]
            assert [(one["name"], one["model"]) for one in found] == [("m:latest", "m:latest")]
        assert (await here.http.get("/api/version", headers=key)).json()["version"]
        older = await here.http.post("/api/show", json={"name": "m"}, headers=key)
        assert older.json()["target"] == "/api/show"
        assert json.loads(here.node.requests[-1].body) == {"model": "m"}
        assert await here.used() == [["m", 1, 0, 0, 0]]
