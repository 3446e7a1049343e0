"""Stored answers of chats (`store: true`), as OpenAI has them: the routes below /v1/chat/completions.

They lie in the store of responses, beside those of /v1/responses.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple, cast

import msgspec
from fastapi import APIRouter, Request, Response

from lmkit.errors import RequestError
from lmkit.serve.auth import owner
from lmkit.serve.body import read_json
from lmkit.serve.protocol import Metadata
from lmkit.strict import Strict
from lmkit.text.chat.conversation import ChatMessage
from lmkit.text.messages import ImagePart
from lmkit.web.listing import LABEL, chosen, listed, page, query, reply
from lmkit.web.response_store import ResponseStore, Stored, labelled

PREFIX = "chatcmpl-"  # of an id; no other route below has it
LIST_PATH = "/v1/chat/completions"
PATH = f"{LIST_PATH}/{PREFIX}{{id}}"
PAGE, LONGEST_PAGE = 20, 100
PAGED = ("after", "limit", "order")
router = APIRouter()


class UpdateRequest(Strict):
    takes_hints = False

    metadata: Metadata | None


class StoredChats(NamedTuple):
    """The answers of one owner."""

    store: ResponseStore
    owner: str

    async def put(self, id: str, messages: list[ChatMessage], answer: bytes) -> bool:
        """Keep an answer, which is JSON. False if there is no room for it."""
        asked = [_message(f"{id}-{idx}", message) for idx, message in enumerate(messages)]
        return await self.store.put(self.owner, Stored(id, None, msgspec.json.encode(asked), answer))

    async def get(self, id: str) -> Stored:
        """Raises RequestError if there is none."""
        found = await self.store.get(self.owner, PREFIX + id)
        if found is None:
            raise RequestError("not_found", f"there is no stored chat {PREFIX + id[:64]!r}", "completion_id")
        return found


def stored_chats(request: Request) -> StoredChats:
    found = owner(request)
    return StoredChats(cast(ResponseStore, request.app.state.responses), f"{found.tenant}:{found.salt}")


@router.get(LIST_PATH)
async def list_chats(request: Request) -> Response:
    labels = {label[1]: name for name in request.query_params if (label := LABEL.fullmatch(name))}
    params: Mapping[str, str] = {"order": "asc", **query(request, (*PAGED, "model", *labels.values()))}
    chats = stored_chats(request)
    metadata = {label: params[name] for label, name in labels.items()}
    ids = await chats.store.ids(chats.owner, PREFIX, params.get("model"), metadata)
    shown, has_more = chosen([{"id": id} for id in ids], params, PAGE, LONGEST_PAGE)
    stored = [await chats.store.get(chats.owner, item["id"]) for item in shown]
    return listed([msgspec.json.decode(one.response) for one in stored if one is not None], has_more)


@router.get(PATH)
async def retrieve(id: str, request: Request) -> Response:
    query(request, ())
    return _shown((await stored_chats(request).get(id)).response)


@router.post(PATH)
async def update(id: str, request: Request) -> Response:
    body = await read_json(request, UpdateRequest)
    chats = stored_chats(request)
    await chats.get(id)
    if not await chats.store.change(chats.owner, PREFIX + id, labelled(body.metadata or {})):
        raise RequestError("overloaded", "the labels cannot be stored")
    return _shown((await chats.get(id)).response)


@router.delete(PATH)
async def delete(id: str, request: Request) -> Response:
    chats = stored_chats(request)
    await chats.get(id)
    await chats.store.delete(chats.owner, PREFIX + id)
    return reply({"object": "chat.completion.deleted", "id": PREFIX + id, "deleted": True})


@router.get(f"{PATH}/messages")
async def messages(id: str, request: Request) -> Response:
    params = {"order": "asc", **query(request, PAGED)}
    return page(msgspec.json.decode((await stored_chats(request).get(id)).input), params, PAGE, LONGEST_PAGE)


def _message(id: str, message: ChatMessage) -> dict[str, Any]:
    """A message of the prompt as OpenAI lists it. `content` is its text, `content_parts` are texts and images."""
    parts = list(map(_part, message.parts)) or None
    return {"id": id, **message.model_dump(mode="json", exclude_none=True), "content_parts": parts}


def _part(part: str | ImagePart) -> dict[str, Any]:
    if isinstance(part, str):
        return {"type": "text", "text": part}
    kind = f"{part.mark}_url"
    fps = {"fps": part.fps} if part.fps else {}
    return {"type": kind, kind: {"url": part.source, "detail": part.detail} | fps}


def _shown(answer: bytes) -> Response:
    return Response(answer, media_type="application/json")
