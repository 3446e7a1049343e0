"""One connection to a server: a request at a time, and its answer with what may go wrong."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

from lmkit.web.http1 import MAX_HEAD_BYTES, Body, Head, MalformedError, read_head

PIECE_BYTES = 64 << 10  # a body larger than this is sent in such pieces, with other work between them
MAX_UNREAD_BYTES = 128 << 10  # of an answer; with more, nothing is read until they are taken
MAX_INTERIM = 16  # answers 1xx before the answer


class UpstreamError(Exception):
    """A request to a server failed. The text gives the reason, and never quotes the server or the client."""


class UnreachableError(UpstreamError):
    """There is no connection to the server, so it has not seen the request."""


class SilentError(UpstreamError):
    """The server sent nothing for too long."""


class BrokenError(UpstreamError):
    """The server gave no answer that can be read, or broke off within one."""


class Channel(asyncio.Protocol):
    """`silence` are the seconds in which the server must take or send a byte while one is waited for."""

    def __init__(self, silence: float, on_lost: Callable[[Channel], None]) -> None:
        self._silence, self._on_lost = silence, on_lost
        self._loop = asyncio.get_running_loop()
        self._transport: Any = None
        self._waiter: asyncio.Future[None] | None = None
        self._timer: asyncio.TimerHandle | None = None
        self._since = 0.0  # the last byte in either direction, or the beginning of the wait for one
        self._writable: asyncio.Future[None] | None = None
        self._sending: asyncio.Task[None] | None = None
        self._is_paused = self._is_asked = False
        self._method, self._held, self._num_interim = "", b"", 0
        self._head: Head | None = None
        self._body: Body | None = None
        self._pieces, self._num_unread = list[bytes](), 0
        self._failure: UpstreamError | None = None
        self.is_lost = False
        self.idle_since = 0.0
        self.num_exchanges = 0

    # what users of the channel call

    async def ask(self, method: str, head: bytes, body: bytes) -> Head:
        """Send a request and wait for the head of its answer. Raises SilentError and BrokenError."""
        self._method, self._is_asked = method, True
        self._head = self._body = None
        self._held, self._num_interim = b"", 0
        self.num_exchanges += 1
        if len(body) <= PIECE_BYTES:
            self._transport.write(head + body)
        else:
            self._sending = self._loop.create_task(self._send(head, memoryview(body)))
        while self._head is None:
            self._raise()
            await self._wait()
        return self._head

    @property
    def has_begun(self) -> bool:
        """Bytes of the answer have come."""
        return bool(self._held) or self._num_interim > 0 or self._head is not None

    @property
    def is_whole(self) -> bool:
        return self._body is not None and self._body.is_whole

    async def piece(self) -> bytes:
        """The bytes of the body that have come, at least one; none at its end. Raises SilentError and BrokenError."""
        assert self._body is not None
        while not self._pieces:
            if self._body.is_whole:
                return b""
            self._raise()
            await self._wait()
        data = self._pieces[0] if len(self._pieces) == 1 else b"".join(self._pieces)
        self._pieces.clear()
        self._num_unread = 0
        if self._is_paused and not self.is_lost:
            self._is_paused = False
            self._transport.resume_reading()
        return data

    def release(self) -> bool:
        """The exchange is over. True: the channel can be used again. Otherwise it is closed."""
        body, sending, self._sending = self._body, self._sending, None
        if (
            body is None or not body.is_whole or body.is_overrun or self._head is None or self._head.is_last
            or self._failure or self.is_lost or (sending is not None and not sending.done())
        ):  # fmt: skip
            if sending is not None:
                sending.cancel()
            self._transport.abort()
            return False
        self._pieces.clear()
        self._num_unread = 0
        self._is_asked = False
        if self._is_paused:
            self._is_paused = False
            self._transport.resume_reading()
        return True

    def close(self) -> None:
        """Close a channel that is not in use."""
        self._transport.close()

    # waiting

    def _raise(self) -> None:
        if self._failure is not None:
            raise type(self._failure)(*self._failure.args)

    async def _wait(self) -> None:
        self._since = self._loop.time()
        if self._timer is None:
            self._timer = self._loop.call_later(self._silence, self._check)
        self._waiter = self._loop.create_future()
        try:
            await self._waiter
        finally:
            self._waiter = None

    def _check(self) -> None:
        """End the wait if the server has been silent. The timer is not set anew for each byte: those are many."""
        self._timer = None
        if self._waiter is None:
            return
        left = self._since + self._silence - self._loop.time()
        if left > 0:
            self._timer = self._loop.call_later(left, self._check)
        elif self._sending is not None and not self._sending.done():
            self._fail(SilentError("it does not read the request"))
        else:
            self._fail(SilentError("it sends nothing"))

    def _wake(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)

    def _fail(self, failure: UpstreamError) -> None:
        self._failure = self._failure or failure
        self._transport.abort()
        self._wake()

    async def _send(self, head: bytes, body: memoryview) -> None:
        self._transport.write(head)
        for start in range(0, len(body), PIECE_BYTES):
            self._transport.write(body[start : start + PIECE_BYTES])
            self._since = self._loop.time()
            if self._writable is not None:
                await self._writable
            if self.is_lost:
                return
            self._since = self._loop.time()
            await asyncio.sleep(0)

    # what the transport calls

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = transport

    def data_received(self, data: bytes) -> None:
        self._since = self._loop.time()
        try:
            if not self._is_asked:
                raise MalformedError("bytes without a request")
            if self._body is None:
                data = self._heads(data)
            if self._body is not None and (data or self._body.is_whole):
                self._pieces += (pieces := self._body.feed(data))
                self._num_unread += sum(map(len, pieces))
        except MalformedError as error:
            self._fail(BrokenError(str(error)))
            return
        if self._num_unread > MAX_UNREAD_BYTES and not self._is_paused:
            self._is_paused = True
            self._transport.pause_reading()
        self._wake()

    def _heads(self, data: bytes) -> bytes:
        """Read heads until there is one of an answer. Returns the bytes after it."""
        start = max(0, len(self._held) - 3)
        self._held += data
        while (end := self._held.find(b"\r\n\r\n", start)) >= 0:
            head, rest, start = read_head(self._held[:end]), self._held[end + 4 :], 0
            if head.status >= 200:
                self._body = Body(head, self._method)
                self._head = head
                return rest
            self._num_interim += 1
            if head.status == 101 or self._num_interim > MAX_INTERIM:
                raise MalformedError(f"status {head.status}")
            self._held = rest
        if len(self._held) > MAX_HEAD_BYTES:
            raise MalformedError("a head that does not end")
        return b""

    def pause_writing(self) -> None:
        self._writable = self._loop.create_future()

    def resume_writing(self) -> None:
        if self._writable is not None and not self._writable.done():
            self._writable.set_result(None)
        self._writable = None

    def connection_lost(self, exc: Exception | None) -> None:
        self.is_lost = True
        if self._timer is not None:
            self._timer.cancel()
        if self._is_asked and self._body is not None and self._body.ends_with_connection and exc is None:
            self._body.is_whole = True
        self._failure = self._failure or BrokenError(type(exc).__name__ if exc else "the connection was closed")
        self.resume_writing()
        self._wake()
        self._on_lost(self)
