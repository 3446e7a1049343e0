"""What server and proxy share of Ollama's API: names of models, and streams of a JSON object a line."""

from __future__ import annotations

from collections.abc import Collection
from datetime import UTC, datetime
from typing import Any

import msgspec

from lmkit import __version__

PREFIX = "/api/"
GENERATION = ("/api/chat", "/api/generate")  # they stream unless the body says `stream: false`
STREAMS = (*GENERATION, "/api/pull")
LINES = "application/x-ndjson"
FOLLOWS = "0.13.0"  # the version of Ollama whose API this is: clients ask for a least one
TAG = ":latest"


def own_name(name: str, known: Collection[str]) -> str:
    """The name that a request means: a name without a tag and one with `:latest` are the same to Ollama's clients."""
    if name in known:
        return name
    return name + TAG if name + TAG in known else untagged(name)


def untagged(name: str) -> str:
    return name.removesuffix(TAG)


def shown_name(name: str) -> str:
    """A name as Ollama lists it: each has a tag."""
    return name if ":" in name.rpartition("/")[2] else name + TAG


def now() -> str:
    return written(datetime.now(UTC).timestamp())


def written(seconds: float) -> str:
    """A time in seconds since 1970 as Ollama writes it."""
    return datetime.fromtimestamp(seconds, UTC).isoformat(timespec="microseconds").replace("+00:00", "Z")


def line(value: Any) -> str:
    return msgspec.json.encode(value).decode() + "\n"


def empty_part(path: str, model: str) -> dict[str, Any]:
    """A part of an answer that adds nothing. It also keeps a connection open: no line of such a stream is a comment."""
    content: dict[str, Any] = {"response": ""}
    if path == "/api/chat":
        content = {"message": {"role": "assistant", "content": ""}}
    return {"model": model, "created_at": now(), **content, "done": False}


def version() -> dict[str, str]:
    return {"version": FOLLOWS, "lmkit": __version__}


def entry(name: str, *, created: float, size: int = 0, digest: str = "", family: str = "") -> dict[str, Any]:
    """A model in a list of /api/tags. `size` is in bytes."""
    about = {"parent_model": "", "format": "", "family": family, "families": [family] if family else []}
    return {
        "name": shown_name(name),
        "model": shown_name(name),
        "modified_at": written(created),
        "size": size,
        "digest": digest,
        "details": {**about, "parameter_size": "", "quantization_level": ""},
    }
