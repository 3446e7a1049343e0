"""x-request-id: the client's if it is harmless, else a new one. Every answer carries it, and the log names it."""

from __future__ import annotations

import re
import uuid
from collections.abc import Iterable

Headers = Iterable[tuple[bytes, bytes]]  # names in lower case, as ASGI gives them

_NAME = b"x-request-id"
_HARMLESS = re.compile(rb"[A-Za-z0-9._\-]{1,128}")


def request_id(headers: Headers) -> str:
    for name, value in headers:
        if name == _NAME and _HARMLESS.fullmatch(value):
            return value.decode()
    return uuid.uuid4().hex


def with_request_id(headers: Headers, value: str) -> list[tuple[bytes, bytes]]:
    """`headers` with this id and no other."""
    return [*((name, other) for name, other in headers if name.lower() != _NAME), (_NAME, value.encode())]
