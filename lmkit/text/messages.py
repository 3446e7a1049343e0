"""A conversation as a user writes it, and as chat templates read it: each message with one text."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, Literal, NamedTuple, get_args

from lmkit.errors import RequestError
from lmkit.hints import ignore
from lmkit.neutral import MESSAGE, is_neutral

DETAILS = ("auto", "low", "high")
# Parts that are seen, with the mark that chat templates know: OpenAI's names, and transformers'.
SEEN_PARTS: Mapping[str, str] = {"image_url": "image", "image": "image", "video_url": "video", "video": "video"}
MAX_FPS = 60.0
# Parts that are a text, with the field that has it: of chats, of Responses, and of an answer that refused.
TEXT_PARTS: Mapping[str, str] = {
    "text": "text", "input_text": "text", "output_text": "text", "refusal": "refusal",
}  # fmt: skip
Role = Literal["system", "developer", "user", "assistant"]
MAX_NAME_CHARS = 256


class ImagePart(NamedTuple):
    """An image or a video as the caller gives it: a URL or another source, and OpenAI's `detail`."""

    source: Any
    detail: str = "auto"
    mark: str = "image"  # or "video"
    fps: float = 0.0  # frames of a second of a video that are read; 0 = as the model has it


def message_parts(content: list[Any]) -> list[str | ImagePart]:
    """Texts, images and videos of a list of parts. Raises ValueError for parts of other types."""
    return [_part(part) for part in content]


def _part(part: Any) -> str | ImagePart:
    kind = part.get("type") if isinstance(part, dict) else None
    kind = kind if isinstance(kind, str) else ""
    own = TEXT_PARTS.get(kind, kind)
    if kind in (*TEXT_PARTS, *SEEN_PARTS):
        known = ("type", own, *(("fps",) if SEEN_PARTS.get(kind) == "video" else ()))
        part = {name: value for name, value in part.items() if name in known or not ignore(name)}
    if kind in TEXT_PARTS and part.keys() == {"type", own}:
        if part[own] is None:
            return ""
        if not isinstance(part[own], str):
            raise ValueError("a part's text must be a string")
        return str(part[own])
    if kind in SEEN_PARTS and kind in part:
        given = {name: value for name, value in part.items() if name not in ("type", kind)}
        given |= part[kind] if isinstance(part[kind], dict) else {"url": part[kind]}
        if (found := _seen(given, SEEN_PARTS[kind])) is not None:
            return found
    forms = '{"type": "text", "text": ...}, {"type": "image_url", "image_url": {"url": ...}}'
    raise ValueError(f'only parts {forms} and the same of "video_url" are supported')


def _seen(given: dict[str, Any], mark: str) -> ImagePart | None:
    """What fields say of an image or a video; None if they do not say it. Raises ValueError."""
    known = ("url", "detail", *(("fps",) if mark == "video" else ()))
    given = {name: value for name, value in given.items() if name in known or not ignore(name)}
    if not given.keys() <= set(known) or given.get("url") is None:
        return None
    detail, fps = given.get("detail") or "auto", given.get("fps") or 0.0
    if detail not in DETAILS:
        raise ValueError(f"an image's detail is one of {', '.join(DETAILS)}")
    if type(fps) not in (int, float) or not 0 <= fps <= MAX_FPS:
        raise ValueError(f"a video's fps is a number of at most {MAX_FPS:g} frames a second")
    return ImagePart(given["url"], detail, mark, float(fps))


def joined_parts(content: Any) -> Any:
    """A list of parts as one text with a line for each part that is a text. Raises ValueError for unknown parts.

    Anything but a list is returned as it is.
    """
    if not isinstance(content, list):
        return content
    return "\n".join(part for part in message_parts(content) if isinstance(part, str))


def shown_parts(parts: Iterable[str | ImagePart]) -> list[dict[str, str]]:
    """Parts as chat templates read them: each image is a mark."""
    return [{"type": "text", "text": part} if isinstance(part, str) else {"type": part.mark} for part in parts]


def plain_messages(messages: Iterable[Any]) -> list[dict[str, Any]]:
    """Messages with `role`, `content` and perhaps `name`: all text, or `content` as given if it has images. Raises
    RequestError."""
    plain = [_plain(message, f"messages[{index}]") for index, message in enumerate(messages)]
    if not plain:
        raise _invalid("messages: expected at least one message")
    return plain


def _plain(message: Any, where: str) -> dict[str, Any]:
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
    if has_images(message["content"]):
        content = message["content"]
    return {"role": str(role), "content": content} | ({"name": name} if name is not None else {})


def has_images(content: Any) -> bool:
    """Whether a message's content, which is known to be right, has parts that are images or videos."""
    return isinstance(content, list) and any(part["type"] in SEEN_PARTS for part in content)


def _invalid(message: str) -> RequestError:
    return RequestError("invalid_request", message, "messages")


def said(part: Any) -> Any:
    """A part of an answer that refused, as the text that it was."""
    refused = part.get("refusal") if isinstance(part, dict) and part.get("type") == "refusal" else None
    return part if refused is None else {"type": "output_text", "text": refused}
