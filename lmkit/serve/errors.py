"""The HTTP edge: every failure becomes OpenAI's error envelope here, without details of the server."""

from __future__ import annotations

import time
from collections.abc import AsyncGenerator, AsyncIterator

from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send
from starlette.websockets import WebSocketClose

from lmkit import log
from lmkit.errors import RequestError
from lmkit.serve.serving import serving
from lmkit.web.errors import error_body, error_response, method_not_allowed, not_found, public_error

access_logger = log.get_logger("lmkit.serve.access")


async def handle_request_error(request: Request, error: Exception) -> Response:
    shown = public_error(error)
    retry_after = serving(request).metrics.retry_seconds() if shown.code == "queue_full" else 1
    return error_response(shown, retry_after=retry_after)


async def handle_http_exception(request: Request, error: Exception) -> Response:
    """404 and 405 of the router."""
    assert isinstance(error, HTTPException)
    known = {404: not_found(), 405: method_not_allowed(request.method)}
    other = RequestError(
        "invalid_request" if error.status_code < 500 else "internal_error", "the request cannot be served"
    )
    return error_response(known.get(error.status_code, other), headers=error.headers or {})


async def with_error_event(events: AsyncIterator[str]) -> AsyncGenerator[str]:
    """The data of server-sent events. If `events` fails, the last event is the error; otherwise it is [DONE]."""
    try:
        async for event in events:
            yield event
        yield "[DONE]"
    except Exception as error:  # noqa: BLE001 - the stream has begun, so no status can tell it
        yield error_body(public_error(error)).decode()


class Edge:
    """Outermost middleware: logs one access line a request and catches every error.

    It logs no prompts or query strings.
    """

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await (WebSocketClose() if scope["type"] == "websocket" else self._app)(scope, receive, send)
            return
        start = time.monotonic()
        status = 0
        scope.setdefault("state", {})

        async def watched(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
            await send(message)

        try:
            await self._app(scope, receive, watched)
        except Exception as error:  # noqa: BLE001 - logged by public_error
            response = error_response(public_error(error))
            if not status:
                await response(scope, receive, watched)
        finally:
            milliseconds = (time.monotonic() - start) * 1e3
            user = f" user={scope['state']['user'][:64]!r}" if scope["state"].get("user") else ""
            access_logger.info(
                "%s %s %d %.0f ms%s", scope["method"], scope["path"][:128], status or 499, milliseconds, user
            )
