"""OpenAI's lists in pages, and the query strings that choose one."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from lmkit.errors import RequestError

ORDERS = ("asc", "desc")
LABEL = re.compile(r"metadata\[(.{1,64})\]")  # a parameter that chooses stored chats by a label


def query(request: Request, known: Sequence[str]) -> Mapping[str, str]:
    """The parameters of the query string. Raises RequestError for one that the route lacks, or that comes twice."""
    params = request.query_params
    for name, _ in params.multi_items():
        if name not in known:
            raise RequestError("unknown_parameter", f"unknown parameter {name[:64]!r}", name[:64])
        if len(params.getlist(name)) > 1:
            raise RequestError("invalid_request", f"{name} is given twice", name)
    return params


def page(items: Sequence[dict[str, Any]], params: Mapping[str, str], limit: int, most: int) -> Response:
    """A page of `items`, which are sorted with the oldest first. `limit` is the default length, `most` the longest."""
    return listed(*chosen(items, params, limit, most))


def chosen(
    items: Sequence[dict[str, Any]], params: Mapping[str, str], limit: int, most: int
) -> tuple[list[dict[str, Any]], bool]:
    """The items of a page, and whether more follow. Raises RequestError."""
    order, after, text = params.get("order", "desc"), params.get("after"), params.get("limit", str(limit))
    if order not in ORDERS:
        raise RequestError("invalid_request", "order: expected asc or desc", "order")
    if not (text.isdecimal() and len(text) < 10 and 1 <= int(text) <= most):
        raise RequestError("invalid_request", f"limit: expected a number from 1 to {most}", "limit")
    shown = list(items) if order == "asc" else list(reversed(items))
    if after is not None:
        ids = [item["id"] for item in shown]
        if after not in ids:
            raise RequestError("not_found", "after: there is no such object", "after")
        shown = shown[ids.index(after) + 1 :]
    data = shown[: int(text)]
    return data, len(shown) > len(data)


def listed(data: list[dict[str, Any]], has_more: bool) -> Response:
    first, last = (data[0]["id"], data[-1]["id"]) if data else (None, None)
    return reply({"object": "list", "data": data, "first_id": first, "last_id": last, "has_more": has_more})


def reply(value: Any) -> Response:
    return Response(msgspec.json.encode(value), media_type="application/json")
