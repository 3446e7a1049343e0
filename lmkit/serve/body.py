"""A request's JSON body as one of the protocol's models."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

from pydantic import BaseModel
from starlette.requests import Request

from lmkit.errors import RequestError
from lmkit.hints import begin
from lmkit.serve.choose import shared
from lmkit.serve.resume import resumption
from lmkit.strict import validate
from lmkit.web.access_log import note_ignored
from lmkit.web.budget import Share
from lmkit.web.receive import decode_json, read_body

BODY_SECONDS = 30.0

M = TypeVar("M", bound=BaseModel)


async def read_json(request: Request, model: type[M], translate: Callable[[Any], Any] | None = None) -> M:
    """The body as `model`, after `translate`. Its bytes count until the request ends. Raises RequestError otherwise."""
    media_type = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    if media_type != "application/json":  # this also keeps other sites' pages from posting here without CORS
        raise RequestError("invalid_request", "send Content-Type: application/json")
    server = shared(request)
    raw = await read_raw(request, request.state.held.enter_context(server.bodies.share()))
    request.state.resumption, raw = resumption(request, raw)
    data = await server.hooks.before(request.scope["path"], decode_json(raw))
    found = begin(is_strict=server.config.strict_fields, told=server.metrics.ignored)
    note_ignored(request.scope, found)
    return validate(data if translate is None else translate(data), model)


async def read_raw(request: Request, share: Share) -> bytes:
    """The body, whose bytes `share` counts. Raises RequestError."""
    most = shared(request).config.max_body_bytes
    return await read_body(request.scope, request.receive, most, BODY_SECONDS, share)
