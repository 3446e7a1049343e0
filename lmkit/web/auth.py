"""API keys. A key comes as `Authorization: Bearer KEY` or `x-api-key: KEY`; only digests of keys are kept."""

from __future__ import annotations

import hashlib
import hmac
from collections.abc import Iterable
from typing import Generic, TypeVar

from lmkit.errors import RequestError

Headers = Iterable[tuple[bytes, bytes]]  # names in lower case, as ASGI gives them
T = TypeVar("T")


class Keyring(Generic[T]):
    """Known keys, each with the tenant or the role that it stands for."""

    def __init__(self, keys: Iterable[tuple[str, T]]) -> None:
        self._entries = [(_digest(key.encode()), value) for key, value in keys]

    def find(self, headers: Headers) -> T | None:
        """The value of the request's key. None if the request has no key, several different ones or an unknown one.

        The time does not depend on the key: its digest is compared with those of all keys.
        """
        presented = _presented(headers)
        if presented is None:
            return None
        digest = _digest(presented)
        values = [value for known, value in self._entries if hmac.compare_digest(digest, known)]
        return values[0] if values else None


def invalid_api_key() -> RequestError:
    return RequestError("invalid_api_key", "missing or wrong API key; send Authorization: Bearer KEY")


def key_id(headers: Headers) -> str:
    """A short name of the key that a request presents, for the log; "" without one. It does not tell the key."""
    presented = _presented(headers)
    return hashlib.sha256(b"lmkit key " + presented).hexdigest()[:8] if presented else ""


def _presented(headers: Headers) -> bytes | None:
    found = set()
    for name, value in headers:
        if name == b"x-api-key":
            found.add(value.strip())
        elif name == b"authorization":
            scheme, _, key = value.strip().partition(b" ")
            found.add(key.strip() if scheme.lower() == b"bearer" else b"")
    return found.pop() if len(found) == 1 else None


def _digest(key: bytes) -> bytes:
    return hashlib.sha256(key).digest()
