"""Server-sent events, and work that is cancelled when the client disconnects."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Coroutine
from contextlib import aclosing
from typing import Any, TypeVar

from starlette.responses import Response
from starlette.types import Message, Receive, Scope, Send

from lmkit.errors import RequestError
from lmkit.serve.errors import with_error_event
from lmkit.web.receive import client_disconnected, until_disconnect

T = TypeVar("T")


async def while_connected(receive: Receive, work: Coroutine[Any, Any, T]) -> T:
    """The result of `work`. If the client disconnects first, `work` is cancelled and RequestError raised.

    The request's body must have been read.
    """
    working, watching = asyncio.ensure_future(work), asyncio.ensure_future(until_disconnect(receive))
    either: set[asyncio.Future[Any]] = {working, watching}
    try:
        await asyncio.wait(either, return_when=asyncio.FIRST_COMPLETED)
        if not working.done():
            raise client_disconnected()
        return working.result()
    finally:
        for task in either:
            task.cancel()
        await asyncio.gather(*either, return_exceptions=True)


class EventStream(Response):
    """Sends `events` (JSON texts without line breaks) as server-sent events, then [DONE] or an error event.

    Use `open`: it waits for the first event. A request that fails before it therefore gets an HTTP status of its own.
    `events` is closed when the response ends, also if the client disconnects.
    """

    media_type = "text/event-stream"

    def __init__(self, first: str, events: AsyncGenerator[str]) -> None:
        super().__init__(headers={"Cache-Control": "no-cache", "X-Accel-Buffering": "no"})
        del self.headers["content-length"]
        self._first, self._events = first, events

    @classmethod
    async def open(cls, receive: Receive, events: AsyncGenerator[str]) -> EventStream:
        try:
            first = await while_connected(receive, _next(events))
        except BaseException:
            await events.aclose()
            raise
        return cls(first, events)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async with aclosing(self._events):
            try:
                await while_connected(receive, self._send_all(scope, send))
            except RequestError as error:
                if error.code != "client_disconnected":
                    raise

    async def _send_all(self, scope: Scope, send: Send) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": self.raw_headers})
        async with aclosing(with_error_event(scope, _chain(self._first, self._events))) as events:
            async for event in events:
                await send(_body(f"data: {event}\n\n", more=True))
        await send(_body("", more=False))


def _body(text: str, *, more: bool) -> Message:
    return {"type": "http.response.body", "body": text.encode(), "more_body": more}


async def _next(events: AsyncGenerator[str]) -> str:
    return await anext(events)


async def _chain(first: str, events: AsyncIterator[str]) -> AsyncGenerator[str]:
    yield first
    async for event in events:
        yield event
