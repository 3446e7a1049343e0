"""One client's connection: HTTP/1.1 by h11 and uvicorn, with a limit of time and work for each phase.

idle       KEEP_ALIVE_SECONDS between requests (uvicorn closes it) and before the first one (accept.py closes it)
head       HEAD_SECONDS for a head that has begun
body       its reader has a limit, see `receive.read_body`. SLICE events at a time, in turn with other connections
answer     WRITE_SECONDS in which the client must take WRITE_BYTES, if it lets the answer wait
closing    LINGER_SECONDS and LINGER_BYTES for a body that nobody reads: many clients look for the answer only after
           they have sent their body, and a socket that is closed with unread bytes resets the connection

The parser is h11 and not httptools: it can stop between two events, and says of each byte what it is. It takes 0.1 ms
for a request where httptools takes 4 us, and 8 us for an event of a stream (Zen 4). The first token takes 17 ms.
"""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import re
import select
import struct
import termios
from collections import deque
from collections.abc import Callable
from typing import Any

import h11
from starlette.types import ASGIApp, Receive, Scope, Send
from uvicorn.protocols.http.flow_control import HIGH_WATER_LIMIT, FlowControl
from uvicorn.protocols.http.h11_impl import STATUS_PHRASES, H11Protocol

from lmkit.errors import RequestError
from lmkit.web.errors import error_body, error_response

KEEP_ALIVE_SECONDS = 75  # longer than clients keep an idle connection, so that none is closed under a request
HEAD_SECONDS = 10.0
WRITE_SECONDS, WRITE_BYTES = 30.0, 1 << 10
LINGER_SECONDS, LINGER_BYTES = 2.0, 64 << 20
MAX_HEAD_BYTES, MAX_HEADERS = 16 << 10, 128  # of a request's target and headers
PACE_SECONDS = 0.01  # between two sends of an answer that is under way: each takes some 0.1 ms of a core
PIPELINED_BYTES = 1 << 16  # sent ahead of an answer and not read yet
ABSOLUTE = re.compile(rb"https?://([^/?]*)", re.IGNORECASE)  # the form of a request's target to a proxy
SLICE = 32  # parsed events, of which a body has one a chunk
# What servers read in different ways: a line that ends with LF alone, and one that goes on in the next (RFC 9112, 2.2
# and 5.2). One of them may see a second request where another sees a part of the first.
AMBIGUOUS = re.compile(rb"(?<!\r)\n|\n[ \t]")


class Turns:
    """Connections with unparsed bytes take turns: one slice in each round of the event loop."""

    def __init__(self) -> None:
        self._waiting: deque[Callable[[], None]] = deque()

    def add(self, turn: Callable[[], None]) -> None:
        if not self._waiting:
            asyncio.get_running_loop().call_soon(self._next)
        self._waiting.append(turn)

    def _next(self) -> None:
        turn = self._waiting.popleft()
        if self._waiting:
            asyncio.get_running_loop().call_soon(self._next)
        turn()


class Connection(H11Protocol):
    """`on_lost` is called at its end. `has_room` is False for a connection that may only ask for /health."""

    conn: _Parser
    flow: _Flow

    def __init__(self, *args: Any, turns: Turns, on_lost: Callable[[], None], has_room: bool, **options: Any) -> None:
        super().__init__(*args, **options)
        self.conn = _Parser(MAX_HEAD_BYTES)
        if not has_room:
            self.app = _only_health(self.app)  # type: ignore[assignment]
        self._turns, self._on_lost = turns, on_lost
        self._is_waiting = False  # for its turn
        self._head_since: float | None = None
        self._close_by: float | None = None  # set once the connection is to end
        self._num_dropped = 0
        self._progress = (0.0, 0)  # when, and how many bytes the client had taken by then

    @property
    def is_idle(self) -> bool:
        """No whole request is under way: the client has sent none, or has not sent all of its body."""
        return self.cycle is None or self.cycle.response_complete or self.conn.their_state is h11.SEND_BODY

    @property
    def is_ending(self) -> bool:
        return self._close_by is not None or self._socket.is_closing()

    def connection_made(self, transport: Any) -> None:
        super().connection_made(transport)
        self._socket, self._descriptor = transport, transport.get_extra_info("socket").fileno()
        self.transport = self._counted = _Transport(transport, self)  # type: ignore[assignment]
        self.flow = _Flow(transport)

    def data_received(self, data: bytes) -> None:
        if self._close_by is not None:
            self._num_dropped += len(data)
            if self._num_dropped > LINGER_BYTES:
                self._socket.abort()
            return
        self._unset_keepalive_if_required()
        self.conn.receive_data(data)
        if not self._is_waiting:
            self.handle_events()
        if self._head_since is None and self.conn.their_state is h11.IDLE:
            self._head_since = self.loop.time()

    def handle_events(self) -> None:
        """Parse one slice. If bytes remain, reading pauses until they had their turns."""
        self.conn.num_left = SLICE
        super().handle_events()
        if self.conn.their_state is not h11.IDLE:
            self._head_since = None
        if self.conn.num_left == 0 and not self._is_waiting and not self.is_ending:
            self._is_waiting = self.flow.is_held = True
            self.flow.pause_reading()
            self._turns.add(self._turn)

    def _turn(self) -> None:
        self._is_waiting = self.flow.is_held = False
        if self.is_ending:
            return
        self.handle_events()
        if not self._is_waiting and not self.is_ending and len(self.cycle.body) <= HIGH_WATER_LIMIT:
            self.flow.resume_reading()

    def send_400_response(self, msg: str) -> None:
        """The answer to a request that cannot be parsed."""
        error = RequestError("invalid_request", self.conn.complaint)
        body = error_body(error)
        headers = [("content-type", "application/json"), ("content-length", str(len(body))), ("connection", "close")]
        with contextlib.suppress(h11.LocalProtocolError):  # an answer is under way
            reason = STATUS_PHRASES[self.conn.status]
            head = h11.Response(status_code=self.conn.status, headers=headers, reason=reason)
            for event in (head, h11.Data(data=body)):
                self._counted.write(self.conn.send(event))
        if self.cycle is not None:
            self.cycle.disconnected = True
            self.cycle.message_event.set()
        self.close()

    def on_response_complete(self) -> None:
        self._counted.end_answer()
        if self.conn.their_state is h11.SEND_BODY:
            self.close()
        super().on_response_complete()

    def close(self) -> None:
        """End the connection once everything is sent."""
        if self.is_ending:
            return
        self._counted.flush()
        self._close_by = self.loop.time() + LINGER_SECONDS
        if self.conn.their_state not in (h11.SEND_BODY, h11.ERROR) and not self.conn.complaint:
            self._socket.close()
            return
        self.flow.is_held = False
        self.flow.resume_reading()
        if self._socket.can_write_eof():
            self._socket.write_eof()

    def drop(self) -> None:
        """End the connection now."""
        self._counted.flush()
        self._socket.close()

    def check(self, now: float) -> None:
        """End the connection if its phase has taken too long, or if the client has left while nothing is read."""
        self._counted.flush()
        if self._socket.get_write_buffer_size():
            since, taken = self._progress
            if not since:
                self._progress = now, self._num_taken()
            elif now - since > WRITE_SECONDS:
                self._progress = now, self._num_taken()
                if self._progress[1] - taken < WRITE_BYTES:
                    self._socket.abort()
            return
        self._progress = 0.0, 0
        if self._close_by is not None and now > self._close_by:
            self._socket.abort()
        elif self._head_since is not None and now - self._head_since > HEAD_SECONDS:
            self._socket.close()
        elif self.flow.read_paused and self._is_blocked():
            self._socket.abort()

    def _is_blocked(self) -> bool:
        """Whether the client has left, or sent so many requests ahead of an answer that its end cannot be seen."""
        if self.conn.their_state is h11.DONE and _in_kernel(self._descriptor, termios.FIONREAD) > PIPELINED_BYTES:
            return True
        return _has_left(self._descriptor)

    def _num_taken(self) -> int:
        """Bytes that the client has confirmed."""
        waiting: int = self._socket.get_write_buffer_size() + _in_kernel(self._descriptor, termios.TIOCOUTQ)
        return self._counted.num_written - waiting

    def connection_lost(self, exc: Exception | None) -> None:
        super().connection_lost(exc)
        self._unset_keepalive_if_required()
        self._on_lost()


class _Parser(h11.Connection):
    """h11's parser, which stops after `num_left` events and refuses more forms of a head.

    An answer before the end of the body says that the connection ends after it, so no client sends a request there.
    """

    def __init__(self, max_head_bytes: int) -> None:
        super().__init__(h11.SERVER, max_head_bytes)
        self._max_head_bytes = max_head_bytes
        self.num_left = SLICE
        self.status, self.complaint = 400, ""  # of the request that cannot be parsed

    def next_event(self) -> Any:
        if self.num_left == 0:
            return h11.NEED_DATA
        self.num_left -= 1
        try:
            if self.their_state is h11.IDLE:
                self._check_lines()
            event = super().next_event()
            if isinstance(event, h11.Request):
                self._check(event)
                event = _in_origin_form(event)
        except h11.RemoteProtocolError as error:
            self.status = error.error_status_hint if error.error_status_hint in (431, 505) else 400
            self.complaint = "this is not a valid HTTP request"
            if self.status == 431:
                self.complaint = f"the head exceeds {self._max_head_bytes} bytes or {MAX_HEADERS} headers"
            raise
        if event is h11.NEED_DATA or event is h11.PAUSED:
            self.num_left = max(1, self.num_left)
        return event

    def send_with_data_passthrough(self, event: h11.Event) -> list[bytes] | None:
        if isinstance(event, h11.Response) and self.their_state is h11.SEND_BODY:
            headers = [*event.headers, (b"connection", b"close")]
            event = h11.Response(status_code=event.status_code, headers=headers, reason=event.reason)
        return super().send_with_data_passthrough(event)

    def _check_lines(self) -> None:
        head, _, _ = self.trailing_data[0].partition(b"\r\n\r\n")
        if AMBIGUOUS.search(head):
            raise h11.RemoteProtocolError("a bare LF, or a line that is folded")

    def _check(self, request: h11.Request) -> None:
        if not request.http_version.startswith(b"1."):
            raise h11.RemoteProtocolError("another version: RFC 9110, 15.6.6", error_status_hint=505)
        size = len(request.target) + sum(len(name) + len(value) for name, value in request.headers)
        if size > self._max_head_bytes or len(request.headers) > MAX_HEADERS:
            raise h11.RemoteProtocolError("outsize head", error_status_hint=431)
        names = {name for name, _ in request.headers}
        if b"transfer-encoding" in names and (b"content-length" in names or request.http_version < b"1.1"):
            raise h11.RemoteProtocolError("two framings of one body: RFC 9112, 6.1 and 6.3")


def _in_origin_form(request: h11.Request) -> h11.Request:
    """A request whose target is a whole URL, as for a proxy, and its path alone otherwise (RFC 9112, 3.2.2)."""
    if (found := ABSOLUTE.match(request.target)) is None:
        return request
    path = request.target[found.end() :]
    headers = [(name, found[1] if name == b"host" else value) for name, value in request.headers]
    target = path if path.startswith(b"/") else b"/" + path
    return h11.Request(method=request.method, headers=headers, target=target, http_version=request.http_version)


class _Flow(FlowControl):
    """Reading stays paused as long as it `is_held`."""

    is_held = False

    def resume_reading(self) -> None:
        if not self.is_held:
            super().resume_reading()


class _Transport:
    """The transport as uvicorn uses it: closed by the connection, and its bytes are counted.

    What is written in one round of the event loop is sent at once: the head of an answer with its body. A stream whose
    events come faster than PACE_SECONDS sends several at once. Its first and its last ones do not wait.
    """

    def __init__(self, transport: asyncio.Transport, connection: Connection) -> None:
        self._transport, self._connection = transport, connection
        self.close, self.abort, self.resume_reading = connection.close, transport.abort, transport.resume_reading
        self.get_extra_info = transport.get_extra_info
        self.num_written = 0
        self._waiting: list[bytes] = []
        self._sent_at = 0.0

    def is_closing(self) -> bool:
        return self._connection.is_ending

    def write(self, data: bytes) -> None:
        self.num_written += len(data)
        if not self._waiting:
            loop = self._connection.loop
            wait = self._sent_at + PACE_SECONDS - loop.time()
            if wait > 0:
                loop.call_later(wait, self.flush)
            else:
                loop.call_soon(self.flush)
        self._waiting.append(data)

    def flush(self) -> None:
        if self._waiting:
            data, self._waiting = b"".join(self._waiting), []
            self._transport.write(data)
            self._sent_at = self._connection.loop.time()

    def end_answer(self) -> None:
        self.flush()
        self._sent_at = 0.0


def _has_left(descriptor: int) -> bool:
    """Whether the client has closed the connection, even if unread bytes hide its end."""
    poll = select.poll()
    poll.register(descriptor, select.POLLRDHUP)
    return bool(poll.poll(0))


def _in_kernel(descriptor: int, direction: int) -> int:
    """Bytes that wait in the kernel: unread ones (FIONREAD), or ones that the client has not confirmed (TIOCOUTQ)."""
    return int(struct.unpack("i", fcntl.ioctl(descriptor, direction, bytes(4)))[0])


def _only_health(app: ASGIApp) -> ASGIApp:
    async def refusing(scope: Scope, receive: Receive, send: Send) -> None:
        if scope["path"] == "/health":
            await app(scope, receive, send)
        else:
            await error_response(RequestError("overloaded", "too many connections; try again later"))(
                scope, receive, send
            )

    return refusing
