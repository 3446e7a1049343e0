"""Streams that a client may take up again after its connection broke (HTML, 9.2: Last-Event-ID).

    POST /v1/chat/completions, x-lmkit-resume: 30              id: STREAM.0, data: ...    id: STREAM.1, data: ...
    POST /v1/chat/completions, Last-Event-ID: STREAM.1         id: STREAM.2, data: ...

The header names the seconds for which an answer goes on, and is kept, without a client. Only the credentials of the
first request open it. Requests without these headers are passed on as they are.
"""

from __future__ import annotations

import asyncio
import hmac
import itertools
import re
import secrets
from collections import deque
from collections.abc import Callable

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from lmkit.errors import RequestError
from lmkit.web.access_log import note_error
from lmkit.web.errors import error_response
from lmkit.web.receive import until_disconnect
from lmkit.web.sse import WholeEvents, events_of

HEADER, LAST_EVENT = b"x-lmkit-resume", b"last-event-id"
MAX_SECONDS = 300
MAX_STREAMS, MAX_EACH = 64, 16  # that are kept at once: in all, and for one key
MAX_KEPT_BYTES = 1 << 20  # of one answer's events that its client has taken; the newest stay
MAX_UNREAD_BYTES = 256 << 10  # that its client has not taken; then the answer waits
_CREDENTIALS = (b"authorization", b"x-api-key", b"api-key")
_ID = re.compile(rb"([0-9a-f]{32})\.(\d{1,12})")


class Resumable:
    """Middleware."""

    def __init__(self, app: ASGIApp, check: Callable[[Scope], object] | None = None) -> None:
        """`check` raises RequestError for a key that is good no more. None: what stands before this has looked."""
        self._app, self._check = app, check
        self._streams: dict[bytes, _Stream] = {}
        self._running = set[asyncio.Task[None]]()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        headers = dict(scope["headers"]) if scope["type"] == "http" else {}
        if HEADER not in headers and LAST_EVENT not in headers:
            await self._app(scope, receive, send)
            return
        try:
            after = -1
            if LAST_EVENT in headers:
                stream, after = self._find(scope, headers)
            else:
                stream = self._begin(scope, headers, receive)
        except RequestError as error:
            note_error(scope, error)
            await error_response(error, path=scope["path"])(scope, receive, send)
            return
        await stream.serve(after, receive, send)

    def _begin(self, scope: Scope, headers: dict[bytes, bytes], receive: Receive) -> _Stream:
        seconds = headers[HEADER]
        if not (seconds.isdigit() and len(seconds) < 9 and 1 <= int(seconds) <= MAX_SECONDS):
            raise RequestError("invalid_request", f"x-lmkit-resume: expected seconds, from 1 to {MAX_SECONDS}")
        if len(self._streams) >= MAX_STREAMS:
            raise RequestError(
                "overloaded", f"{MAX_STREAMS} streams are kept for their clients; leave x-lmkit-resume out"
            )
        credentials = _credentials(headers)
        if any(credentials) and sum(credentials == one.credentials for one in self._streams.values()) >= MAX_EACH:
            raise RequestError(
                "overloaded", f"{MAX_EACH} streams of this key are kept for it; leave x-lmkit-resume out"
            )
        stream = _Stream(_owner(scope, headers), int(seconds), receive)
        stream.credentials = credentials
        stream.work = asyncio.create_task(self._run(scope, stream))
        self._running.add(stream.work)
        stream.work.add_done_callback(self._running.discard)
        self._streams[stream.id] = stream
        return stream

    async def _run(self, scope: Scope, stream: _Stream) -> None:
        try:
            await self._app(scope, stream.receive, stream.send)
        finally:
            await stream.end()
            try:
                await stream.is_over.wait()
            finally:
                del self._streams[stream.id]

    def _find(self, scope: Scope, headers: dict[bytes, bytes]) -> tuple[_Stream, int]:
        """The stream that a client takes up, and the last event that it has."""
        if self._check is not None:
            self._check(scope)
        found = _ID.fullmatch(headers[LAST_EVENT])
        stream = self._streams.get(found[1]) if found else None
        if found is None or stream is None or not hmac.compare_digest(stream.owner, _owner(scope, headers)):
            raise RequestError("not_found", "Last-Event-ID: there is no such stream, or its time is over")
        first = stream.kept[0][0] if stream.kept else stream.next
        if not first - 1 <= int(found[2]) < stream.next:
            raise RequestError("not_found", "Last-Event-ID: the events behind this one are not kept")
        return stream, int(found[2])


def _owner(scope: Scope, headers: dict[bytes, bytes]) -> bytes:
    """Whose stream it is: the route and the credentials."""
    return b"\0".join([scope["path"].encode(), *_credentials(headers)])


def _credentials(headers: dict[bytes, bytes]) -> list[bytes]:
    return [headers.get(name, b"") for name in _CREDENTIALS]


class _Stream:
    """One answer. The application writes it with `send`, and the client that came last gets it from `serve`."""

    def __init__(self, owner: bytes, seconds: int, receive: Receive) -> None:
        self.id, self.owner = secrets.token_hex(16).encode(), owner
        self.credentials: list[bytes] = []
        self.work: asyncio.Task[None] | None = None  # of the application
        self.is_over = asyncio.Event()  # no client may come any more
        self.kept = deque[tuple[int, bytes]]()  # (number, event), the oldest first
        self.next = 0  # the number of the next event
        self._seconds, self._receive = seconds, receive
        self._has_body = asyncio.Event()  # the application has the whole request
        self._changed = asyncio.Condition()
        self._start: Message | None = None
        self._is_stream = self._is_whole = self._ended = False
        self._events = WholeEvents()
        self._taken = -1  # the last event that the client has
        self._kept_bytes = self._unread = 0  # of all events, and of those that it has not
        self._turn = 0  # the number of the client that came last
        self._timer: asyncio.TimerHandle | None = None

    def _behind(self, after: int) -> list[tuple[int, bytes]]:
        """The events after event `after`."""
        found = list(itertools.takewhile(lambda item: item[0] > after, reversed(self.kept)))
        return found[::-1]

    async def receive(self) -> Message:
        """For the application. It learns that the client has left when no client may come back."""
        if not self._has_body.is_set():
            message = await self._receive()
            if message["type"] == "http.disconnect" or not message.get("more_body", False):
                self._has_body.set()
            return message
        await self.is_over.wait()
        return {"type": "http.disconnect"}

    async def send(self, message: Message) -> None:
        """From the application."""
        if message["type"] == "http.response.start":
            headers = dict(message["headers"])
            kind = headers.get(b"content-type", b"").partition(b";")[0].strip().lower()
            self._is_stream = kind == b"text/event-stream" and b"content-encoding" not in headers
            if self._is_stream:  # the ids make it longer
                kept = [(name, value) for name, value in message["headers"] if name.lower() != b"content-length"]
                message = {**message, "headers": kept}
            self._start = message
        elif message["type"] == "http.response.body":
            self._is_whole = not message.get("more_body", False)
            self._add(message.get("body", b""))
        async with self._changed:
            self._changed.notify_all()
            await self._changed.wait_for(lambda: self._unread <= MAX_UNREAD_BYTES or self.is_over.is_set())

    def _add(self, data: bytes) -> None:
        parts = [data] if data else []
        if self._is_stream:
            whole = self._events.feed(data) + (self._events.rest() if self._is_whole else b"")
            parts = events_of(whole)
        for part in parts:
            event = b"id: %s.%d\n%s" % (self.id, self.next, part) if self._is_stream else part
            self.kept.append((self.next, event))
            self.next += 1
            self._kept_bytes += len(event)
            self._unread += len(event)
        while self._kept_bytes - self._unread > MAX_KEPT_BYTES:
            self._kept_bytes -= len(self.kept.popleft()[1])

    async def end(self) -> None:
        """The application has ended."""
        self._ended = True
        await self._tell()

    async def _tell(self) -> None:
        async with self._changed:
            self._changed.notify_all()

    async def serve(self, after: int, receive: Receive, send: Send) -> None:
        """Send what comes after event `after`, until it ends, the client leaves, or another client takes it up."""
        self._turn += 1
        turn, self._taken = self._turn, after
        self._unread = sum(len(event) for _, event in self._behind(after))
        await self._tell()
        if self._timer is not None:
            self._timer.cancel()
        leaving = asyncio.create_task(self._until_left(receive))
        try:
            await self._pass_on(turn, leaving, send)
        finally:
            leaving.cancel()
            if turn == self._turn and not self._is_stream:
                self._over()
            elif turn == self._turn:
                self._timer = asyncio.get_running_loop().call_later(self._seconds, self._over)
        if self._start is None and self.work is not None and not leaving.done():
            await self.work  # raises what went wrong

    def _over(self) -> None:
        self.is_over.set()
        self._telling = asyncio.create_task(self._tell())

    async def _until_left(self, receive: Receive) -> None:
        await self._has_body.wait()
        await until_disconnect(receive)
        self._telling = asyncio.create_task(self._tell())

    async def _pass_on(self, turn: int, leaving: asyncio.Task[None], send: Send) -> None:
        def may_go() -> bool:
            return self._turn == turn and not leaving.done()

        async with self._changed:
            await self._changed.wait_for(lambda: not may_go() or self._start is not None or self._ended)
        if not may_go() or self._start is None:
            return
        await send(self._start)
        while True:
            async with self._changed:
                await self._changed.wait_for(
                    lambda: not may_go() or self._taken < self.next - 1 or self._is_whole or self._ended
                )
            for number, event in self._behind(self._taken):
                if not may_go():
                    return
                await send({"type": "http.response.body", "body": event, "more_body": True})
                if self._turn == turn:
                    self._taken, self._unread = number, self._unread - len(event)
            await self._tell()  # there is room
            if not may_go():
                return
            if self._taken == self.next - 1 and (self._is_whole or self._ended):
                if self._is_whole:
                    await send({"type": "http.response.body", "body": b""})
                return
