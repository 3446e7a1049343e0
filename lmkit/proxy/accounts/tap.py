"""Stands between an answer and its client: counts what it uses, and charges that before the client has the end."""

from __future__ import annotations

import math
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager

import msgspec
from starlette.types import Message, Send

from lmkit.errors import RequestError
from lmkit.proxy.accounts.account import Sizes, Usage, reserved
from lmkit.proxy.accounts.counts import reader_of
from lmkit.proxy.accounts.extent import Extent
from lmkit.proxy.accounts.ledger import Ledger, Refusal, Reservation
from lmkit.proxy.accounts.usage import Reader
from lmkit.proxy.downstream import DownstreamResponse
from lmkit.web.auth import ApiKey
from lmkit.web.counts import ANSWER, HEADER
from lmkit.web.form import Form
from lmkit.web.ollama import LINES
from lmkit.web.prompt_limit import HEADER as PROMPT_LIMIT

_STREAMS = (b"text/event-stream", LINES.encode())
_LIMIT_HEADERS = (b"x-ratelimit-", b"anthropic-ratelimit-")


class Tap:
    """An ASGI `send`. Without a reservation it only passes on."""

    def __init__(self, send: Send) -> None:
        self._send = send
        self._reservation: Reservation | None = None
        self._reader: Reader | None = None
        self._events = self._good = False
        self.usage: Usage | None = None  # what was charged

    def begin(self, reservation: Reservation, reader: Reader) -> None:
        self._reservation, self._reader = reservation, reader

    async def __call__(self, message: Message) -> None:
        if self._reservation is None or self._reader is None:
            await self._send(message)
            return
        if message["type"] == "http.response.start":
            message = self._start(message)
        elif self._good:
            piece = message.get("body", b"")
            if self._events:
                message = {**message, "body": self._reader.events(piece)}
            else:
                self._reader.whole(piece)
            if self._reader.done or not message.get("more_body", False):
                await self.end()
            elif not message["body"]:
                return
        await self._send(message)

    def _start(self, message: Message) -> Message:
        assert self._reservation is not None
        self._good = 200 <= message["status"] <= 299
        headers = [(name, value) for name, value in message["headers"] if not name.startswith(_LIMIT_HEADERS)]
        fields = dict(headers)
        self._events = fields.get(b"content-type", b"").partition(b";")[0].strip().lower() in _STREAMS
        if self._reader is not None:
            length = fields.get(b"content-length", b"")
            self._reader.length = int(length) if length.isdigit() and len(length) < 20 else -1
            self._reader.told_before(fields.get(ANSWER, b""))
        return {**message, "headers": [*headers, *self._reservation.headers()]}

    async def end(self, *, left: bool = False) -> None:
        """Settle the reservation, once. A request that no node has answered costs nothing, unless its client left."""
        reservation, self._reservation = self._reservation, None
        if reservation is None or self._reader is None:
            return
        if self._good or left:
            self.usage = self._reader.total(left=left)
            await reservation.settle(self.usage)
        else:
            reservation.release()


@asynccontextmanager
async def charged(
    ledger: Ledger | None,
    held: ApiKey | None,
    tap: Tap,
    response: DownstreamResponse,
    path: str,
    body: bytes,
    model: str,
    sizes: Sizes,
    form: Form | None = None,
) -> AsyncGenerator[tuple[bytes, list[tuple[bytes, bytes]]]]:
    """Reserve what a request may use, and charge what it has used at the end of the block.

    `sizes` are the model's, and `body` has the fields of a `form`. Yields the body that a node gets, and headers for
    it. Raises RequestError for a request that its key may not send now.
    """
    key = ledger.key(held) if ledger else None
    if ledger is None or key is None:
        yield body, []
        return
    asked = Extent(path, body, None if form is None else form.file)
    if asked.background not in (None, False):  # its answer comes before its tokens
        message = "a response in the background cannot be charged to a key of the key store"
        raise RequestError("permission_denied", message, "background")
    price = ledger.price(model)
    most = asked.allot(sizes, lambda prompt: ledger.room(key, price, prompt))
    is_limited = ledger.room(key, price, 0) < math.inf
    if is_limited and not asked.is_known:
        message = f"{path} does not say what it uses, and this key has a limit of tokens or money"
        raise RequestError("permission_denied", message)
    reader = reader_of(asked, path, most, asked.most_told(sizes.context), continuous=ledger.ask_usage)
    try:
        reservation = ledger.reserve(key, model, reserved(most, price), price)
    except Refusal as refusal:
        response.retry_after = refusal.after
        raise refusal.error from None
    added = reader.asking() | _priority(asked.priority, key.min_priority)
    asked.fields.update({name: msgspec.Raw(msgspec.json.encode(value)) for name, value in added.items()})
    tap.begin(reservation, reader)
    left = False
    try:
        yield asked.body(), [(HEADER, b"1"), *([(PROMPT_LIMIT, b"%d" % most.input)] if is_limited else [])]
    except RequestError as error:
        left = error.code == "client_disconnected"
        raise
    finally:
        await tap.end(left=left)


def _priority(asked: int | None, soonest: int) -> dict[str, int]:
    """The priority to set in a body that has none. Raises RequestError for one that the key may not have."""
    if asked is None:
        return {"priority": soonest} if soonest > 0 else {}
    if asked < soonest:
        message = f"priority={asked}: this API key may ask for {soonest} and more (lower is sooner)"
        raise RequestError("permission_denied", message, "priority")
    return {}
