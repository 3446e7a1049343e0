"""The HTTP edge: every failure becomes the error of the route's API here, without details of the server."""

from __future__ import annotations

from collections.abc import AsyncGenerator, AsyncIterator, Callable, Mapping

from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send
from starlette.websockets import WebSocketClose

from lmkit.errors import RequestError
from lmkit.serve.choose import pool
from lmkit.web.access_log import note_error
from lmkit.web.errors import error_event, error_response, method_not_allowed, public_error
from lmkit.web.routes import is_known_elsewhere, not_found


async def handle_request_error(request: Request, error: Exception) -> Response:
    shown = public_error(error)
    note_error(request.scope, shown)
    is_crowded = shown.code in ("queue_full", "rate_limit_exceeded")
    retry_after = max(model.serving.metrics.retry_seconds() for model in pool(request).models) if is_crowded else 1
    return error_response(shown, retry_after=retry_after, path=request.scope["path"])


async def handle_http_exception(request: Request, error: Exception) -> Response:
    """404 and 405 of the router."""
    assert isinstance(error, HTTPException)
    headers: Mapping[str, str] = error.headers or {}
    is_elsewhere = error.status_code == 405 and is_known_elsewhere(request.scope["path"])  # where we have an id
    if error.status_code == 404 or is_elsewhere:
        shown = not_found(request.scope["path"], request.app.state.routes)
    elif error.status_code == 405:
        allowed = sorted(_methods(request))
        shown, headers = method_not_allowed(request.method, allowed), {"Allow": ", ".join(allowed)}
    else:
        code = "invalid_request" if error.status_code < 500 else "internal_error"
        shown = RequestError(code, "the request cannot be served")
    note_error(request.scope, shown)
    return error_response(shown, headers=headers, path=request.scope["path"])


def _methods(request: Request) -> set[str]:
    """The methods of all routes with the request's path. The router names those of the first alone."""
    path, routes = request.scope["path"], request.app.state.api_routes
    found = [route for route in routes if route.path_regex.match(path)]
    named = [route for route in found if route.path_format == path]  # not those that would take it for an id
    return {method for route in named or found for method in route.methods}


async def with_error_event(
    scope: Scope, events: AsyncIterator[str], failed: Callable[[RequestError], str] | None = None
) -> AsyncGenerator[str]:
    """`events`, and if they fail a last event with the error: what `failed` writes, or that of the route's API."""
    try:
        async for event in events:
            yield event
    except Exception as error:  # noqa: BLE001 - the stream has begun, so no status can tell it
        shown = public_error(error)
        note_error(scope, shown)
        yield failed(shown) if failed else error_event(shown, scope["path"]).decode()


class Edge:
    """Catches every error, below the access log."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await (WebSocketClose() if scope["type"] == "websocket" else self._app)(scope, receive, send)
            return
        started = False

        async def watched(message: Message) -> None:
            nonlocal started
            started = True
            await send(message)

        try:
            await self._app(scope, receive, watched)
        except Exception as error:  # noqa: BLE001 - logged by public_error
            shown = public_error(error)
            note_error(scope, shown)
            if not started:
                await error_response(shown, path=scope["path"])(scope, receive, send)
