"""Conversations with tools as chat templates read them, and as texts for templates that know no tools."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from lmkit.text.dialects.dialect import Dialect

Message = Mapping[str, Any]


def with_texts(messages: Sequence[Message], dialect: Dialect, *, results: bool = True) -> list[dict[str, Any]]:
    """The conversation in the roles that every template has: calls stand in the assistant's texts.

    With `results` those of the tools stand in the user's messages; if not, the template has a place for them.
    """
    texts: list[dict[str, Any]] = []
    for message in messages:
        content = message.get("content") or ""
        if message["role"] == "tool" and results:
            content = _joined("<tool_response>\n", content, "\n</tool_response>")
            if texts and texts[-1].get("is_result"):
                texts[-1]["content"] = _joined(texts[-1]["content"], "\n", content)
            else:
                texts.append({"role": "user", "content": content, "is_result": True})
            continue
        if calls := message.get("tool_calls"):
            content = "\n".join(filter(None, [content, dialect.text(list(map(_named, calls)))]))
        texts.append({name: value for name, value in message.items() if name != "tool_calls"} | {"content": content})
    return [{name: value for name, value in text.items() if name != "is_result"} for text in texts]


def _named(call: Mapping[str, Any]) -> tuple[str, Mapping[str, Any]]:
    """Name and arguments of a call. Arguments that are no object are a text that a model wrote."""
    arguments = call["function"]["arguments"]
    return call["function"]["name"], arguments if isinstance(arguments, Mapping) else {"arguments": arguments}


def _joined(*contents: str | list[dict[str, Any]]) -> str | list[dict[str, Any]]:
    """Contents one after the other: a text, or parts if one of them has images."""
    if all(isinstance(content, str) for content in contents):
        return "".join(map(str, contents))
    return [
        part
        for content in contents
        for part in ([{"type": "text", "text": content}] if isinstance(content, str) else content)
    ]


def with_told(messages: Sequence[Message], told: str) -> list[dict[str, Any]]:
    """The conversation with a text at the end of the system's message, or in a new one."""
    first, *others = map(dict, messages)
    if first["role"] in ("system", "developer"):
        return [first | {"content": f"{first['content']}\n\n{told}"}, *others]
    return [{"role": "system", "content": told}, first, *others]


def described(tools: Sequence[Message], dialect: Dialect) -> str:
    """A text that tells the model of tools, and how it calls them."""
    lines = "\n".join(json.dumps(tool["function"], ensure_ascii=False) for tool in tools)
    form = dialect.text([("NAME", {"PARAMETER": "VALUE"})])
    return (
        f"You may call these functions:\n<tools>\n{lines}\n</tools>\nTo call one, write its name and arguments:\n{form}"
    )
