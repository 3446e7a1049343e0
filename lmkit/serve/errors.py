"""The HTTP edge: every failure becomes OpenAI's error envelope here, and says nothing of the inside of the server."""

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
from lmkit.serve.protocol import ErrorBody, ErrorResponse
from lmkit.serve.serving import serving

RETRY_SECONDS = 1  # Retry-After of a 503, where nothing better is known

logger = log.get_logger(__name__)
access_logger = log.get_logger("lmkit.serve.access")


def envelope(error: RequestError) -> str:
    """{"error": {message, type, param, code}} as JSON."""
    kind = "invalid_request_error" if error.status < 500 else "server_error"
    body = ErrorBody(message=error.message[:1000], type=kind, param=error.param, code=error.code)
    return ErrorResponse(error=body).model_dump_json()


def error_response(error: RequestError, headers: dict[str, str] | None = None) -> Response:
    headers = dict(headers or {})
    if error.status == 503:
        headers.setdefault("Retry-After", str(RETRY_SECONDS))
    if error.status == 401:
        headers["WWW-Authenticate"] = "Bearer"
    if error.code == "request_timeout":  # the rest of the body may never come
        headers["Connection"] = "close"
    return Response(envelope(error), error.status, headers, media_type="application/json")


def public_error(error: Exception) -> RequestError:
    """What a client may know of `error`; anything but a RequestError is a defect, logged here in full."""
    if isinstance(error, RequestError):
        return error
    logger.error("internal error", exc_info=error)
    return RequestError("internal_error", "internal server error")


async def handle_request_error(request: Request, error: Exception) -> Response:
    shown = public_error(error)
    full = shown.code == "queue_full"
    return error_response(shown, {"Retry-After": str(serving(request).metrics.retry_seconds())} if full else None)


async def handle_http_exception(request: Request, error: Exception) -> Response:
    """404 and 405 of the router."""
    assert isinstance(error, HTTPException)
    code = {404: "not_found", 405: "method_not_allowed", 413: "request_too_large"}.get(error.status_code)
    if code is None:
        code = "invalid_request" if error.status_code < 500 else "internal_error"
    message = {"not_found": "no such route", "method_not_allowed": f"{request.method} is not allowed here"}
    return error_response(
        RequestError(code, message.get(code, "the request cannot be served")), dict(error.headers or {})
    )


async def with_error_event(events: AsyncIterator[str]) -> AsyncGenerator[str]:
    """The data of server-sent events, with the failure of `events` as the last one. [DONE] follows success alone."""
    try:
        async for event in events:
            yield event
        yield "[DONE]"
    except Exception as error:  # noqa: BLE001 - the stream has begun: no status can say it any more
        yield envelope(public_error(error))


class Edge:
    """Outermost middleware: one access line a request, and the last catch. Prompts and query strings are not logged."""

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
