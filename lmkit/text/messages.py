"""A conversation as a user writes it, and as chat templates read it: each message with one text."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, Literal, get_args

from lmkit.errors import RequestError
from lmkit.neutral import MESSAGE, is_neutral

Role = Literal["system", "developer", "user", "assistant"]
MAX_NAME_CHARS = 256


def joined_parts(content: Any) -> Any:
    """A list of text parts as one text with a line for each part. Raises ValueError for parts of other types.

    Anything but a list is returned as it is.
    """
    if not isinstance(content, list):
        return content
    texts = []
    for part in content:
        if not (isinstance(part, dict) and part.keys() == {"type", "text"} and part["type"] == "text"):
            raise ValueError('only parts {"type": "text", "text": ...} are supported')
        if not isinstance(part["text"], str):
            raise ValueError("a part's text must be a string")
        texts.append(part["text"])
    return "\n".join(texts)


def plain_messages(messages: Iterable[Any]) -> list[dict[str, str]]:
    """Messages with `role`, `content` and perhaps `name`, all text. Raises RequestError."""
    plain = [_plain(message, f"messages[{index}]") for index, message in enumerate(messages)]
    if not plain:
        raise _invalid("messages: expected at least one message")
    return plain


def _plain(message: Any, where: str) -> dict[str, str]:
    if not isinstance(message, Mapping):
        kind = type(message).__name__
        raise _invalid(f"{where}: expected a message {{'role': ..., 'content': ...}}, got {kind}")
    for name, value in message.items():
        if name in MESSAGE and not is_neutral(value, MESSAGE[name]):
            raise RequestError("unsupported_parameter", f"{where}.{name} is not supported", "messages")
        if name not in ("role", "content", "name", *MESSAGE):
            raise RequestError("unknown_parameter", f"{where}: unknown field {str(name)[:64]!r}", "messages")
    role, name = message.get("role"), message.get("name")
    if role not in get_args(Role):
        raise _invalid(f"{where}.role={str(role)[:64]!r}: expected {', '.join(get_args(Role))}")
    try:
        content = joined_parts(message.get("content"))
    except ValueError as error:
        raise _invalid(f"{where}.content: {error}") from None
    if not isinstance(content, str):
        raise _invalid(f"{where}.content: expected text or a list of text parts, got {type(content).__name__}")
    if not (name is None or (isinstance(name, str) and len(name) <= MAX_NAME_CHARS)):
        raise _invalid(f"{where}.name: expected text of at most {MAX_NAME_CHARS} characters")
    return {"role": str(role), "content": content} | ({"name": name} if name is not None else {})


def _invalid(message: str) -> RequestError:
    return RequestError("invalid_request", message, "messages")
