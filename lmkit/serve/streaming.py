"""Server-sent events and whole answers in blocks."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import AsyncGenerator, Callable, Coroutine, Iterator, Mapping
from contextlib import aclosing
from typing import Any, NamedTuple

import msgspec
from pydantic import BaseModel
from starlette.responses import Response
from starlette.types import Message, Receive, Scope, Send

from lmkit.errors import RequestError
from lmkit.serve.errors import with_error_event
from lmkit.web.counts import HEADER, MARK
from lmkit.web.receive import while_connected

Failed = Callable[[RequestError], str] | None
Early = Callable[[], str] | None
DONE = "data: [DONE]\n\n"  # the last event of OpenAI's streams of chunks
COMMENT = ": keep-alive\n\n"  # clients skip it (HTML, 9.2.6)
KEEP_ALIVE_SECONDS = 10.0


class Wire(NamedTuple):
    """How a stream is written: its media type, and what says nothing but keeps its connection open."""

    media_type: str
    comment: Callable[[], str]


EVENTS = Wire("text/event-stream", lambda: COMMENT)
FIRST_SECONDS = 0.5  # a stream begins without its first event after this time


def event(data: str, name: str = "") -> str:
    """A server-sent event. `data` is JSON without line breaks."""
    return (f"event: {name}\n" if name else "") + f"data: {data}\n\n"


def counted(
    chunks: AsyncGenerator[str], so_far: Callable[[], tuple[int, int, int]], headers: Mapping[str, str]
) -> AsyncGenerator[str]:
    """The stream. If a proxy asks for it, comments tell its usage so far, see `web.counts`."""
    return _counted(chunks, so_far) if HEADER.decode() in headers else chunks


async def _counted(chunks: AsyncGenerator[str], so_far: Callable[[], tuple[int, int, int]]) -> AsyncGenerator[str]:
    before = (0, 0, 0)
    async with aclosing(chunks):
        async for text in chunks:
            now = so_far()
            yield text if now == before else f"{text}{MARK.decode()}{now[0]} {now[1]} {now[2]}\n\n"
            before = now


class WholeAnswer(Response):
    """A JSON value whose iterators are written as lists, a block at a time: a client takes the next block by reading.

    An answer of one block has a Content-Length.
    """

    media_type = "application/json"
    BLOCK = 1 << 16  # characters

    def __init__(self, value: Any) -> None:
        super().__init__()
        self._blocks = _blocks(json_parts(value), self.BLOCK)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        first, second = next(self._blocks), next(self._blocks, None)
        if second is None:
            named = {name: value for name, value in self.headers.items() if name != "content-length"}
            await Response(first, headers=named)(scope, receive, send)
            return
        del self.headers["content-length"]
        await _until_left(receive, self._send_all(send, first, second))

    async def _send_all(self, send: Send, *first: str) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": self.raw_headers})
        for block in itertools.chain(first, self._blocks):
            await send(_body(block, more=True))
            await asyncio.sleep(0)  # a block takes milliseconds; others go on between two
        await send(_body("", more=False))


def json_parts(value: Any) -> Iterator[str]:
    """The JSON of a value in parts. An iterator becomes a list."""
    match value:
        case BaseModel():
            yield value.model_dump_json()
        case dict():
            yield "{"
            for i, (name, item) in enumerate(value.items()):
                yield f"{',' if i else ''}{_json(name)}:"
                yield from json_parts(item)
            yield "}"
        case Iterator():
            yield "["
            for i, item in enumerate(value):
                yield "," if i else ""
                yield from json_parts(item)
            yield "]"
        case _:
            yield _json(value)


def _json(value: Any) -> str:
    return msgspec.json.encode(value).decode()


def _blocks(parts: Iterator[str], size: int) -> Iterator[str]:
    """The same text in blocks of at least `size` characters and a last one."""
    block: list[str] = []
    num_chars = 0
    for part in parts:
        block.append(part)
        num_chars += len(part)
        if num_chars >= size:
            yield "".join(block)
            block, num_chars = [], 0
    yield "".join(block)


class EventStream(Response):
    """Sends server-sent events, and if `events` fails an error event, see `errors.with_error_event`.

    Use `open`: it waits for the first event, but not long where something may stand before it. A request that fails
    soon therefore gets an HTTP status of its own, and a request that waits gets bytes, so that nobody between cuts it
    off. `events` is closed when the response ends, also if the client disconnects.
    """

    def __init__(
        self,
        first: asyncio.Future[str],
        events: AsyncGenerator[str],
        failed: Failed = None,
        early: Early = None,
        wire: Wire = EVENTS,
    ) -> None:
        headers = {"Cache-Control": "no-cache", "X-Accel-Buffering": "no"}
        super().__init__(headers=headers, media_type=wire.media_type)
        self._comment = wire.comment
        del self.headers["content-length"]
        self._first, self._events, self._failed, self._early = first, events, failed, early
        self._num_sent = 0

    @classmethod
    async def open(
        cls,
        receive: Receive,
        events: AsyncGenerator[str],
        failed: Failed = None,
        early: Early = None,
        wire: Wire = EVENTS,
    ) -> EventStream:
        """`early` writes what is sent where the first event takes longer than FIRST_SECONDS. None: wait for it."""
        first = asyncio.ensure_future(_next(events))
        try:
            await while_connected(receive, _known(first, None if early is None else FIRST_SECONDS))
        except BaseException:
            await _closed(first, events)
            raise
        return cls(first, events, failed, early, wire)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await _until_left(receive, self._send_all(scope, send))
        finally:
            await _closed(self._first, self._events)

    async def _send_all(self, scope: Scope, send: Send) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": self.raw_headers})
        keeping = asyncio.create_task(self._keep_alive(send))
        try:
            async with aclosing(with_error_event(scope, self._all_events(), self._failed)) as events:
                async for text in events:
                    self._num_sent += 1
                    await send(_body(text, more=True))
        finally:
            keeping.cancel()
        await send(_body("", more=False))

    async def _all_events(self) -> AsyncGenerator[str]:
        if self._early is not None and not self._first.done():
            yield self._early()
        yield await self._first
        async for text in self._events:
            yield text

    async def _keep_alive(self, send: Send) -> None:
        """Send a comment when nothing was sent for a while, so that nobody between takes the connection for dead."""
        while True:
            before = self._num_sent
            await asyncio.sleep(KEEP_ALIVE_SECONDS)
            if self._num_sent == before:
                await send(_body(self._comment(), more=True))


async def _until_left(receive: Receive, sending: Coroutine[Any, Any, None]) -> None:
    """Run `sending`, which a client ends by leaving."""
    try:
        await while_connected(receive, sending)
    except RequestError as error:
        if error.code != "client_disconnected":
            raise


def _body(text: str, *, more: bool) -> Message:
    return {"type": "http.response.body", "body": text.encode(), "more_body": more}


async def _next(events: AsyncGenerator[str]) -> str:
    return await anext(events)


async def _known(first: asyncio.Future[str], seconds: float | None) -> None:
    """Wait for a first event, `seconds` at most. Raises what it raised."""
    done, _ = await asyncio.wait({first}, timeout=seconds)
    for future in done:
        future.result()


async def _closed(first: asyncio.Future[str], events: AsyncGenerator[str]) -> None:
    first.cancel()
    await asyncio.gather(first, return_exceptions=True)
    await events.aclose()
