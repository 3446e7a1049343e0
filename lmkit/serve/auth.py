"""API keys: everything needs one, except the exact paths of `OPEN_PATHS`."""

from __future__ import annotations

import hashlib
import secrets
from collections.abc import Sequence

from starlette.types import ASGIApp, Receive, Scope, Send

from lmkit.errors import RequestError
from lmkit.serve.errors import error_response

OPEN_PATHS = frozenset({"/health"})  # for load balancers; /metrics shows traffic, so it needs a key


class ApiKeys:
    """Middleware that refuses requests without `Authorization: Bearer <one of the keys>`.

    It looks at `scope["path"]`, which is what the router looks at, and never at a URL built from the Host header.
    """

    def __init__(self, app: ASGIApp, keys: Sequence[str]) -> None:
        assert not isinstance(keys, str)
        self._app = app
        self._digests = [hashlib.sha256(key.encode()).digest() for key in keys]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "lifespan" or scope["path"] in OPEN_PATHS or self.accepts(scope["headers"]):
            await self._app(scope, receive, send)
        else:
            error = RequestError("invalid_api_key", "missing or wrong API key; send Authorization: Bearer KEY")
            await error_response(error)(scope, receive, send)

    def accepts(self, headers: Sequence[tuple[bytes, bytes]]) -> bool:
        """Exactly one Authorization header, with a known key. Takes as long for any wrong key."""
        values = [value for name, value in headers if name == b"authorization"]
        scheme, _, key = values[0].partition(b" ") if len(values) == 1 else (b"", b"", b"")
        digest = hashlib.sha256(key.strip()).digest()
        matches = [secrets.compare_digest(digest, known) for known in self._digests]
        return any(matches) and scheme.lower() == b"bearer"
