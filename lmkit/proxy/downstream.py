"""The response to the client: the part sent so far, and the form of an error at each point."""

from __future__ import annotations

import asyncio
import contextlib
import re
import time
from collections.abc import AsyncIterator, Iterable
from contextlib import asynccontextmanager
from email.utils import formatdate

from starlette.responses import Response
from starlette.types import Message, Send

from lmkit.errors import RequestError
from lmkit.web.errors import RESPONSES_ROUTES, error_event, error_response, event_of
from lmkit.web.ollama import LINES, STREAMS, empty_part, line
from lmkit.web.receive import client_disconnected
from lmkit.web.sse import WholeEvents

HOLD_SECONDS = 0.75  # a client that asked for a stream gets its head after this time; more than a node takes to begin
COMMENT_SECONDS = 10.0  # between two comments
COMMENT = b": waiting\n\n"
OWN = b"x-lmkit-"  # headers of these names say what no other part of an answer does
MAX_REFUSAL = 64 << 10  # bytes of an answer that becomes the last event of a stream
_NUMBER = re.compile(rb'"sequence_number":(\d{1,15})')
_EVENTS = b"text/event-stream; charset=utf-8"


class DownstreamResponse:
    """The response to the client: wraps an ASGI `send`, and knows what has been sent.

    A response that has started ends with `end`, or with `fail` so that the client notices.
    """

    def __init__(self, send: Send, retry_after: float | None = 1.0, path: str = "") -> None:
        """Errors have the form of the route `path`."""
        self._send, self._path, self._lines = send, path, path in STREAMS
        self._is_numbered, self._number = path.startswith(RESPONSES_ROUTES), 0  # of the next event
        self.model = ""  # as the client names it
        self.retry_after = retry_after  # of a refusal, in seconds; None: never
        self._events: WholeEvents | None = None
        self._added: tuple[tuple[bytes, bytes], ...] = ()
        self.node = ""  # the URL of the node that answers
        self.started = False  # with a node's answer, or an error
        self.finished = False
        self._is_held = False  # the client has the head of a stream, and no node has answered yet
        self._sent_at = 0.0  # the last byte of the body, by the monotonic clock
        self._refusal: bytearray | None = None  # a node's answer that is no stream, to a client that was held

    def add_headers(self, headers: Iterable[tuple[bytes, bytes]]) -> None:
        """Headers of the proxy itself, for the response to come. They replace those added before."""
        self._added = tuple(headers)

    async def send(self, message: Message) -> None:
        """ASGI send. Raises RequestError client_disconnected if the server reports that the client has left."""
        if message["type"] == "http.response.start":
            self.started = True
            message["headers"] = [*message["headers"], *self._added]
        elif message["type"] == "http.response.body" and not message.get("more_body", False):
            self.finished = True
        self._sent_at = time.monotonic()
        try:
            await self._send(message)
        except OSError:
            self.finished = True
            raise client_disconnected() from None

    async def wait(self, seconds: float) -> None:
        """Sleep. A client whose stream has begun gets comments meanwhile, as from a node, so that it stays."""
        end = time.monotonic() + seconds
        while (left := end - time.monotonic()) > 0:
            await asyncio.sleep(min(left, COMMENT_SECONDS))
            is_stream = self.started and not self.finished and self._events is not None and not self._events.inside
            if is_stream and time.monotonic() - self._sent_at >= COMMENT_SECONDS:
                await self.send(self._comment())

    async def hold(self) -> None:
        """Begin a stream for a client that waits for its node, and write comments until the node answers."""
        await asyncio.sleep(HOLD_SECONDS)
        if self.started or self.finished:
            return
        self._is_held, self._events = True, WholeEvents(lines=self._lines)
        kind = LINES.encode() if self._lines else _EVENTS
        headers = [(b"content-type", kind), (b"cache-control", b"no-cache"), *self._added]
        await self._send({"type": "http.response.start", "status": 200, "headers": headers})
        while not (self.started or self.finished):
            await self._send(self._comment())
            await asyncio.sleep(COMMENT_SECONDS)

    def _comment(self) -> Message:
        comment = line(empty_part(self._path, self.model)).encode() if self._lines else COMMENT
        return {"type": "http.response.body", "body": comment, "more_body": True}

    async def start(self, status: int, headers: Iterable[tuple[bytes, bytes]], *, events: bool = False) -> None:
        """Start a streamed response. `events`: the body is server-sent events, or lines where the route has these."""
        if self._is_held:
            self.started = True
            self._refusal = None if events and status == 200 else bytearray()
            if self._refusal is None:
                await self.write(self._late((*self._added, *headers)))
            return
        self._events = WholeEvents(lines=self._lines) if events else None
        await self.send({"type": "http.response.start", "status": status, "headers": list(headers)})

    def _late(self, headers: Iterable[tuple[bytes, bytes]]) -> bytes:
        """lmkit's own headers for a client that got its head before they were known: comments, or fields of a part."""
        fields = {name.decode(): value.decode("latin-1") for name, value in headers if name.startswith(OWN)}
        if not fields:
            return b""
        if self._lines:
            return line(empty_part(self._path, self.model) | fields).encode()
        return "".join(f": {name}: {value}\n" for name, value in fields.items()).encode("latin-1") + b"\n"

    async def write(self, data: bytes) -> None:
        if self._refusal is not None:
            self._refusal += data[: MAX_REFUSAL - len(self._refusal)]
            return
        piece = data if self._events is None else self._events.feed(data)
        if piece:
            if self._is_numbered:
                self._number = max([self._number, *(int(found) + 1 for found in _NUMBER.findall(piece))])
            await self.send({"type": "http.response.body", "body": piece, "more_body": True})

    async def end(self, last: bytes = b"") -> None:
        if self._refusal is not None:
            await self.write(last)
            body = event_of(bytes(self._refusal), self._path)
            await self.send({"type": "http.response.body", "body": body})
            return
        rest = last if self._events is None else self._events.feed(last) + self._events.rest()
        await self.send({"type": "http.response.body", "body": rest})

    async def fail(self, error: RequestError) -> None:
        """Tell the client of an error: as the whole response, or as the last event of a stream.

        Any other body that has started is left incomplete. The server then closes the connection, and no client takes
        that for the end.
        """
        if self.finished:
            return
        if not (self.started or self._is_held):
            await self.whole(error_response(error, retry_after=self.retry_after, path=self._path))
        elif self._events is not None:
            separator = self._events.separator if self._events.inside else b""
            await self.send(
                {"type": "http.response.body", "body": separator + error_event(error, self._path, self._number)}
            )

    async def whole(self, response: Response) -> None:
        """Send a complete response of the proxy itself. It gets a Date here, because the HTTP server adds none."""
        if self._is_held:  # the client has a head already
            await self.start(response.status_code, [])
            await self.end(bytes(response.body))
            return
        headers = [*response.raw_headers, (b"date", formatdate(usegmt=True).encode())]
        await self.send({"type": "http.response.start", "status": response.status_code, "headers": headers})
        await self.send({"type": "http.response.body", "body": response.body})


@asynccontextmanager
async def holding(response: DownstreamResponse) -> AsyncIterator[None]:
    """In this block the client is held, see `DownstreamResponse.hold`."""
    task = asyncio.create_task(response.hold())
    try:
        yield
    finally:
        task.cancel()
        with contextlib.suppress(asyncio.CancelledError, OSError):  # a client that left: the block learns it, too
            await task
