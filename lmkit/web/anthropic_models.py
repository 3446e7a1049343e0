"""Lists of models for Anthropic's clients, which send `anthropic-version` and read another form than OpenAI's."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from datetime import UTC, datetime
from typing import Any

Headers = Iterable[tuple[bytes, bytes]]


def card(entry: dict[str, Any], headers: Headers) -> dict[str, Any]:
    """An entry of OpenAI's list, in the form that a client with these headers reads."""
    return _card(entry) if _is_asked(headers) else entry


def page(entries: Sequence[dict[str, Any]], headers: Headers) -> dict[str, Any]:
    """The whole list, in the form that a client with these headers reads."""
    if not _is_asked(headers):
        return {"object": "list", "data": entries}
    data = list(map(_card, entries))
    ends = {"first_id": data[0]["id"], "last_id": data[-1]["id"]} if data else {"first_id": None, "last_id": None}
    return {"data": data, "has_more": False, **ends}


def _is_asked(headers: Headers) -> bool:
    return any(name.lower() == b"anthropic-version" for name, _ in headers)


def _card(entry: Mapping[str, Any]) -> dict[str, Any]:
    created = datetime.fromtimestamp(entry.get("created") or 0, UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
    return {"type": "model", "id": entry["id"], "display_name": entry["id"], "created_at": created}
