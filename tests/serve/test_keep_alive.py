"""A stream that waits for its next token is not silent for long."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator

import pytest
from starlette.types import Message

from lmkit.errors import RequestError
from lmkit.serve import streaming
from lmkit.serve.streaming import EVENTS, EventStream, Wire

pytestmark = pytest.mark.anyio


LINES = Wire("application/x-ndjson", lambda: '{"done":false}\n')


@pytest.mark.parametrize("wire", [EVENTS, LINES])
async def test_comments_come_between_events(monkeypatch: pytest.MonkeyPatch, wire: Wire) -> None:
    monkeypatch.setattr(streaming, "KEEP_ALIVE_SECONDS", 0.02)
    commented = asyncio.Event()
    sent: list[str] = []

    async def events() -> AsyncGenerator[str]:
        yield "data: 1\n\n"
        await commented.wait()
        yield "data: 2\n\n"

    async def receive() -> Message:
        await asyncio.sleep(3600)
        return {"type": "http.disconnect"}

    async def send(message: Message) -> None:
        sent.append(message.get("body", b"").decode())
        if sent[-1] == wire.comment():
            commented.set()

    stream = await EventStream.open(receive, events(), wire=wire)
    await stream({"type": "http", "headers": [], "path": "/", "method": "POST"}, receive, send)
    assert sent[1] == "data: 1\n\n"
    assert set(sent[2:-2]) == {wire.comment()}
    assert sent[-2:] == ["data: 2\n\n", ""]


async def test_a_request_that_waits_gets_the_head_of_its_stream(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(streaming, "FIRST_SECONDS", 0.0)
    began, sent, closed = asyncio.Event(), list[str](), list[bool]()

    async def events() -> AsyncGenerator[str]:
        try:
            await began.wait()
            yield "data: 1\n\n"
        finally:
            closed.append(True)

    async def receive() -> Message:
        await asyncio.sleep(3600)
        return {"type": "http.disconnect"}

    async def send(message: Message) -> None:
        sent.append(message.get("body", b"").decode())
        if sent[-1] == "early":
            began.set()

    scope = {"type": "http", "headers": [], "path": "/", "method": "POST"}
    await (await EventStream.open(receive, events(), None, lambda: "early"))(scope, receive, send)
    assert sent[1:] == ["early", "data: 1\n\n", ""]

    async def gone() -> Message:
        return {"type": "http.disconnect"}

    began.clear()
    stream = await EventStream.open(receive, events(), None, lambda: "early")
    await stream(scope, gone, send)
    assert closed == [True, True], "also if the client leaves before the first event"


async def test_a_request_that_fails_soon_has_a_status() -> None:
    async def events() -> AsyncGenerator[str]:
        raise RequestError("queue_full", "no")
        yield ""

    async def receive() -> Message:
        await asyncio.sleep(3600)
        return {"type": "http.disconnect"}

    with pytest.raises(RequestError, match="no"):
        await EventStream.open(receive, events(), None, lambda: "early")
