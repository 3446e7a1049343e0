"""API keys: every path but those of `OPEN_PATHS` needs one. Each key is a tenant of its own."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

from starlette.requests import Request
from starlette.types import ASGIApp, Receive, Scope, Send

from lmkit.web.access_log import note_error
from lmkit.web.auth import Keyring, invalid_api_key
from lmkit.web.errors import error_response

OPEN_PATHS = frozenset({"/health"})  # for load balancers; /metrics shows traffic, so it needs a key


class ApiKeys:
    """Middleware that refuses requests without a known key. It tells the handlers which tenant the key stands for.

    It checks `scope["path"]`, as the router does, and never a URL built from the Host header.
    """

    def __init__(self, app: ASGIApp, keys: Sequence[str]) -> None:
        assert not isinstance(keys, str)
        self._app = app
        self._keyring = Keyring((key, tenant_of(key)) for key in keys)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "lifespan" or scope["path"] in OPEN_PATHS:
            await self._app(scope, receive, send)
        elif (tenant := self._keyring.find(scope["headers"])) is not None:
            scope.setdefault("state", {})["tenant"] = tenant
            await self._app(scope, receive, send)
        else:
            error = invalid_api_key()
            note_error(scope, error)
            await error_response(error)(scope, receive, send)


def tenant_of(key: str) -> str:
    """The tenant's name. It is the same after a restart, and the key cannot be found from it."""
    return hashlib.sha256(b"lmkit tenant " + key.encode()).hexdigest()[:32]


def tenant(request: Request) -> str:
    """The request's tenant; "" if the server has no keys."""
    return str(getattr(request.state, "tenant", ""))
