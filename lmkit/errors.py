"""Errors that a user can cause or meet. Each message names the mistake, its place, and a remedy.

An `LMKitError` is shown as one line (exit code 2 in the CLI, an OpenAI error envelope over HTTP). Any other exception
is a defect of lmkit itself.
"""

from __future__ import annotations

import msgspec

# What msgspec raises for bytes that are not the JSON it wants. Bytes that are not UTF-8 are no DecodeError of its own.
JSON_ERRORS = (msgspec.MsgspecError, UnicodeDecodeError, RecursionError)

# RequestError.code -> HTTP status. A code that is missing here is a defect, so RequestError refuses it.
HTTP_STATUS = {
    "invalid_request": 400,  # malformed JSON, wrong type, out of range
    "unknown_parameter": 400,
    "unsupported_parameter": 400,
    "context_length_exceeded": 400,
    "content_filter": 400,  # a hook refused the request or the answer
    "invalid_api_key": 401,
    "permission_denied": 403,
    "not_found": 404,
    "model_not_found": 404,
    "method_not_allowed": 405,
    "request_timeout": 408,
    "request_too_large": 413,
    "unsupported_media_type": 415,
    "rate_limit_exceeded": 429,  # this client has too much open
    "insufficient_quota": 429,  # a budget of this client is used up
    "client_disconnected": 499,
    "internal_error": 500,
    "hook_failed": 500,  # a hook of the server raised or took too long, and nothing passes without it
    "engine_error": 500,
    "bad_gateway": 502,
    "engine_unavailable": 503,
    "overloaded": 503,  # a budget of memory is used up
    "queue_full": 503,
    "shutting_down": 503,
    "deadline_exceeded": 504,  # the request's own deadline, or the server's --request-timeout
    "upstream_timeout": 504,
}


class LMKitError(Exception):
    """Base of every error that is not a defect of lmkit."""


class ConfigError(LMKitError):
    """A configuration, recipe or option is wrong."""


class CheckpointError(LMKitError):
    """A file of a checkpoint is missing, truncated, inconsistent or unsafe to read."""


class UnsupportedError(LMKitError):
    """The input is well-formed, but this build or this machine cannot run it. The message lists the reasons."""


class EngineLostError(LMKitError):
    """An engine can compute nothing more in this process: its GPU failed, or its weights are damaged."""


class RequestError(LMKitError):
    """One request was refused or failed. Its siblings are not affected.

    `code` is a key of `HTTP_STATUS`; `param` is the request field at fault; `details` are fields beside the message.
    """

    def __init__(self, code: str, message: str, param: str | None = None, **details: int | str | list[str]) -> None:
        super().__init__(message)
        self.code = code
        self.message = message
        self.param = param
        self.details = details
        self.status = HTTP_STATUS[code]


class NotReadyError(RequestError):
    """The engine is not there now. It has not seen the request, which another server, or this one later, may answer."""

    def __init__(self, message: str) -> None:
        super().__init__("engine_unavailable", message)


def unknown_model(name: str) -> RequestError:
    message = f"the model {name[:100]!r} does not exist; GET /v1/models lists them"
    return RequestError("model_not_found", message, "model")
