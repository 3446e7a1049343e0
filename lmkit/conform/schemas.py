"""Keywords of JSON Schema that libraries write: what cannot be held is left out alone, and the rest is held."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from lmkit.conform.case import Server, case, each, need
from lmkit.conform.openai import CHAT, FORCED, HI, SCHEMA

ASK: dict[str, Any] = {"messages": [HI], "max_tokens": 32, "temperature": 0}  # enough for the first property
HELD = ('{"kind":"a"', '{"kind":"b"')
SHORT: dict[str, Any] = {"type": "string", "maxLength": 2}
FEW: dict[str, Any] = {"type": "array", "items": {"enum": ["x", "y"]}, "maxItems": 1}
NONE: dict[str, Any] = {"type": "object", "additionalProperties": False}
# Each is the schema of a property beside one that must still be held.
KEYWORDS: dict[str, dict[str, Any]] = {
    "format path": SHORT | {"format": "path"},
    "format binary": SHORT | {"format": "binary"},
    "format password": SHORT | {"format": "password"},
    "format uri-reference": SHORT | {"format": "uri-reference"},
    "contentEncoding": SHORT | {"format": "base64", "contentEncoding": "base64"},
    "title, default, examples": SHORT | {"title": "T", "default": "", "examples": ["a"], "deprecated": True},
    "uniqueItems": FEW | {"uniqueItems": True},
    "propertyNames": NONE | {"propertyNames": {"type": "string"}},
    "dependentRequired {}": NONE | {"dependentRequired": {}},
    "minProperties 0": NONE | {"minProperties": 0},
    "unevaluatedProperties": NONE | {"unevaluatedProperties": True},
    "not null": SHORT | {"not": {"type": "null"}},
    "$comment": SHORT | {"$comment": "c", "x-order": 1},
    "a large maximum": {"type": "integer", "minimum": 0, "exclusiveMaximum": 9, "maximum": 9007199254740991},
}  # fmt: skip


def beside(keyword: str) -> dict[str, Any]:
    properties = SCHEMA["properties"] | {"other": KEYWORDS[keyword]}
    return SCHEMA | {"properties": properties, "required": ["kind", "other"]}


def held(ask: Callable[[dict[str, Any]], str]) -> None:
    """`ask` gives the text for a schema. It must follow the schema beside each keyword."""

    def follows(keyword: str) -> None:
        text = ask(beside(keyword))
        need("".join(text.split()).startswith(HELD), f"the rest is not held: {text}")

    each(KEYWORDS, follows)


@case("openai", "tools with keywords that forbid nothing, or cannot be held")
def tools(server: Server) -> None:
    def ask(schema: dict[str, Any]) -> Any:
        tool = {"type": "function", "function": {"name": "choose", "parameters": schema}}
        body = ASK | {"tools": [tool], "tool_choice": FORCED}
        return server.post(CHAT, body)["choices"][0]["message"]["tool_calls"][0]["function"]["arguments"]

    held(ask)


@case("openai", "answers of a schema with such keywords")
def answers(server: Server) -> None:
    def ask(schema: dict[str, Any]) -> Any:
        form = {"type": "json_schema", "json_schema": {"name": "kind", "schema": schema}}
        return server.post(CHAT, ASK | {"response_format": form})["choices"][0]["message"]["content"]

    held(ask)
