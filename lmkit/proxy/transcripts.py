"""Copies of stored responses, so that a conversation goes on at another node when the one that keeps it is down.

With a folder for data, the proxy keeps the input of each request for a response that is stored, and the response. The
items of a conversation then take the place of `previous_response_id`, for a node of any make.
"""

from __future__ import annotations

from typing import Any

import msgspec

from lmkit.errors import JSON_ERRORS
from lmkit.proxy.asked import Asked
from lmkit.web.auth import tenant_of
from lmkit.web.data_folder import DataFolder
from lmkit.web.response_store import ResponseStore, Stored
from lmkit.web.sse import EventData

MAX_BYTES, TTL = 256 << 20, 30 * 86400.0  # as a server's own store
MAX_STREAM_BYTES = 16 << 20  # a longer stream is not kept
ENDED = {"completed", "incomplete"}


class _Response(msgspec.Struct):
    id: str
    status: str = ""
    store: bool = True
    output: list[msgspec.Raw] = []


class _Event(msgspec.Struct):
    type: str
    response: msgspec.Raw = msgspec.Raw()


class Transcripts:
    """Rows belong to one client each. `owner_of` says to whom."""

    def __init__(self, folder: str, max_bytes: int) -> None:
        """A conversation of more than `max_bytes` does not go on.

        Raises ConfigError for a folder that is not private, or that another process uses.
        """
        self._data, self._max_bytes = DataFolder(folder), max_bytes
        self.store = ResponseStore(lambda: self._data.folder("responses"), max_bytes=MAX_BYTES, ttl=TTL)

    def close(self) -> None:
        self._data.close()

    def recorder(self, owner: str, asked: Asked) -> Recorder:
        return Recorder(self.store, owner, asked)

    async def resolved(self, owner: str, id: str, body: bytes) -> bytes | None:
        """The body with the conversation before its input. None if some of the conversation is not here.

        Raises RequestError for a conversation that is too large.
        """
        chain = await self.store.chain(owner, id, self._max_bytes)
        if not chain:
            return None
        items = list[Any]()
        for stored in chain:
            items += [*_items(stored.input), *msgspec.json.decode(stored.response, type=_Response).output]
        fields = msgspec.json.decode(body, type=dict[str, msgspec.Raw])
        del fields["previous_response_id"]
        items += _items(bytes(fields.get("input", b"[]")))
        return msgspec.json.encode(fields | {"input": msgspec.Raw(msgspec.json.encode(items))})


class Recorder:
    """Watches the answer to one request, and keeps it before the client has its end."""

    def __init__(self, store: ResponseStore, owner: str, asked: Asked) -> None:
        self._store, self._owner, self._asked = store, owner, asked
        self._events, self._num_bytes = EventData(), 0

    async def whole(self, body: bytes) -> None:
        try:
            response = msgspec.json.decode(body, type=_Response)
        except JSON_ERRORS:
            return
        if response.status in ENDED and response.store:
            previous = self._asked.previous_response_id
            stored = Stored(
                response.id, previous if isinstance(previous, str) else None, bytes(self._asked.input), body
            )
            await self._store.put(self._owner, stored)

    async def events(self, piece: bytes) -> None:
        self._num_bytes += len(piece)
        if self._num_bytes > MAX_STREAM_BYTES:
            return
        for data in self._events.feed(piece):
            if b'"response.completed"' in data or b'"response.incomplete"' in data:
                try:
                    event = msgspec.json.decode(data, type=_Event)
                except JSON_ERRORS:
                    continue
                if event.type.removeprefix("response.") in ENDED:
                    await self.whole(bytes(event.response))


def owner_of(key: str, client: str) -> str:
    """The name under which a client's responses are kept. Its key cannot be told from it."""
    return tenant_of(key, client) if key or client else ""


def _items(given: bytes) -> list[Any]:
    """The items of an input, which may be a text."""
    value: str | list[Any] = msgspec.json.decode(given, type=str | list[msgspec.Raw])
    return [{"type": "message", "role": "user", "content": value}] if isinstance(value, str) else value
