"""Conversations from a file: ShareGPT's JSON, or JSON lines. The first malformed line is an error with its number.

ShareGPT   [{"conversations": [{"from": "human", "value": ...}, {"from": "gpt", "value": ...}, ...]}, ...]
lines      {"prompt": ...}  or  {"messages": [{"role": ..., "content": ...}, ...]},  each with optional "max_tokens"
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

from lmkit.errors import ConfigError

Message = dict[str, Any]
_SHAREGPT_ROLES = {"human": "user", "user": "user", "gpt": "assistant", "chatgpt": "assistant",
                   "bard": "assistant", "bing": "assistant", "assistant": "assistant", "system": "system"}  # fmt: skip


@dataclass(frozen=True)
class Entry:
    """One line of a data set."""

    messages: list[Message]  # with the data set's answers; a bare prompt is one user message
    is_chat: bool
    max_tokens: int | None  # the data set's own limit


def read_dataset(path: Path) -> list[Entry]:
    """Every entry that has a prompt. Raises ConfigError for a malformed file, line or entry."""
    try:
        text = path.read_text(encoding="utf-8-sig")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path}: cannot be read: {error}") from None
    rows = json_array(text, path) if text.lstrip().startswith("[") else json_lines(text, path)
    entries = [entry for where, row in rows if (entry := entry_of(row, where)) is not None]
    if not entries:
        raise ConfigError(f"{path}: has no conversation that begins with a user's message")
    return entries


def json_array(text: str, path: Path) -> Iterator[tuple[str, Any]]:
    """(where it stands, value) of each element of the file's array. Raises ConfigError."""
    for idx, row in enumerate(_loads(text, str(path))):
        yield f"{path}: entry {idx}", row


def json_lines(text: str, path: Path) -> Iterator[tuple[str, Any]]:
    """(where it stands, value) of each line that is not blank. Raises ConfigError."""
    for number, line in enumerate(text.split("\n"), 1):
        if line.strip():
            yield f"{path}: line {number}", _loads(line, f"{path}: line {number}")


def _loads(text: str, where: str) -> Any:
    try:
        return json.loads(text, parse_constant=_no_number)
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"{where}: not valid JSON: {error}") from None


def _no_number(name: str) -> NoReturn:
    raise ValueError(f"{name} is no number")


def entry_of(row: Any, where: str) -> Entry | None:
    """The entry of a row that stands at `where`. Raises ConfigError.

    None for a ShareGPT conversation that does not begin with a human. The data set has many of these.
    """
    if not isinstance(row, dict):
        raise ConfigError(f"{where}: expected an object, got {type(row).__name__}")
    if re.search(r"[\ud800-\udfff]", json.dumps(row, ensure_ascii=False)):
        raise ConfigError(f"{where}: not valid Unicode (lone surrogate)")
    max_tokens = row.get("max_tokens")
    if max_tokens is not None and (type(max_tokens) is not int or max_tokens < 1):
        raise ConfigError(f"{where}: max_tokens: expected a whole number above zero")
    if "conversations" in row:
        messages = [_sharegpt_message(m, where) for m in _listed(row["conversations"], where, "conversations")]
        first = next((m["role"] for m in messages if m["role"] != "system"), None)
        return Entry(messages, True, max_tokens) if first == "user" else None
    if "messages" in row:
        messages = [_message(m, where) for m in _listed(row["messages"], where, "messages")]
        if not any(message["role"] == "user" for message in messages):
            raise ConfigError(f"{where}: messages: none is a user's")
        return Entry(messages, True, max_tokens)
    prompt = row.get("prompt")
    if not isinstance(prompt, str) or not prompt:
        raise ConfigError(f'{where}: expected "prompt" (text), "messages" or "conversations"')
    return Entry([{"role": "user", "content": prompt}], False, max_tokens)


def _listed(value: Any, where: str, name: str) -> list[Any]:
    if not isinstance(value, list):
        raise ConfigError(f"{where}: {name}: expected a list")
    return value


def _sharegpt_message(value: Any, where: str) -> Message:
    if isinstance(value, dict) and isinstance(value.get("value"), str) and value.get("from") in _SHAREGPT_ROLES:
        return {"role": _SHAREGPT_ROLES[value["from"]], "content": value["value"]}
    raise ConfigError(f'{where}: conversations: expected {{"from": "human" or "gpt", "value": text}}')


def _message(value: Any, where: str) -> Message:
    if (
        isinstance(value, dict)
        and value.get("role") in ("system", "developer", "user", "assistant")
        and isinstance(value.get("content"), str)
    ):
        return {"role": value["role"], "content": value["content"]}
    raise ConfigError(f'{where}: messages: expected {{"role": "user", "assistant" or "system", "content": text}}')
