"""API keys: everything needs one, except the exact paths of `OPEN_PATHS`. Each key is a tenant of its own."""

from __future__ import annotations

import hashlib
import secrets
from collections.abc import Sequence

from starlette.requests import Request
from starlette.types import ASGIApp, Receive, Scope, Send

from lmkit.errors import RequestError
from lmkit.serve.errors import error_response

OPEN_PATHS = frozenset({"/health"})  # for load balancers; /metrics shows traffic, so it needs a key


class ApiKeys:
    """Middleware that refuses requests without `Authorization: Bearer KEY`, and tells the handlers whose key it was.

    It looks at `scope["path"]`, which is what the router looks at, and never at a URL built from the Host header.
    """

    def __init__(self, app: ASGIApp, keys: Sequence[str]) -> None:
        assert not isinstance(keys, str)
        self._app = app
        self._digests = [(hashlib.sha256(key.encode()).digest(), tenant_of(key)) for key in keys]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "lifespan" or scope["path"] in OPEN_PATHS:
            await self._app(scope, receive, send)
        elif (tenant := self.tenant(scope["headers"])) is not None:
            scope.setdefault("state", {})["tenant"] = tenant
            await self._app(scope, receive, send)
        else:
            error = RequestError("invalid_api_key", "missing or wrong API key; send Authorization: Bearer KEY")
            await error_response(error)(scope, receive, send)

    def tenant(self, headers: Sequence[tuple[bytes, bytes]]) -> str | None:
        """Whose key it is: None without exactly one Authorization header that has a known key.

        Takes as long for any wrong key.
        """
        values = [value for name, value in headers if name == b"authorization"]
        scheme, _, key = values[0].partition(b" ") if len(values) == 1 else (b"", b"", b"")
        digest = hashlib.sha256(key.strip()).digest()
        matches = [tenant for known, tenant in self._digests if secrets.compare_digest(digest, known)]
        return matches[0] if matches and scheme.lower() == b"bearer" else None


def tenant_of(key: str) -> str:
    """A name for whoever has this key: the same after a restart, and no way back to the key."""
    return hashlib.sha256(b"lmkit tenant " + key.encode()).hexdigest()[:32]


def tenant(request: Request) -> str:
    """Whose request it is; "" where no keys are asked for."""
    return str(getattr(request.state, "tenant", ""))
