"""Schemas of a chat's messages as they may be sent, for /openapi.json. The validators of `conversation` check them."""

from __future__ import annotations

from typing import get_args

from lmkit.strict import NULL, OF_MODEL, Schema
from lmkit.text.messages import DETAILS, IMAGE_PARTS, Role


def _part(kind: str, value: Schema) -> Schema:
    return {
        "type": "object",
        "properties": {"type": {"const": kind}, kind: value},
        "required": ["type", kind],
    }


_STRING: Schema = {"type": "string"}
_URL: Schema = {
    "type": "object",
    "properties": {"url": _STRING, "detail": {"enum": [None, *DETAILS]}},
    "required": ["url"],
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
    """A message of anyone but the assistant. Only users and tools send images."""
    content = {} if role in ("user", "tool") else {"anyOf": [_NO_IMAGES, NULL]}
    return {"properties": {"role": {"const": role}, "content": content, "tool_calls": _NOTHING}}


_OF_ASSISTANT: Schema = {"properties": {"role": {"const": "assistant"}, "content": {"anyOf": [_NO_IMAGES, NULL]}}}
MESSAGE: Schema = {"anyOf": [*(_of(role) for role in (*get_args(Role), "tool") if role != "assistant"), _OF_ASSISTANT]}
