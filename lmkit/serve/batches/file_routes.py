"""/v1/files: upload, list, describe, download, delete."""

from __future__ import annotations

import asyncio
import re
from contextlib import suppress
from typing import Literal
from urllib.parse import urlsplit

from fastapi import APIRouter, Request, Response
from starlette.responses import FileResponse

from lmkit.errors import RequestError
from lmkit.serve.auth import owner
from lmkit.serve.batches.files import FILE_SECONDS, File
from lmkit.serve.batches.runner import Batches, batches
from lmkit.serve.batches.upload import Form, receive_form
from lmkit.serve.choose import shared
from lmkit.web.listing import page, query, reply

PURPOSE: Literal["batch"] = "batch"
EXPIRY_SECONDS = (3600, FILE_SECONDS)
LIMIT = 10_000  # of a page
# The schemas of OpenAI's `expires_after`
ANCHOR = {"const": "created_at"}
SECONDS = {"type": "integer", "minimum": EXPIRY_SECONDS[0], "maximum": EXPIRY_SECONDS[1]}

router = APIRouter()


@router.post("/v1/files")
async def upload(request: Request) -> Response:
    store, mine, config = batches(request), _owner(request), shared(request).config
    check_origin(request, config.cors_origins)
    files = store.files
    files.check_number(mine)
    file_id, reserved = files.new_id(), 0

    def reserve(num_bytes: int) -> None:
        nonlocal reserved
        reserved += num_bytes
        files.reserve(mine, num_bytes)

    try:
        form = await receive_form(request.scope, request.receive, files.path(file_id), config.max_file_bytes, reserve)
        seconds = _checked(form)
        file = files.make(file_id, mine, PURPOSE, form.filename or "", seconds)
        if file.bytes > config.max_file_bytes:
            raise RequestError("request_too_large", f"the file is larger than {config.max_file_bytes} bytes", "file")
        await asyncio.to_thread(files.add, file)
    except BaseException:
        with suppress(OSError):
            files.delete(file_id)
        raise
    finally:
        files.reserve(mine, -reserved)
    return reply(file.shown())


def _checked(form: Form) -> int:
    """The seconds for which the file is kept. Raises RequestError for a field that is not honoured."""
    fields = dict(form.fields)
    purpose = fields.pop("purpose", None)
    if purpose != PURPOSE:
        given = "is missing" if purpose is None else f"{purpose[:64]!r} is not supported"
        raise RequestError("invalid_request", f"purpose {given}; this server keeps files for batches: batch", "purpose")
    anchor, seconds = fields.pop("expires_after[anchor]", None), fields.pop("expires_after[seconds]", None)
    if fields:
        name = next(iter(fields))[:64]
        raise RequestError("unknown_parameter", f"unknown field {name!r} of the form", name)
    if anchor is None and seconds is None:
        return FILE_SECONDS
    return checked_expiry(anchor, seconds)


def checked_expiry(anchor: object, seconds: object) -> int:
    """OpenAI's `expires_after`, whose parts may be texts. Raises RequestError."""
    least, most = EXPIRY_SECONDS
    if anchor != "created_at" or not re.fullmatch("[0-9]{1,9}", str(seconds)) or not least <= int(str(seconds)) <= most:
        message = f"expires_after: expected anchor created_at, and seconds from {least} to {most}"
        raise RequestError("invalid_request", message, "expires_after")
    return int(str(seconds))


@router.get("/v1/files")
async def list_files(request: Request) -> Response:
    params = query(request, ("purpose", "order", "limit", "after"))
    files = [file.shown() for file in batches(request).files.of(_owner(request))]
    purpose = params.get("purpose")
    return page([file for file in files if purpose in (None, file["purpose"])], params, LIMIT, LIMIT)


@router.get("/v1/files/{file_id}")
async def get_file(file_id: str, request: Request) -> Response:
    return reply(_file(request, file_id).shown())


@router.get("/v1/files/{file_id}/content")
async def get_content(file_id: str, request: Request) -> Response:
    path = batches(request).files.path(_file(request, file_id).id)
    return FileResponse(path, media_type="application/octet-stream")


@router.delete("/v1/files/{file_id}")
async def delete_file(file_id: str, request: Request) -> Response:
    store, file = batches(request), _file(request, file_id)
    if user := store.user_of(file.id):
        raise RequestError("invalid_request", f"{user} reads this file; cancel it first", "file_id")
    await asyncio.to_thread(store.files.delete, file.id)
    return reply({"id": file.id, "object": "file", "deleted": True})


def _file(request: Request, file_id: str) -> File:
    store: Batches = batches(request)
    return store.files.get(_owner(request), file_id)


def _owner(request: Request) -> str:
    mine = owner(request)
    return mine.own(mine.tenant)


def check_origin(request: Request, allowed: tuple[str, ...]) -> None:
    """A page of another site can post a form without asking (CORS). Browsers say where such a form comes from."""
    origin = request.headers.get("origin")
    if origin is not None and origin not in allowed and urlsplit(origin).netloc != request.headers.get("host"):
        raise RequestError("permission_denied", "pages of this origin may not send files to this server")
