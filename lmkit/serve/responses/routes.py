"""OpenAI's Responses API: /v1/responses and the routes below it."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, TypeVar, cast

import msgspec
from fastapi import APIRouter, Request, Response
from pydantic import TypeAdapter

from lmkit.errors import RequestError
from lmkit.hints import ignore
from lmkit.serve.auth import owner
from lmkit.serve.body import read_json
from lmkit.serve.choose import choose, shared
from lmkit.serve.response import answer
from lmkit.serve.responses.answer import Exchange, ResponsesAnswer
from lmkit.serve.responses.background import OPEN, Background
from lmkit.serve.responses.conversations import conversations
from lmkit.serve.responses.protocol import (
    NAMES,
    Item,
    ItemReference,
    ListQuery,
    Prompt,
    ResponsesRequest,
    RetrieveQuery,
)
from lmkit.serve.responses.translate import to_chat
from lmkit.serve.translated import num_prompt_tokens
from lmkit.strict import LAZY, validate
from lmkit.web.pair import PAIR_HEADER
from lmkit.web.response_store import ResponseStore, Stored

PATH = "/v1/responses"
ID_CHARS = 32  # of an answer's id, with which the ids of its items begin
P = TypeVar("P", bound=Prompt)
router = APIRouter()
_ITEMS: TypeAdapter[list[Item]] = TypeAdapter(list[Item], config=LAZY)


@router.post(PATH)
async def create(request: Request) -> Response:
    body = await read_json(request, ResponsesRequest)
    request.state.user = body.user or body.safety_identifier
    server = await choose(request, body.model)
    body = await _resolved(request, body)
    chat = to_chat(body, [*await _earlier(request, body), *body.input])
    exchange = Exchange(body, _owner(request), _store(request))
    share = request.state.held.enter_context(server.answers.share())
    made = ResponsesAnswer(server, chat, owner(request), share, exchange)
    if not body.background or PAIR_HEADER.decode() in request.headers:
        return await answer(request, made)
    if body.stream or not exchange.is_stored:
        message = "background: such a response is fetched later, so it needs store and goes without stream"
        raise RequestError("invalid_request", message, "background")
    await made.gather()
    await server.texts.run(request.receive, made.num_chars, made.prepare, guided=made.guided)
    return _json(await _background(request).begin(made, request.state.held.pop_all()))


@router.post(f"{PATH}/input_tokens")
async def input_tokens(request: Request) -> Response:
    body = await _resolved(request, await read_json(request, Prompt))
    chat = to_chat(body, [*await _earlier(request, body), *body.input])
    number = await num_prompt_tokens(request, chat, NAMES)
    return _json({"object": "response.input_tokens", "input_tokens": number})


@router.get(f"{PATH}/{{id}}")
async def retrieve(id: str, request: Request) -> Response:
    validate(_query(request), RetrieveQuery)
    stored = await _stored(request, id)
    return Response(_background(request).now(stored.response), media_type="application/json")


@router.delete(f"{PATH}/{{id}}")
async def delete(id: str, request: Request) -> Response:
    await _stored(request, id)
    await _background(request).cancel(id)
    await _store(request).delete(_owner(request), id)
    return _json({"id": id, "object": "response", "deleted": True})


@router.post(f"{PATH}/{{id}}/cancel")
async def cancel(id: str, request: Request) -> Response:
    stored = await _stored(request, id)
    if not msgspec.json.decode(stored.response)["background"]:
        raise RequestError("invalid_request", "only a response that is made in the background can be cancelled")
    await _background(request).cancel(id)
    return await retrieve(id, request)


@router.get(f"{PATH}/{{id}}/input_items")
async def input_items(id: str, request: Request) -> Response:
    query = validate(_query(request), ListQuery)
    items = msgspec.json.decode((await _stored(request, id)).input)
    if query.order == "desc":
        items.reverse()
    ids = [item["id"] for item in items]
    if query.after is not None and query.after not in ids:
        raise RequestError("not_found", f"after: there is no item {query.after[:64]!r}", "after")
    start = 0 if query.after is None else ids.index(query.after) + 1
    page = items[start : start + query.limit]
    return _json({
        "object": "list",
        "data": page,
        "first_id": page[0]["id"] if page else None,
        "last_id": page[-1]["id"] if page else None,
        "has_more": start + query.limit < len(items),
    })  # fmt: skip


async def _resolved(request: Request, body: P) -> P:
    """The body with stored items in place of references to them. One that is not here is left out."""
    references = [item.id for item in body.input if isinstance(item, ItemReference)]
    if not references:
        return body
    found: dict[str, Any] = {}
    share = request.state.held.enter_context(shared(request).bodies.share())
    for response in dict.fromkeys(ResponsesAnswer.prefix + id.rpartition("_")[2][:ID_CHARS] for id in references):
        if (stored := await _store(request).get(_owner(request), response)) is not None:
            share.add(len(stored.response))
            found |= {item["id"]: item for item in msgspec.json.decode(stored.response)["output"]}
    for id in references:
        if id not in found and not ignore("input.item_reference"):
            raise RequestError("invalid_request", f"input: there is no item {id[:64]!r} here", "input")
    known = iter(_ITEMS.validate_python([found[id] for id in references if id in found]))
    items = [next(known) if isinstance(item, ItemReference) else item for item in body.input
             if not isinstance(item, ItemReference) or item.id in found]  # fmt: skip
    return body.model_copy(update={"input": items})


async def _earlier(request: Request, body: Prompt) -> Iterable[Item]:
    """The items of the responses that this one continues."""
    previous, server = body.previous_response_id, shared(request)
    if body.conversation is not None:
        return await _conversation(request, body.conversation, previous)
    if previous is None:
        return []
    chain = []
    if previous.startswith(ResponsesAnswer.prefix):  # the store also has chats
        chain = await _store(request).chain(_owner(request), previous, server.config.max_body_bytes)
    if not chain:
        message = f"the response {previous[:64]!r}, or one that it continues, is not stored here"
        raise RequestError("invalid_request", message, "previous_response_id")
    share = request.state.held.enter_context(server.bodies.share())
    share.add(sum(len(stored.input) + len(stored.response) for stored in chain))
    items: list[Any] = []
    for stored in chain:
        response = msgspec.json.decode(_background(request).now(stored.response))
        if response["status"] in OPEN:
            message = f"the response {response['id']!r} has not ended"
            raise RequestError("invalid_request", message, "previous_response_id")
        items += msgspec.json.decode(stored.input)
        items += response["output"]
    return _ITEMS.validate_python(items)


async def _conversation(request: Request, id: str, previous: str | None) -> Iterable[Item]:
    """The items of a conversation."""
    if previous is not None:
        message = "send conversation or previous_response_id, not both"
        raise RequestError("invalid_request", message, "previous_response_id")
    items, server = (await conversations(request).get(id)).input, shared(request)
    if len(items) > (limit := server.config.max_body_bytes):
        message = f"the conversation has {len(items)} bytes, and the limit is {limit}"
        raise RequestError("request_too_large", message, "conversation")
    request.state.held.enter_context(server.bodies.share()).add(len(items))
    return _ITEMS.validate_json(items)


async def _stored(request: Request, id: str) -> Stored:
    found = await _store(request).get(_owner(request), id) if id.startswith(ResponsesAnswer.prefix) else None
    if found is None:
        raise _absent(id)
    return found


def _absent(id: str) -> RequestError:
    return RequestError("not_found", f"there is no response {id[:64]!r}", "response_id")


def _store(request: Request) -> ResponseStore:
    return cast(ResponseStore, request.app.state.responses)


def _background(request: Request) -> Background:
    return cast(Background, request.app.state.background)


def _owner(request: Request) -> str:
    """Whose responses: a tenant's, or those of one client that a proxy names."""
    found = owner(request)
    return f"{found.tenant}:{found.salt}"


def _query(request: Request) -> dict[str, Any]:
    """A list is written `name[]=...`, as OpenAI's clients do."""
    query = request.query_params
    return {name.removesuffix("[]"): query.getlist(name) if name.endswith("[]") else query[name] for name in query}


def _json(value: Any) -> Response:
    return Response(msgspec.json.encode(value), media_type="application/json")
