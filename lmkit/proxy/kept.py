"""Routes of what nodes keep for clients: stored responses, chats and conversations, files and batches.

A file goes to a node of the model that its first line names, and so does all that names it, also its batch. What a
path names is found as `stored` says. A list has what all nodes keep.
"""

from __future__ import annotations

import asyncio
import functools
import re
from collections.abc import Awaitable, Callable, Collection, Mapping
from dataclasses import replace
from typing import Any, NamedTuple
from urllib.parse import urlencode

import msgspec
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Receive, Scope

from lmkit.errors import JSON_ERRORS, RequestError
from lmkit.proxy.call import Call
from lmkit.proxy.downstream import DownstreamResponse
from lmkit.proxy.forward import Forwarder
from lmkit.proxy.registry import Node, Registry
from lmkit.proxy.router import Router
from lmkit.proxy.stop import Stop
from lmkit.proxy.stored import BATCHES, CHATS, CONVERSATIONS, FILES, Named, named_by
from lmkit.proxy.stored import PATH as RESPONSES
from lmkit.proxy.transcripts import Transcripts, owner_of
from lmkit.web.listing import LABEL, page, query
from lmkit.web.receive import decode_json

WHAT = {
    RESPONSES: ("response", "response_id"), FILES: ("file", "file_id"), BATCHES: ("batch", "batch_id"),
    CHATS: ("chat", "completion_id"), CONVERSATIONS: ("conversation", "conversation_id"),
}  # fmt: skip


class _Pages(NamedTuple):
    """How long the pages of a list are, and the parameters that choose one."""

    limit: int
    most: int
    order: str
    names: tuple[str, ...]  # the proxy's to read
    passed: tuple[str, ...] = ()  # the nodes' to read


PAGES = {
    FILES: _Pages(10_000, 10_000, "desc", ("purpose", "order", "limit", "after")),
    BATCHES: _Pages(20, 100, "desc", ("limit", "after")),
    CHATS: _Pages(20, 100, "asc", ("order", "limit", "after"), ("model",)),
}
MAX_PAGES = 100  # of one node
RECEIPTS = "/receipts/"
_MODEL = re.compile(rb'"model"\s*:\s*("(?:[^"\\]|\\.){1,256}")')  # of a line of a batch


class Cluster(NamedTuple):
    """What requests are sent to, and what breaks them off."""

    forwarder: Forwarder
    registry: Registry
    router: Router
    stop: Stop
    transcripts: Transcripts | None


class Asked(NamedTuple):
    """One request and the response to it."""

    call: Call
    scope: Scope
    receive: Receive
    response: DownstreamResponse
    is_charged: bool  # its key has an account


Handler = Callable[[Cluster, Asked], Awaitable[None]]


def handlers(path: str, forwarded: Collection[str]) -> dict[str, Handler] | None:
    """Handlers by method, for a path that is one of these routes. `forwarded` are the routes that nodes may have."""
    if path == FILES and path in forwarded:
        return {"POST": _upload, "GET": functools.partial(_list, FILES)}
    if path == BATCHES and path in forwarded:
        return {"POST": _create_batch, "GET": functools.partial(_list, BATCHES)}
    if path == CHATS and path in forwarded:
        return {"GET": functools.partial(_list, CHATS)}
    if path == CONVERSATIONS and path in forwarded:
        return {"POST": _create_conversation}
    if path.startswith(RECEIPTS):
        return {"GET": _receipt}
    if path not in forwarded and (found := named_by(path)) and found.root in forwarded:
        return dict.fromkeys(found.methods, functools.partial(_to_keeper, found))
    return None


async def _forward(cluster: Cluster, asked: Asked, node: Node) -> None:
    await cluster.forwarder.forward(asked.call, asked.response, asked.receive, cluster.stop, node)


async def _keeper(cluster: Cluster, call: Call, root: str, id: str, param: str) -> Node:
    if (node := await cluster.forwarder.keeper(id, call, root)) is None:
        raise RequestError("not_found", f"no node that answers keeps the {WHAT[root][0]} {id[:128]!r}", param)
    return node


async def _to_keeper(named: Named, cluster: Cluster, asked: Asked) -> None:
    """To the node that keeps what the path names. A response whose node is down is shown from its copy."""
    call, copy = asked.call, None
    if cluster.transcripts is not None and call.path == f"{RESPONSES}/{named.id}":
        store, owner = cluster.transcripts.store, owner_of(call.key, call.client)
        if call.method == "DELETE":
            await store.delete(owner, named.id)
        else:
            copy = await store.get(owner, named.id)
    try:
        await _forward(cluster, asked, await _keeper(cluster, call, named.root, named.id, WHAT[named.root][1]))
    except RequestError as error:
        if copy is None or asked.response.started or error.code == "client_disconnected":
            raise
        await asked.response.whole(Response(copy.response, media_type="application/json"))


async def _upload(cluster: Cluster, asked: Asked) -> None:
    model, able = cluster.router.model(_first_model(asked.call.body)), cluster.forwarder.may_keep(asked.call)
    if model:
        able = [node for node in cluster.registry.candidates(model) if node in able]
    if not able:
        raise cluster.registry.absence(model) if model else RequestError("engine_unavailable", "no node is healthy")
    routing = replace(asked.call.routing, model=model)
    await _forward(cluster, asked, cluster.router.choose(able, routing).node)


def _first_model(form: bytes) -> str:
    """The model of the first line of a form's file, or an empty text."""
    found = _MODEL.search(form)
    try:
        return msgspec.json.decode(found[1], type=str) if found else ""
    except JSON_ERRORS:  # the node will say what is wrong with the line
        return ""


async def _create_conversation(cluster: Cluster, asked: Asked) -> None:
    """On any node: nothing says which models will answer in it."""
    if not (able := cluster.forwarder.may_keep(asked.call)):
        raise RequestError("engine_unavailable", "no node is healthy")
    await _forward(cluster, asked, cluster.router.choose(able, asked.call.routing).node)


class _Batch(msgspec.Struct):
    input_file_id: str


async def _create_batch(cluster: Cluster, asked: Asked) -> None:
    if asked.is_charged:
        message = "a batch cannot be charged to a key of the key store; send its requests one by one"
        raise RequestError("permission_denied", message)
    batch = decode_json(asked.call.body, _Batch, mismatch="expected an input_file_id", param="input_file_id")
    await _forward(cluster, asked, await _keeper(cluster, asked.call, FILES, batch.input_file_id, "input_file_id"))


async def _receipt(cluster: Cluster, asked: Asked) -> None:
    """The receipts that nodes have of an answer: its parts, each signed by its node, in the order of their tokens. And
    the nodes that do not answer: one of them may have a part."""
    call, found, silent = asked.call, list[dict[str, Any]](), list[str]()

    async def ask(node: Node) -> None:
        try:
            if part := await cluster.forwarder.listed(node, call):
                found.append({"node": node.url, **decode_json(part, dict[str, Any], mismatch="no receipt")})
        except RequestError:
            silent.append(node.url)

    await asyncio.gather(*map(ask, cluster.registry.nodes()))
    if not found:
        without = f"; {', '.join(sorted(silent))} did not answer" if silent else ""
        raise RequestError("not_found", f"no node has the receipt {call.path[len(RECEIPTS) :][:128]!r}{without}")
    told = {"parts": sorted(found, key=_known_tokens), "silent": sorted(silent)}
    await asked.response.whole(Response(msgspec.json.encode(told), media_type="application/json"))


def _known_tokens(part: dict[str, Any]) -> int:
    """How many of its tokens another node had given."""
    return sum(choice["known_tokens"] for choice in part.get("record", {}).get("choices", []))


class _Page(msgspec.Struct):
    data: list[dict[str, Any]]
    has_more: bool = False


async def _list(root: str, cluster: Cluster, asked: Asked) -> None:
    pages, request, forwarder = PAGES[root], Request(asked.scope), cluster.forwarder
    labels = [name for name in request.query_params if root == CHATS and LABEL.fullmatch(name)]
    params = query(request, (*pages.names, *pages.passed, *labels))
    passed = {name: params[name] for name in (*pages.passed, *labels) if name in params}
    nodes = forwarder.may_keep(asked.call)
    parts = [await _all_of(forwarder, node, asked.call, passed | {"limit": str(pages.most)}) for node in nodes]
    purpose = params.get("purpose")
    shown = [item for part in parts for item in part if purpose in (None, item.get("purpose"))]
    chosen = {"order": pages.order, **params}
    await asked.response.whole(page(sorted(shown, key=_age), chosen, pages.limit, pages.most))


def _age(item: dict[str, Any]) -> tuple[int, str]:
    at = item.get("created_at", item.get("created"))
    return at if isinstance(at, int) else 0, str(item.get("id"))


async def _all_of(forwarder: Forwarder, node: Node, call: Call, params: Mapping[str, str]) -> list[dict[str, Any]]:
    """All that one node lists."""
    found, ids = list[dict[str, Any]](), list[Any]()
    for _ in range(MAX_PAGES):
        asked = {**params, **({"after": ids[-1]} if ids else {})}
        answer = await forwarder.listed(node, replace(call, query=urlencode(asked).encode()))
        if answer is None:
            break
        try:
            part = msgspec.json.decode(answer, type=_Page)
            ids = [item["id"] for item in part.data]
        except (*JSON_ERRORS, KeyError):
            raise RequestError("bad_gateway", f"a node's answer to GET {call.path} is no list") from None
        found += part.data
        if not part.has_more or not part.data:
            break
    return found
