"""A request's JSON body as one of the protocol's models."""

from __future__ import annotations

from typing import TypeVar

from pydantic import BaseModel
from starlette.requests import Request

from lmkit.errors import RequestError
from lmkit.serve.protocol import validate
from lmkit.web.receive import decode_json, read_body

BODY_SECONDS = 30.0

M = TypeVar("M", bound=BaseModel)


async def read_json(request: Request, model: type[M], max_bytes: int) -> M:
    """The body as `model`. Raises RequestError for anything that is not exactly that."""
    media_type = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    if media_type != "application/json":  # this also keeps other sites' pages from posting here without CORS
        raise RequestError("invalid_request", "send Content-Type: application/json")
    raw = await read_body(request.scope, request.receive, max_bytes, BODY_SECONDS)
    return validate(decode_json(raw), model)
