"""Every streaming dialect: it begins before its first token, and goes on for others when a client leaves."""

from __future__ import annotations

import uuid
from functools import partial
from typing import Any, NamedTuple

from lmkit.conform import messages, ollama, openai, responses
from lmkit.conform.case import MAX_TOKENS, Server, case, need
from lmkit.conform.openai import HI

SECONDS = 2.0  # until a stream begins
SSE, LINES = "text/event-stream", "application/x-ndjson"
PROMPT: dict[str, Any] = {"prompt": "One, two,"}
STREAM = {"stream": True}


class Dialect(NamedTuple):
    suite: str
    name: str
    path: str
    media_type: str
    body: dict[str, Any]
    key: str  # of each event
    begins: bytes = b""  # what must have come before the first token; none: the headers


DIALECTS = (
    Dialect("openai", "a chat", openai.CHAT, SSE, openai.ASK | STREAM, "choices"),
    Dialect("openai", "a completion", openai.TEXT, SSE, PROMPT | STREAM | {"max_tokens": MAX_TOKENS}, "choices"),
    Dialect("responses", "a response", responses.PATH, SSE, responses.ASK | STREAM, "type", b"response.created"),
    Dialect("messages", "a message", messages.PATH, SSE, messages.ASK | STREAM, "type", b"message_start"),
    Dialect("ollama", "a chat", "/api/chat", LINES, {"messages": [HI], "options": ollama.LIMIT}, "done"),
    Dialect("ollama", "generate", "/api/generate", LINES, PROMPT | {"options": ollama.LIMIT}, "done"),
)


def asking(dialect: Dialect, text: str) -> dict[str, Any]:
    """The dialect's body with this text."""
    said = {"prompt": text, "input": text, "messages": [HI | {"content": text}]}
    return dialect.body | {name: said[name] for name in dialect.body if name in said}


def begins(dialect: Dialect, server: Server) -> None:
    """Of a prompt that fills a part of the context and that no cache has."""
    text = uuid.uuid4().hex + " a" * min(1536, openai.context(server) * 3 // 8)
    seconds = server.seconds_until(dialect.path, asking(dialect, text), dialect.begins)
    what = dialect.begins.decode() or "the headers"
    need(seconds <= SECONDS, f"{what} came after {seconds:.1f} s, not within {SECONDS:.0f} s")


def survives(dialect: Dialect, server: Server) -> None:
    """Clients close their connections at bytes all over the stream."""
    length = len(server.stream(dialect.path, dialect.body, dialect.media_type))
    for num_bytes in sorted({0, 1, 2, length // 4, length // 2, length * 3 // 4, length - 1}):
        server.leave(dialect.path, dialect.body, num_bytes)
    read = server.lines if dialect.media_type == LINES else server.events
    events = [event for event in read(dialect.path, dialect.body) if event != "[DONE]"]
    need(events and all(dialect.key in event for event in events), f"then, a stream has events without {dialect.key}")


for _dialect in DIALECTS:
    case(_dialect.suite, f"{_dialect.name}: a stream begins before its first token")(partial(begins, _dialect))
    case(_dialect.suite, f"{_dialect.name}: clients that leave a stream anywhere")(partial(survives, _dialect))
