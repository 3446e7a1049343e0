"""/v1/batches: create, list, describe, cancel."""

from __future__ import annotations

import re
from typing import Annotated, Any

from fastapi import APIRouter, Request, Response
from pydantic import Field, WithJsonSchema

from lmkit.errors import RequestError
from lmkit.serve.auth import owner
from lmkit.serve.batches.batch import ENDPOINTS
from lmkit.serve.batches.file_routes import ANCHOR, SECONDS, checked_expiry
from lmkit.serve.batches.files import FILE_SECONDS
from lmkit.serve.batches.runner import batches
from lmkit.serve.body import read_json
from lmkit.strict import Strict
from lmkit.web.listing import page, query, reply

MAX_WINDOW_HOURS = 14 * 24
WINDOW = "^([1-9][0-9]?|[12][0-9]{2}|3[0-2][0-9]|33[0-6])h$"
Metadata = dict[Annotated[str, Field(max_length=64)], Annotated[str, Field(max_length=512)]]

router = APIRouter()


class OutputExpiry(Strict):
    takes_hints = False

    anchor: Annotated[str, WithJsonSchema(ANCHOR)]
    seconds: Annotated[int, WithJsonSchema(SECONDS)]


class BatchRequest(Strict):
    takes_hints = False

    input_file_id: Annotated[str, Field(max_length=64)]
    endpoint: Annotated[str, WithJsonSchema({"enum": list(ENDPOINTS)})]
    # as 24h, at most MAX_WINDOW_HOURS
    completion_window: Annotated[str, WithJsonSchema({"type": "string", "pattern": WINDOW})]
    metadata: Annotated[Metadata, Field(max_length=16)] | None = None
    output_expires_after: OutputExpiry | None = None


@router.post("/v1/batches")
async def create(request: Request) -> Response:
    store, mine = batches(request), owner(request)
    body = await read_json(request, BatchRequest)
    if body.endpoint not in ENDPOINTS:
        raise _invalid(f"endpoint: expected one of {', '.join(ENDPOINTS)}", "endpoint")
    hours = re.fullmatch(WINDOW, body.completion_window)
    if not hours:
        raise _invalid(f"completion_window: expected hours, as 24h, at most {MAX_WINDOW_HOURS}h", "completion_window")
    kept = body.output_expires_after
    kept_seconds = checked_expiry(kept.anchor, kept.seconds) if kept else FILE_SECONDS
    file = store.files.get(mine.own(mine.tenant), body.input_file_id)
    if file.purpose != "batch":
        raise _invalid("input_file_id: expected a file with the purpose batch", "input_file_id")
    batch = await store.create(
        mine,
        3600 * int(hours[1]),
        kept_seconds,
        endpoint=body.endpoint,
        input_file_id=body.input_file_id,
        completion_window=body.completion_window,
        metadata=body.metadata,
    )
    return reply(batch.shown())


@router.get("/v1/batches")
async def list_batches(request: Request) -> Response:
    found: list[dict[str, Any]] = [batch.shown() for batch in batches(request).of(owner(request))]
    return page(found, query(request, ("limit", "after")), 20, 100)


@router.get("/v1/batches/{batch_id}")
async def get_batch(batch_id: str, request: Request) -> Response:
    return reply(batches(request).get(owner(request), batch_id).shown())


@router.post("/v1/batches/{batch_id}/cancel")
async def cancel(batch_id: str, request: Request) -> Response:
    store = batches(request)
    batch = store.get(owner(request), batch_id)
    await store.cancel(batch)
    return reply(batch.shown())


def _invalid(message: str, param: str) -> RequestError:
    return RequestError("invalid_request", message, param)
