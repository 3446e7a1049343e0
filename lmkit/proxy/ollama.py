"""Ollama's routes at the proxy: names of models, and the lists that it answers itself."""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

import msgspec

from lmkit.web.ollama import GENERATION, PREFIX, entry, own_name, version, written
from lmkit.web.receive import decode_json

FOREVER = 3600.0 * 24 * 365 * 100  # seconds
Entries = Sequence[dict[str, Any]]  # of /v1/models


class _Named(msgspec.Struct):
    model: Any = None
    name: Any = None  # its older name


def own_body(path: str, body: bytes, names: Collection[str]) -> bytes:
    """A body of Ollama's routes with the model's own name in the field that all other routes have for it.

    Raises RequestError for a body that is no JSON object.
    """
    if not path.startswith(PREFIX):
        return body
    named: _Named = decode_json(body, _Named)
    model = named.name if named.model is None else named.model
    if not isinstance(model, str):
        return body
    fields = decode_json(body, dict[str, msgspec.Raw])
    fields.pop("name", None)
    return msgspec.json.encode({**fields, "model": own_name(model, names)})


def streams(path: str, asked: Any) -> bool:
    """Whether a request of the route asks for a stream by its field `stream`, which may be missing."""
    return asked is True or (asked is None and path in GENERATION)


def _listed(entries: Entries) -> list[dict[str, Any]]:
    return [entry(one["id"], created=_number(one.get("created"))) for one in entries]


def _tags(entries: Entries) -> dict[str, Any]:
    return {"models": _listed(entries)}


def _running(entries: Entries) -> dict[str, Any]:
    """The models that nodes have. Where their memory is, the nodes tell."""
    until = written(time.time() + FOREVER)
    return {
        "models": [
            shown | {"expires_at": until, "size_vram": 0, "context_length": round(_number(about.get("max_model_len")))}
            for shown, about in zip(_listed(entries), entries, strict=True)
        ]
    }


def _number(value: Any) -> float:
    return value if isinstance(value, int) and 0 <= value < 1 << 36 else 0


LISTS: Mapping[str, Callable[[Entries], dict[str, Any]]] = {
    "/api/tags": _tags,
    "/api/ps": _running,
    "/api/version": lambda entries: dict(version()),
}
