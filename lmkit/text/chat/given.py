"""Schemas of a chat's messages as they may be sent, for /openapi.json. The validators of `conversation` check them."""

from __future__ import annotations

from typing import get_args

from lmkit.strict import NULL, OF_MODEL, Schema
from lmkit.text.messages import DETAILS, MAX_FPS, SEEN_PARTS, TEXT_PARTS, Role


def _part(kind: str, value: Schema, own: str = "") -> Schema:
    """Of a part whose value is in the field `own`, by default that of its kind."""
    own = own or kind
    return {"type": "object", "properties": {"type": {"const": kind}, own: value}, "required": ["type", own]}


_STRING: Schema = {"type": "string"}
_FPS: Schema = {"anyOf": [{"type": "number", "minimum": 0, "maximum": MAX_FPS}, NULL]}
_URL: Schema = {
    "type": "object",
    "properties": {"url": _STRING, "detail": {"enum": [None, *DETAILS]}},
    "required": ["url"],
}
_VIDEO_URL: Schema = _URL | {"properties": {**_URL["properties"], "fps": _FPS}}
_URLS = {"image": _URL, "video": _VIDEO_URL}
_TEXT = [_part(kind, _STRING, own) for kind, own in TEXT_PARTS.items()]
_TEXTS: Schema = {"type": "array", "items": {"anyOf": _TEXT}}
_IMAGES = [_part(kind, {"anyOf": [_STRING, _URLS[mark]]}) | {OF_MODEL: mark} for kind, mark in SEEN_PARTS.items()]
CONTENT: Schema = {
    "anyOf": [_STRING, {"type": "array", "items": {"anyOf": [*_TEXT, *_IMAGES]}}, NULL],
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
