"""Conversations with tools as chat templates read them, and as texts for templates that know no tools."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from lmkit.text.dialects.table import Dialect

Message = Mapping[str, Any]


def with_texts(messages: Sequence[Message], tools: Sequence[Message], dialect: Dialect) -> list[dict[str, Any]]:
    """The conversation in the roles that every template has.

    The tools stand in the system's message, calls in the assistant's texts, and their results in the user's messages.
    """
    told = _described(tools, dialect) if tools else ""
    texts: list[dict[str, Any]] = []
    for message in messages:
        content = message.get("content") or ""
        if message["role"] == "tool":
            content = _joined("<tool_response>\n", content, "\n</tool_response>")
            if texts and texts[-1].get("is_result"):
                texts[-1]["content"] = _joined(texts[-1]["content"], "\n", content)
            else:
                texts.append({"role": "user", "content": content, "is_result": True})
            continue
        if calls := message.get("tool_calls"):
            written = dialect.between.join(_written(call["function"], dialect) for call in calls)
            content = "\n".join(filter(None, [content, f"{dialect.opening}{written}{dialect.closing}"]))
        texts.append({"role": message["role"], "content": content})
    plain = [{"role": text["role"], "content": text["content"]} for text in texts]
    return with_told(plain, told) if told else plain


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


def _written(function: Mapping[str, Any], dialect: Dialect) -> str:
    before, between, after = dialect.written
    arguments = function["arguments"]
    text = arguments if isinstance(arguments, str) else json.dumps(arguments, ensure_ascii=False)
    return f"{before}{function['name']}{between}{text}{after}"


def _described(tools: Sequence[Message], dialect: Dialect) -> str:
    lines = "\n".join(json.dumps(tool["function"], ensure_ascii=False) for tool in tools)
    form = "".join((dialect.written[0], "NAME", dialect.written[1], "{...}", dialect.written[2]))
    return (
        f"You may call these functions:\n<tools>\n{lines}\n</tools>\nTo call one, write its name and arguments:\n{form}"
    )
