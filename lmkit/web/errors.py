"""OpenAI's error envelope: the JSON body, the status and the headers of every error that a client gets."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import msgspec
from starlette.responses import Response

from lmkit.errors import RequestError
from lmkit.log import get_logger

MAX_MESSAGE_CHARS = 1000
_NOTHING: Mapping[str, str] = {}

log = get_logger(__name__)


def error_body(error: RequestError) -> bytes:
    """`{"error": {message, type, param, code}}` as JSON."""
    if error.status in (403, 429):
        kind = "permission_error" if error.status == 403 else "rate_limit_error"
    else:
        kind = "invalid_request_error" if error.status < 500 else "server_error"
    fields = {"message": error.message[:MAX_MESSAGE_CHARS], "type": kind, "param": error.param, "code": error.code}
    return msgspec.json.encode({"error": fields})


def remark(error: RequestError) -> str:
    """The error in a line of the log: its code and field. No message, because that may quote the request."""
    return f" code={error.code}" + (f" param={error.param!r}" if error.param else "")


ERROR_HEADER = "X-LMKit-Error"  # of a 429 or 503: its code, which a proxy can read without the body


def error_response(error: RequestError, *, retry_after: float = 1.0, headers: Mapping[str, str] = _NOTHING) -> Response:
    """The complete response for `error`. A 429 or 503 carries `retry_after` in seconds, rounded, and at least 1."""
    added = {}
    if error.status == 401:
        added["WWW-Authenticate"] = "Bearer"
    if error.status in (429, 503):
        added["Retry-After"] = str(max(1, round(retry_after)))
        added[ERROR_HEADER] = error.code
    if error.status in (408, 413) or error.code == "overloaded":  # the rest of the body is not read
        added["Connection"] = "close"
    return Response(error_body(error), error.status, {**headers, **added}, media_type="application/json")


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
