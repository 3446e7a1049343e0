"""The client's side of one exchange: what it has been sent so far, and how an error is told at each point."""

from __future__ import annotations

import re
from collections.abc import Iterable

import msgspec
from starlette.types import Message, Send

from lmkit.errors import RequestError

_EVENT_END = re.compile(rb"(?:\r\n|\n|\r(?!\n))(?:\r\n|\n|\r)")  # a line's end and an empty line (HTML, 9.2.5)
_KINDS = {401: "authentication_error", 403: "permission_error"}


def error_body(error: RequestError) -> bytes:
    """OpenAI's error envelope."""
    kind = _KINDS.get(error.status, "invalid_request_error" if error.status < 500 else "server_error")
    fields = {"message": error.message, "type": kind, "param": error.param, "code": error.code}
    return msgspec.json.encode({"error": fields})


class WholeEvents:
    """Lets server-sent events through whole: the bytes stay the same, only the cuts between pieces move.

    What breaks off in the middle of an event can so be dropped, and an error event put in its place.
    """

    MAX_HELD = 1 << 20  # bytes of one event; a longer one is let through in parts

    def __init__(self) -> None:
        self._held = b""
        self.inside = False  # part of an event is already through

    def feed(self, data: bytes) -> bytes:
        """Add a piece; returns what is whole by now."""
        start = max(0, len(self._held) - 3)  # an event's end may have begun in the last piece
        self._held += data
        end = 0
        for match in _EVENT_END.finditer(self._held, start):
            end = match.end()
        if end:
            self.inside = False
        elif len(self._held) > self.MAX_HELD:
            self.inside, end = True, len(self._held)
        whole, self._held = self._held[:end], self._held[end:]
        return whole

    def rest(self) -> bytes:
        rest, self._held = self._held, b""
        return rest


class Answer:
    """Wraps an ASGI `send`. A begun answer ends with `end`, or with `break_off` so that the client notices."""

    def __init__(self, send: Send, retry_after: float = 1.0) -> None:
        self._send = send
        self._retry_after = max(1, round(retry_after))
        self._events: WholeEvents | None = None
        self.started = False
        self.finished = False

    async def send(self, message: Message) -> None:
        """ASGI send. Raises RequestError client_disconnected where the server tells that the client has left."""
        if message["type"] == "http.response.start":
            self.started = True
        elif message["type"] == "http.response.body" and not message.get("more_body", False):
            self.finished = True
        try:
            await self._send(message)
        except OSError:
            self.finished = True
            raise RequestError("client_disconnected", "the client left") from None

    async def start(self, status: int, headers: Iterable[tuple[bytes, bytes]], *, events: bool = False) -> None:
        """Begin a streamed answer; `events`: its body is server-sent events."""
        self._events = WholeEvents() if events else None
        await self.send({"type": "http.response.start", "status": status, "headers": list(headers)})

    async def write(self, data: bytes) -> None:
        piece = data if self._events is None else self._events.feed(data)
        if piece:
            await self.send({"type": "http.response.body", "body": piece, "more_body": True})

    async def end(self) -> None:
        rest = b"" if self._events is None else self._events.rest()
        await self.send({"type": "http.response.body", "body": rest})

    async def break_off(self, error: RequestError) -> None:
        """Tell an error: as the whole answer, as a last event, or, inside another body, by leaving it incomplete
        (the server then closes the connection, which no client takes for the end)."""
        if self.finished:
            return
        if not self.started:
            await self.whole(error.status, error_body(error), headers=self._error_headers(error))
        elif self._events is not None:
            separator = b"\n\n" if self._events.inside else b""
            await self.send({"type": "http.response.body", "body": separator + b"data: " + error_body(error) + b"\n\n"})

    async def whole(self, status: int, body: bytes, content_type: str = "application/json",
                    headers: Iterable[tuple[bytes, bytes]] = ()) -> None:  # fmt: skip
        """Send a complete answer."""
        head = [(b"content-type", content_type.encode()), (b"content-length", str(len(body)).encode()), *headers]
        await self.send({"type": "http.response.start", "status": status, "headers": head})
        await self.send({"type": "http.response.body", "body": body})

    def _error_headers(self, error: RequestError) -> list[tuple[bytes, bytes]]:
        headers = []
        if error.status == 401:
            headers.append((b"www-authenticate", b"Bearer"))
        if error.status == 503:
            headers.append((b"retry-after", str(self._retry_after).encode()))
        if error.status in (408, 413):  # what is left of the body is not read
            headers.append((b"connection", b"close"))
        return headers
