"""Reading from a client: bodies bounded in size and time, strict JSON, and work that a disconnect cancels."""

from __future__ import annotations

import asyncio
import codecs
import zlib
from collections.abc import Coroutine
from typing import Any, TypeVar

import msgspec
from starlette.types import Receive, Scope

from lmkit.errors import RequestError
from lmkit.web.budget import Share

T = TypeVar("T")


async def read_body(scope: Scope, receive: Receive, max_bytes: int, timeout: float, share: Share) -> bytes:
    """The whole body without a byte order mark; `timeout` is in seconds. `share` counts its bytes as they arrive.

    A body in gzip or deflate is unpacked, and the limits are those of what it holds.

    Raises RequestError: request_too_large, unsupported_media_type, overloaded, request_timeout or client_disconnected.
    A body of up to twice `max_bytes` is read before it is refused, because many clients read the response only after
    they have sent the body.
    """
    options = "--max-body of the server, max_body_bytes of a proxy"
    too_large = RequestError("request_too_large", f"the body is larger than {max_bytes} bytes, the limit: {options}")
    coding = dict(scope["headers"]).get(b"content-encoding", b"identity").strip().lower()
    if coding not in _CODINGS:
        raise RequestError("unsupported_media_type", "Content-Encoding: send the body plain, in gzip or in deflate")
    length = dict(scope["headers"]).get(b"content-length", b"")
    if length.isdigit() and int(length[:20]) > 2 * max_bytes:
        raise too_large
    body = bytearray()  # one piece of memory, which goes back to the system; many small ones would not
    size, more = 0, True
    try:
        async with asyncio.timeout(timeout) as limit:

            def end() -> None:
                body.clear()
                limit.reschedule(0)

            share.on_refusal = end
            while more:
                message = await receive()
                if message["type"] == "http.disconnect":
                    raise client_disconnected()
                size += len(message.get("body", b""))
                if size > 2 * max_bytes:
                    raise too_large
                if size <= max_bytes:
                    share.add(len(message.get("body", b"")))
                    body += message.get("body", b"")
                more = message.get("more_body", False)
    except TimeoutError:
        share.check()
        raise RequestError("request_timeout", f"the body did not arrive within {timeout:g} s") from None
    finally:
        share.on_refusal = None
    if size > max_bytes:
        raise too_large
    if (window := _CODINGS[coding]) is None:
        return bytes(body).removeprefix(codecs.BOM_UTF8)
    plain = _unpacked(body, window, max_bytes + 1)
    if len(plain) > max_bytes:
        raise too_large
    share.add(len(plain))
    return plain.removeprefix(codecs.BOM_UTF8)


# Content codings -> zlib's window bits: 47 reads the heads of gzip and zlib.
MAX_MEMBERS = 4  # of a gzip body: what follows each is copied
_CODINGS = {b"identity": None, b"": None, b"gzip": 47, b"x-gzip": 47, b"deflate": 47}


def _unpacked(body: bytearray, window: int, max_bytes: int) -> bytes:
    """At most `max_bytes` of what a packed body holds. Raises RequestError for a damaged one."""
    try:
        plain, rest = b"", bytes(body)
        for _ in range(MAX_MEMBERS):
            unpacker = zlib.decompressobj(window)
            plain += unpacker.decompress(rest, max_bytes - len(plain))
            if len(plain) < max_bytes and not unpacker.eof:
                raise zlib.error("it is cut off")
            if not (rest := unpacker.unused_data) or len(plain) >= max_bytes:
                return plain
        raise zlib.error(f"it has over {MAX_MEMBERS} members")
    except zlib.error as error:
        raise RequestError("invalid_request", f"the body is not of its Content-Encoding: {error}") from None


def decode_json(
    raw: bytes, type: Any = Any, *, mismatch: str = "the body is not valid JSON", param: str | None = None
) -> Any:
    """`raw` as a value of `type`. Raises RequestError if it is not.

    The text must be JSON in UTF-8; NaN, Infinity, numbers out of range and lone surrogates are refused. `mismatch`
    and `param` describe JSON that is not a `type`.
    """
    try:
        return msgspec.json.decode(raw, type=type)
    except msgspec.ValidationError as error:
        raise RequestError("invalid_request", f"{mismatch}: {error}", param) from None
    except RecursionError:
        reason = "it is nested too deeply"
    except ValueError as error:
        reason = str(error) if isinstance(error, msgspec.DecodeError) else "it is not UTF-8"
    raise RequestError("invalid_request", f"the body is not valid JSON: {reason}")


async def until_disconnect(receive: Receive) -> None:
    """Wait until the client closes the connection. The body must have been read."""
    while (await receive())["type"] != "http.disconnect":
        pass


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


def client_disconnected() -> RequestError:
    return RequestError("client_disconnected", "the client closed the connection")
