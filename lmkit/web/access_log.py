"""One line of the log for each request: its client, key and id, and why it was refused or failed.

It shows no prompts, no query strings and no keys. A path stands as it was sent, percent-encoded, so that no client can
write a second field or a second line.
"""

from __future__ import annotations

import logging
import time
from contextlib import ExitStack
from typing import Any

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from lmkit.errors import RequestError
from lmkit.hints import Reading
from lmkit.log import get_logger
from lmkit.web.auth import key_id
from lmkit.web.errors import remark
from lmkit.web.request_id import request_id, with_request_id

MAX_PATH_BYTES = 128
# What programs ask every few seconds. Good answers are logged at DEBUG.
REGULAR = frozenset({("GET", "/health"), ("GET", "/admin/nodes"), ("POST", "/nodes")})

IGNORED = b"x-lmkit-ignored"  # the fields of a request that were left out, see lmkit.hints

log = get_logger(__name__)


class AccessLog:
    """Outermost middleware: gives each request an id, which the answer carries, and logs a line for it at its end.

    `scope["state"]` has `held`, an ExitStack that is closed with the request.
    """

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        start, status, name = time.monotonic(), 0, request_id(scope["headers"])
        state: dict[str, Any] = scope.setdefault("state", {})

        async def watched(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                message["headers"] = with_request_id(message.get("headers", ()), name)
                if (found := state.get("ignored")) and (names := found.shown()):
                    message["headers"].append((IGNORED, names.encode()))
                    note(scope, ignored=names)
            await send(message)

        try:
            with ExitStack() as state["held"]:
                await self._app({**scope, "headers": with_request_id(scope["headers"], name)}, receive, watched)
        finally:
            regular = status == 200 and (scope["method"], scope["path"]) in REGULAR
            level = logging.DEBUG if regular else logging.INFO
            if log.isEnabledFor(level):
                fields = _fields(scope, status or 499, (time.monotonic() - start) * 1e3, name)
                log.log(level, "%s", _line(fields, state), extra={"fields": fields})


def note_error(scope: Scope, error: RequestError) -> None:
    """Keep the request's error for its line."""
    scope.setdefault("state", {})["error"] = error


def note_ignored(scope: Scope, found: Reading) -> None:
    """Keep what is left out of the request, which may still grow, for a header of the answer and for the line."""
    scope.setdefault("state", {})["ignored"] = found


def note(scope: Scope, **fields: str | int) -> None:
    """Add fields to the request's line."""
    scope.setdefault("state", {}).setdefault("notes", {}).update(fields)


def _fields(scope: Scope, status: int, milliseconds: float, name: str) -> dict[str, Any]:
    """What the line says, as a log in JSON has it."""
    address, _ = scope.get("client") or ("-", 0)
    state = scope["state"]
    fields = {
        "method": scope["method"],
        "path": _target(scope),
        "status": status,
        "duration_ms": round(milliseconds, 3),
        "client": address,
        "key": key_id(scope["headers"]),
        "request_id": name,
        "user": (state.get("user") or "")[:64],
        "error": state["error"].code if "error" in state else None,
        **state.get("notes", {}),
    }
    return {field: value for field, value in fields.items() if value not in (None, "")}


def _target(scope: Scope) -> str:
    raw = scope.get("raw_path") or scope["path"].encode()
    return str(raw[:MAX_PATH_BYTES].decode("ascii", "backslashreplace"))


def _line(fields: dict[str, Any], state: dict[str, Any]) -> str:
    head = f"{fields['method']} {fields['path']} {fields['status']} {fields['duration_ms']:.0f} ms"
    key = f" key={fields['key']}" if "key" in fields else ""
    return f"{head} from={fields['client']}{key} id={fields['request_id']}{_remarks(state)}"


def _remarks(state: dict[str, Any]) -> str:
    """Whom the request names as its user, what was noted, and why it was refused or failed."""
    user = f" user={state['user'][:64]!r}" if state.get("user") else ""
    notes = "".join(f" {name}={value}" for name, value in state.get("notes", {}).items())
    return user + notes + (remark(state["error"]) if "error" in state else "")
