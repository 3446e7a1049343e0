"""The JSON body, the status and the headers of every error that a client gets.

The body is OpenAI's envelope; Anthropic's and Ollama's routes have those of their APIs.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import msgspec
from starlette.responses import Response

from lmkit.errors import JSON_ERRORS, NotReadyError, RequestError
from lmkit.log import get_logger
from lmkit.web.ollama import PREFIX as OLLAMA_ROUTES
from lmkit.web.ollama import STREAMS as OLLAMA_STREAMS

MAX_MESSAGE_CHARS = 1000
_NOTHING: Mapping[str, str] = {}

log = get_logger(__name__)


ANTHROPIC_ROUTES = "/v1/messages"
RESPONSES_ROUTES = "/v1/responses"
_ANTHROPIC_TYPES = {
    400: "invalid_request_error", 401: "authentication_error", 403: "permission_error", 404: "not_found_error",
    405: "invalid_request_error", 413: "request_too_large", 429: "rate_limit_error", 503: "overloaded_error",
    504: "timeout_error",
}  # fmt: skip


def _said(error: RequestError) -> str:
    """A message in the words that Anthropic's agents look for to shorten the conversation."""
    if error.code != "context_length_exceeded":
        return error.message
    number, most = (error.details.get(name) for name in ("n_prompt_tokens", "n_ctx"))
    is_known = isinstance(number, int) and isinstance(most, int) and number > most
    return f"prompt is too long: {f'{number} tokens > {most} maximum' if is_known else error.message}"


def error_body(error: RequestError, path: str = "") -> bytes:
    """`{"error": {message, type, param, code}}` as JSON; in the form of the API that has the route `path`."""
    if path.startswith(OLLAMA_ROUTES):
        return msgspec.json.encode({"error": error.message[:MAX_MESSAGE_CHARS]})
    if path.startswith(ANTHROPIC_ROUTES):
        kind = _ANTHROPIC_TYPES.get(error.status, "api_error")
        shown: dict[str, object] = {"type": kind, "message": _said(error)[:MAX_MESSAGE_CHARS]}
        if error.details:
            shown["details"] = error.details
        return msgspec.json.encode({"type": "error", "error": shown})
    if error.code == "insufficient_quota":
        kind = error.code
    elif error.status in (403, 429):
        kind = "permission_error" if error.status == 403 else "rate_limit_error"
    else:
        kind = "invalid_request_error" if error.status < 500 else "server_error"
    fields = {"message": error.message[:MAX_MESSAGE_CHARS], "type": kind, "param": error.param, "code": error.code}
    return msgspec.json.encode({"error": fields | error.details})


def error_event(error: RequestError, path: str = "", number: int = 0) -> bytes:
    """The error as the last event of a stream; `number` is its place in one of the Responses API."""
    return event_of(error_body(error, path), path, number)


def event_of(body: bytes, path: str = "", number: int = 0) -> bytes:
    """The JSON of an error as an event of a stream on the route `path`."""
    if path in OLLAMA_STREAMS:
        return b" ".join(body.splitlines()) + b"\n"
    if path.startswith(RESPONSES_ROUTES):
        body = _typed(body, number)
    name = b"event: error\n" if path.startswith((ANTHROPIC_ROUTES, RESPONSES_ROUTES)) else b""
    return name + b"data: " + b" ".join(body.splitlines()) + b"\n\n"


def _typed(body: bytes, number: int) -> bytes:
    """An error of the Responses API as one of its events, which have types. The envelope stays in it."""
    try:
        envelope = msgspec.json.decode(body, type=dict[str, dict[str, Any]])
    except JSON_ERRORS:  # it is another server's
        return body
    shown = {name: envelope.get("error", {}).get(name) for name in ("code", "message", "param")}
    return msgspec.json.encode({"type": "error", "sequence_number": number} | shown | envelope)


def remark(error: RequestError) -> str:
    """The error in a line of the log: its code and field. No message, because that may quote the request."""
    return f" code={error.code}" + (f" param={error.param!r}" if error.param else "")


NOT_READY = "engine_not_ready"  # of a NotReadyError, in this header:
ERROR_HEADER = "X-LMKit-Error"  # of a 429 or 503: its code, which a proxy can read without the body


def error_response(
    error: RequestError, *, retry_after: float | None = 1.0, headers: Mapping[str, str] = _NOTHING, path: str = ""
) -> Response:
    """The complete response for `error` on the route `path`.

    A 429 or 503 carries `retry_after` in seconds, rounded, and at least 1. None: never.
    """
    added = {}
    if error.status == 401:
        added["WWW-Authenticate"] = "Bearer"
    if error.status in (429, 503):
        added[ERROR_HEADER] = NOT_READY if isinstance(error, NotReadyError) else error.code
        if retry_after is not None:
            added["Retry-After"] = str(max(1, round(retry_after)))
    if error.code == "insufficient_quota":
        added["X-Should-Retry"] = "false"  # OpenAI's clients obey
    if error.status in (408, 413) or error.code == "overloaded":  # the rest of the body is not read
        added["Connection"] = "close"
    return Response(error_body(error, path), error.status, {**headers, **added}, media_type="application/json")


def public_error(error: Exception) -> RequestError:
    """The error that the client gets.

    Anything but a RequestError is a defect, which is logged here with its traceback.
    """
    if isinstance(error, RequestError):
        return error
    log.error("internal error", exc_info=error)
    return RequestError("internal_error", "internal server error")


def method_not_allowed(method: str, allowed: Iterable[str]) -> RequestError:
    return RequestError("method_not_allowed", f"{method} is not allowed on this route; use {' or '.join(allowed)}")
