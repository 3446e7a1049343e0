"""OpenAI's conversations: lists of items that responses go on with and add to. They lie in the store of responses."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, cast

import msgspec
from fastapi import APIRouter, Request, Response

from lmkit.errors import RequestError
from lmkit.serve.auth import owner
from lmkit.serve.body import read_json
from lmkit.serve.protocol import Metadata
from lmkit.serve.responses.protocol import Items, with_id
from lmkit.serve.serving import new_id
from lmkit.strict import LAZY, Nullable, Strict
from lmkit.web.listing import page, query, reply
from lmkit.web.response_store import ResponseStore, Stored, labelled

PREFIX = "conv_"
PATH = "/v1/conversations"
ITEM_PATH = f"{PATH}/{{id}}/items/{{item_id}}"
PAGE, LONGEST_PAGE = 20, 100
Item = dict[str, Any]
router = APIRouter()


class CreateRequest(Nullable):
    model_config = LAZY

    items: Items = []
    metadata: Metadata = {}


class UpdateRequest(Strict):
    takes_hints = False

    metadata: Metadata | None


class AddRequest(Nullable):
    model_config = LAZY

    items: Items


class Conversations(NamedTuple):
    """The conversations of one owner."""

    store: ResponseStore
    owner: str

    async def get(self, id: str) -> Stored:
        """Its `input` are the items, its `response` is the rest. Raises RequestError."""
        found = await self.store.get(self.owner, id) if id.startswith(PREFIX) else None
        if found is None:
            raise RequestError("not_found", f"there is no conversation {id[:64]!r}", "conversation")
        return found

    async def change(self, id: str, items: Callable[[list[Item]], list[Item]]) -> None:
        """Raises RequestError if it is gone, or has no room."""

        def changed(stored: Stored) -> Stored:
            return stored._replace(input=msgspec.json.encode(items(msgspec.json.decode(stored.input))))

        await self.keep(id, changed)

    async def keep(self, id: str, change: Callable[[Stored], Stored]) -> None:
        await self.get(id)
        if not await self.store.change(self.owner, id, change):
            raise RequestError("overloaded", "the conversation has no room for more", "conversation")

    async def add(self, id: str, items: Sequence[Item]) -> None:
        """Raises RequestError if it is gone, or has no room."""
        await self.change(id, lambda before: [*before, *items])


def conversations(request: Request) -> Conversations:
    found = owner(request)
    return Conversations(cast(ResponseStore, request.app.state.responses), f"{found.tenant}:{found.salt}")


@router.post(PATH)
async def create(request: Request) -> Response:
    body, found = await read_json(request, CreateRequest), conversations(request)
    id = new_id(PREFIX)
    shown = {"id": id, "object": "conversation", "created_at": int(time.time()), "metadata": body.metadata}
    items = msgspec.json.encode(list(map(with_id, body.items)))
    if not await found.store.put(found.owner, Stored(id, None, items, msgspec.json.encode(shown))):
        raise RequestError("overloaded", "the conversation cannot be stored")
    return reply(shown)


@router.get(f"{PATH}/{{id}}")
async def retrieve(id: str, request: Request) -> Response:
    query(request, ())
    return _shown(await conversations(request).get(id))


@router.post(f"{PATH}/{{id}}")
async def update(id: str, request: Request) -> Response:
    body = await read_json(request, UpdateRequest)
    await conversations(request).keep(id, labelled(body.metadata or {}))
    return await retrieve(id, request)


@router.delete(f"{PATH}/{{id}}")
async def delete(id: str, request: Request) -> Response:
    found = conversations(request)
    await found.get(id)
    await found.store.delete(found.owner, id)
    return reply({"id": id, "object": "conversation.deleted", "deleted": True})


@router.get(f"{PATH}/{{id}}/items")
async def list_items(id: str, request: Request) -> Response:
    params = query(request, ("after", "limit", "order"))
    return page(await _items(id, request), params, PAGE, LONGEST_PAGE)


@router.post(f"{PATH}/{{id}}/items")
async def add_items(id: str, request: Request) -> Response:
    added = list(map(with_id, (await read_json(request, AddRequest)).items))
    await conversations(request).add(id, added)
    return page(added, {"order": "asc"}, max(len(added), 1), max(len(added), 1))


@router.get(ITEM_PATH)
async def retrieve_item(id: str, item_id: str, request: Request) -> Response:
    return reply(_one(await _items(id, request), item_id))


@router.delete(ITEM_PATH)
async def delete_item(id: str, item_id: str, request: Request) -> Response:
    found = conversations(request)
    _one(await _items(id, request), item_id)
    await found.change(id, lambda items: [item for item in items if item["id"] != item_id])
    return _shown(await found.get(id))


async def _items(id: str, request: Request) -> list[Item]:
    items: list[Item] = msgspec.json.decode((await conversations(request).get(id)).input)
    return items


def _one(items: list[Item], id: str) -> Item:
    """Raises RequestError."""
    found = next((item for item in items if item["id"] == id), None)
    if found is None:
        raise RequestError("not_found", f"there is no item {id[:64]!r}", "item_id")
    return found


def _shown(stored: Stored) -> Response:
    return Response(stored.response, media_type="application/json")
