"""Images that a client's messages name by URLs."""

from __future__ import annotations

from typing import Any

from lmkit.errors import RequestError
from lmkit.text.images import data_url


def load(source: Any) -> bytes:
    """The bytes of an image. Raises RequestError."""
    if isinstance(source, str) and source.startswith("data:"):
        return data_url(source)
    raise RequestError("invalid_request", "image: send it as a data: URL", "messages")
