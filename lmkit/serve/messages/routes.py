"""Anthropic's Messages API: /v1/messages and /v1/messages/count_tokens."""

from __future__ import annotations

import msgspec
from fastapi import APIRouter, Request, Response

from lmkit.errors import RequestError
from lmkit.serve.auth import owner
from lmkit.serve.body import read_json
from lmkit.serve.choose import choose
from lmkit.serve.messages.answer import MessagesAnswer
from lmkit.serve.messages.protocol import NAMES, MessagesRequest, Prompt
from lmkit.serve.messages.translate import to_chat
from lmkit.serve.response import answer
from lmkit.serve.translated import num_prompt_tokens

# They differ in what they refuse; this server takes in both what either does.
VERSIONS = ("2023-06-01", "2026-10-21")
router = APIRouter()


@router.post("/v1/messages")
async def messages(request: Request) -> Response:
    _check_version(request)
    body = await read_json(request, MessagesRequest)
    request.state.user = body.metadata.user_id if body.metadata else None
    server = await choose(request, body.model)
    chat = to_chat(body)
    share = request.state.held.enter_context(server.answers.share())
    return await answer(request, MessagesAnswer(server, chat, owner(request), share, body))


@router.post("/v1/messages/count_tokens")
async def count_tokens(request: Request) -> Response:
    _check_version(request)
    body = await read_json(request, Prompt)
    number = await num_prompt_tokens(request, to_chat(body), NAMES)
    return Response(msgspec.json.encode({"input_tokens": number}), media_type="application/json")


def _check_version(request: Request) -> None:
    version = request.headers.get("anthropic-version", VERSIONS[0])
    if version not in VERSIONS:
        message = f"anthropic-version: {version[:64]!r} is not supported; send {' or '.join(VERSIONS)}"
        raise RequestError("invalid_request", message)
