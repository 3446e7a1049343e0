"""Schemas of a chat's messages as they may be sent, for /openapi.json. The validators of `conversation` check them."""

from __future__ import annotations

from typing import get_args

from lmkit.strict import NULL, OF_MODEL, Schema, given
from lmkit.text.messages import DETAILS, IMAGE_PARTS, Role


def _part(kind: str, value: Schema) -> Schema:
    return {
        "type": "object",
        "properties": {"type": {"const": kind}, kind: value},
        "required": ["type", kind],
        "additionalProperties": False,
    }


_STRING: Schema = {"type": "string"}
_URL: Schema = {
    "type": "object",
    "properties": {"url": _STRING, "detail": {"enum": [None, *DETAILS]}},
    "required": ["url"],
    "additionalProperties": False,
}
_TEXTS: Schema = {"type": "array", "items": _part("text", _STRING)}
_IMAGES = [_part(kind, {"anyOf": [_STRING, _URL]}) | {OF_MODEL: "image"} for kind in IMAGE_PARTS]
CONTENT: Schema = {
    "anyOf": [_STRING, {"type": "array", "items": {"anyOf": [_part("text", _STRING), *_IMAGES]}}, NULL],
    "default": None,
}
_NO_IMAGES: Schema = {"anyOf": [_STRING, _TEXTS]}
_NOTHING: Schema = {"enum": [None, "", []]}


def _of(role: str) -> Schema:
    """A message of anyone but the assistant."""
    return given(
        "content",
        role={"const": role},
        tool_call_id={} if role == "tool" else NULL,
        **{"content": {"not": NULL} if role == "user" else _NO_IMAGES},
        **dict.fromkeys(("tool_calls", "reasoning", "reasoning_content"), _NOTHING),
    )


def _of_assistant(name: str) -> Schema:
    """A message of the assistant that has this field, and perhaps others."""
    content = {"anyOf": [_NO_IMAGES, NULL]}
    needed = _NO_IMAGES if name == "content" else {"not": _NOTHING}
    return given(name, role={"const": "assistant"}, tool_call_id=NULL, **{"content": content, name: needed})


MESSAGE: Schema = {
    "anyOf": [
        *(_of(role) for role in (*get_args(Role), "tool") if role != "assistant"),
        *map(_of_assistant, ("content", "tool_calls", "reasoning", "reasoning_content")),
    ]
}
