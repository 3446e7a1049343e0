"""A stream that waits for its next token is not silent for long."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator

import pytest
from starlette.types import Message

from lmkit.serve import streaming
from lmkit.serve.streaming import COMMENT, EventStream

pytestmark = pytest.mark.anyio


async def test_comments_come_between_events(monkeypatch: pytest.MonkeyPatch) -> None:
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
        if sent[-1] == COMMENT:
            commented.set()

    stream = await EventStream.open(receive, events())
    await stream({"type": "http", "headers": [], "path": "/", "method": "POST"}, receive, send)
    assert sent[1] == "data: 1\n\n"
    assert set(sent[2:-2]) == {COMMENT}
    assert sent[-2:] == ["data: 2\n\n", ""]
