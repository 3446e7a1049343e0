"""Reading a request's body: bounded in size and time, strict JSON."""

from __future__ import annotations

import asyncio
from typing import TypeVar

import msgspec
from pydantic import BaseModel
from starlette.requests import ClientDisconnect, Request

from lmkit.errors import RequestError
from lmkit.serve.protocol import validate

BODY_SECONDS = 30.0

M = TypeVar("M", bound=BaseModel)


async def read_json(request: Request, model: type[M], max_bytes: int) -> M:
    """The body as `model`. Raises RequestError for anything that is not exactly that."""
    media_type = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    if media_type != "application/json":  # which also keeps other sites' pages from posting here without CORS
        raise RequestError("invalid_request", "send Content-Type: application/json")
    raw = await _read(request, max_bytes)
    try:
        data = msgspec.json.decode(raw)  # refuses NaN, Infinity, out-of-range numbers and lone surrogates
    except RecursionError:
        raise RequestError("invalid_request", "the JSON body is nested too deeply") from None
    except ValueError as error:
        reason = str(error) if isinstance(error, msgspec.DecodeError) else "not UTF-8"
        raise RequestError("invalid_request", f"the body is not valid JSON: {reason}") from None
    return validate(data, model)


async def _read(request: Request, max_bytes: int) -> bytes:
    error = RequestError("request_too_large", f"the body is larger than {max_bytes} bytes")
    length = request.headers.get("content-length", "")
    if length.isdecimal() and int(length[:20]) > max_bytes:
        raise error
    body = bytearray()
    try:
        async with asyncio.timeout(BODY_SECONDS):
            async for part in request.stream():
                body += part
                if len(body) > max_bytes:
                    raise error
    except TimeoutError:
        raise RequestError("request_timeout", f"the body did not arrive within {BODY_SECONDS:.0f} s") from None
    except ClientDisconnect:
        raise RequestError("client_disconnected", "the client closed the connection") from None
    return bytes(body)
