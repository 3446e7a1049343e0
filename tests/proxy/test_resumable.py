"""Streams that a client takes up again: each event once, byte for byte, for a time, and for nobody else."""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import httpx
import openai
import pytest

from lmkit.proxy.auth import Keys
from lmkit.web import resumable
from tests.proxy.fakes import BODY, CHAT, Exchange, FakeNode, client, eventually, nodes, proxy_for, streamed

pytestmark = pytest.mark.anyio
RESUME, LAST = "x-lmkit-resume", "last-event-id"
EVENTS = [f"data: {i}\n\n".encode() for i in range(8)]
ID = re.compile(rb"id: [0-9a-f]{32}\.\d+\n")


class Slow:
    """A node whose stream goes on when it is told."""

    def __init__(self) -> None:
        self.go = asyncio.Semaphore(0)
        self.written = 0
        self.node = FakeNode("a", script=self._answer)

    async def _answer(self, exchange: Exchange) -> None:
        await exchange.start_events()
        for event in EVENTS:
            await self.go.acquire()
            await exchange.chunk(event)
            self.written += 1
        await exchange.end()

    def step(self, count: int) -> None:
        for _ in range(count):
            self.go.release()


@asynccontextmanager
async def cut(url: str, count: int, slow: Slow, **headers: str) -> AsyncIterator[bytes]:
    """The first `count` events of a stream whose connection then breaks."""
    reader, writer = await asyncio.open_connection("127.0.0.1", int(url.rpartition(":")[2]))
    lines = [f"POST {CHAT} HTTP/1.1", "Host: [::]", f"Content-Length: {len(BODY)}", f"{RESUME}: 30"]
    lines += [f"{name}: {value}" for name, value in headers.items()]
    writer.write("\r\n".join([*lines, "", ""]).encode() + BODY)
    slow.step(count)
    got = b""
    while len(re.findall(rb"data: .*\n\n", got)) < count:
        got += await reader.read(1000)
        assert not reader.at_eof()
    writer.transport.abort()
    yield b"".join(re.findall(rb"id: .*\ndata: .*\n\n", got))


def last_id(text: bytes) -> str:
    return re.findall(rb"id: (\S+)", text)[-1].decode()


@pytest.mark.parametrize("count", [1, 4, 8])
async def test_the_rest_comes_once_and_byte_for_byte(count: int) -> None:
    slow = Slow()
    async with (
        nodes(slow.node),
        proxy_for(slow.node) as (proxy, url),
        client(url) as http,
        cut(url, count, slow) as first,
    ):
        slow.step(8)
        rest = await http.post(CHAT, headers={LAST: last_id(first)})
        assert rest.headers["content-type"].startswith("text/event-stream")
        assert ID.sub(b"", first + rest.content) == b"".join(EVENTS)
        again = await http.post(CHAT, headers={LAST: last_id(first)})  # it may have been lost once more
        assert again.content == rest.content
        assert len(slow.node.requests) == 1
        numbers = [int(found) for found in re.findall(rb"id: \w+\.(\d+)", first + rest.content)]
        assert numbers == list(range(8))
        await eventually(lambda: proxy.active == 0)


async def test_a_stream_goes_on_without_its_client_and_a_second_one_takes_it_over() -> None:
    slow = Slow()
    async with nodes(slow.node), proxy_for(slow.node) as (_, url), client(url) as http, cut(url, 1, slow) as first:
        slow.step(2)
        await eventually(lambda: slow.written == 3)
        tasks = []
        for _ in range(2):
            begun = asyncio.Event()
            tasks.append(asyncio.create_task(streamed(http, begun, headers={LAST: last_id(first)})))
            await begun.wait()
        one, two = tasks
        slow.step(8)
        assert ID.sub(b"", await two) == b"".join(EVENTS[1:])
        with pytest.raises(httpx.RemoteProtocolError):  # cut off, so that nobody takes it for the end
            await one


async def test_when_its_time_is_over_the_node_is_left(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(resumable._Stream, "__init__", _short(resumable._Stream.__init__))
    slow = Slow()
    async with nodes(slow.node), proxy_for(slow.node) as (proxy, url), client(url) as http, cut(url, 1, slow) as first:
        await eventually(lambda: proxy.active == 0)
        answer = await http.post(CHAT, headers={LAST: last_id(first)})
        assert (answer.status_code, answer.json()["error"]["code"]) == (404, "not_found")


def _short(begin: object) -> object:
    def init(self: object, owner: bytes, seconds: int, receive: object) -> None:
        begin(self, owner, 0.05, receive)  # type: ignore[operator]

    return init


async def test_no_other_client_gets_a_stream() -> None:
    slow = Slow()
    keys = {"api_keys": ("alice", "bob")}
    async with (
        nodes(slow.node),
        proxy_for(slow.node, **keys) as (_, url),
        client(url) as http,
        cut(url, 2, slow, authorization="Bearer alice") as first,
    ):
        slow.step(8)
        headers = {LAST: last_id(first)}
        assert (await http.post(CHAT, headers=headers)).status_code == 401
        for other in ({"authorization": "Bearer bob"}, {"x-api-key": "alice"}):
            assert (await http.post(CHAT, headers=headers | other)).status_code == 404
        mine = {"authorization": "Bearer alice"}
        assert (await http.post("/v1/completions", headers=headers | mine)).status_code == 404
        assert (await http.post(CHAT, headers=headers | mine)).status_code == 200
    assert len(slow.node.requests) == 1


async def test_a_key_that_is_good_no_more_takes_up_nothing_and_one_key_has_a_part_of_the_places(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(resumable, "MAX_EACH", 1)
    slow, alice, bob = Slow(), {"authorization": "Bearer alice"}, {"authorization": "Bearer bob"}
    async with (
        nodes(slow.node),
        proxy_for(slow.node, api_keys=("alice", "bob")) as (proxy, url),
        client(url) as http,
        cut(url, 2, slow, **alice) as first,
    ):
        slow.step(20)
        again = await http.post(CHAT, content=BODY, headers={RESUME: "30"} | alice)
        assert (again.status_code, "this key" in again.text) == (503, True)
        assert (await http.post(CHAT, content=BODY, headers={RESUME: "30"} | bob)).status_code == 200
        proxy.keys = Keys.of(("bob",), ())
        assert (await http.post(CHAT, headers={LAST: last_id(first)} | alice)).status_code == 401


@pytest.mark.parametrize("value", ["", "0", "x", "301", "-1", "9" * 30])
async def test_seconds_out_of_range_are_refused(value: str) -> None:
    async with nodes(FakeNode()) as (node,), proxy_for(node) as (_, url), client(url) as http:
        assert (await http.post(CHAT, content=BODY, headers={RESUME: value})).status_code == 400
        assert (await http.post(CHAT, content=BODY, headers={LAST: value})).status_code == 404
        assert not node.requests


async def test_other_answers_are_as_they_are_and_a_client_that_leaves_them_ends_them() -> None:
    async def silent(exchange: Exchange) -> None:
        await exchange.until_left()

    async with nodes(FakeNode()) as (node,), proxy_for(node) as (proxy, url), client(url) as http:
        plain = await http.post(CHAT, content=BODY, headers={RESUME: "30"})
        assert plain.json()["node"] == node.name
        node.script = silent
        with pytest.raises(httpx.ReadTimeout):
            await http.post(CHAT, content=BODY, headers={RESUME: "30"}, timeout=0.2)
        await eventually(lambda: proxy.active == 0)


async def test_what_is_kept_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(resumable, "MAX_KEPT_BYTES", 100)
    monkeypatch.setattr(resumable, "MAX_STREAMS", 1)
    slow = Slow()
    async with nodes(slow.node), proxy_for(slow.node) as (_, url), client(url) as http, cut(url, 6, slow) as first:
        assert (await http.post(CHAT, content=BODY, headers={RESUME: "1"})).status_code == 503
        slow.step(8)
        early = re.findall(rb"id: (\S+)", first)[0].decode()
        assert (await http.post(CHAT, headers={LAST: early})).status_code == 404
        assert b"data: 7" in (await http.post(CHAT, headers={LAST: last_id(first)})).content


async def test_openais_client_reads_a_stream_with_ids() -> None:
    async def chunks(exchange: Exchange) -> None:
        await exchange.start_events()
        choice = {"index": 0, "delta": {"content": "hi"}, "finish_reason": None}
        chunk = {"id": "c", "object": "chat.completion.chunk", "created": 1, "model": "m", "choices": [choice]}
        await exchange.chunk(b"data: " + json.dumps(chunk).encode() + b"\n\n")
        await exchange.chunk(b"data: [DONE]\n\n")
        await exchange.end()

    api = openai.AsyncOpenAI(base_url="http://unset", api_key="none", default_headers={RESUME: "30"})
    async with nodes(FakeNode("a", script=chunks)) as (node,), proxy_for(node) as (_, url), api:
        messages = [{"role": "user", "content": "x"}]
        asked = api.with_options(base_url=url + "/v1").chat.completions.create
        stream = await asked(model="m", messages=messages, stream=True)  # type: ignore[call-overload]
        assert [chunk.choices[0].delta.content async for chunk in stream] == ["hi"]
