"""What a node's answer is: whether it can be passed on, may be held until it is whole, or is left for another."""

from __future__ import annotations

import asyncio
import functools
import re
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager

from lmkit.proxy.call import Call
from lmkit.proxy.registry import Node
from lmkit.web.resume import WHOLE_HEADER
from lmkit.web.upstream import Answer, BrokenError

MAX_WHOLE_BYTES = 1 << 20  # of an answer that is sent once it is whole
_EVENT = re.compile(rb"^(?:event: (\d{3})\n)?data: (.*)\n\n", re.MULTILINE)


def check_answer(answer: Answer) -> None:
    """Raise BrokenError for an answer that cannot be passed on.

    A length beside chunks says two things about where the body ends (RFC 9112, 6.3). A redirection would lead the
    client past the proxy. 401 and 407 mean the proxy's own key, not the client's.
    """
    status, headers = answer.status, answer.headers
    if b"content-length" in headers and b"transfer-encoding" in headers:
        raise BrokenError("content-length beside transfer-encoding")
    if not 200 <= status <= 599 or 300 <= status <= 399:
        raise BrokenError(f"status {status}")
    if status in (401, 407):
        raise BrokenError(f"status {status}: check the node's api_key")


def is_small(answer: Answer) -> bool:
    """Whether the answer is no stream, and short enough to be held until it is whole."""
    length = answer.headers.get(b"content-length", b"")
    streams = answer.headers.get(b"content-type", b"").lower().startswith(b"text/event-stream")
    return not streams and length.isdigit() and int(length) <= MAX_WHOLE_BYTES


def is_in_one(answer: Answer) -> bool:
    """Whether the node wrote an answer that is no stream as comments and one event, see `web.resume`."""
    return WHOLE_HEADER in answer.headers


def become_whole(answer: Answer, events: bytes) -> None:
    """Make the answer what its one event says. Raises BrokenError if there is none."""
    if (found := _EVENT.search(events)) is None:
        raise BrokenError("an answer without its event")
    answer.status = int(found[1] or answer.status)
    left_out = (b"content-type", b"cache-control", b"x-accel-buffering", b"content-length")
    fields = [(name, value) for name, value in answer.raw_headers if name.lower() not in left_out]
    answer.read_body = found[2]
    length = b"%d" % len(found[2])
    answer.raw_headers = (*fields, (b"content-type", b"application/json"), (b"content-length", length))


@asynccontextmanager
async def leaving_node(node: Node, call: Call, *, movable: bool) -> AsyncGenerator[asyncio.Timeout]:
    """Raises TimeoutError if the node is down, another could answer, and the call is `movable`; or at the limit."""
    async with asyncio.timeout(None) as limit:
        abandon = functools.partial(limit.reschedule, 0)  # a time that has passed
        if movable:
            node.waiting[abandon] = call.model
        try:
            yield limit
        finally:
            node.waiting.pop(abandon, None)
