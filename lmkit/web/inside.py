"""Requests that a server or proxy makes to its own routes, so that each takes the same way as a client's."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterable
from typing import Any

from starlette.types import ASGIApp, Message


async def call(
    app: ASGIApp,
    path: str,
    body: bytes,
    on_message: Callable[[Message], Awaitable[None]],
    *,
    headers: Iterable[tuple[bytes, bytes]] = (),
    state: dict[str, Any] | None = None,
    client: tuple[str, int] | None = None,
) -> None:
    """POST JSON to a route of `app`. `on_message` gets the start and each part of the answer, as ASGI has them.

    Cancel it to leave as a client leaves. `state` may name the request's owner, which then needs no key.
    """
    sent = False

    async def receive() -> Message:
        nonlocal sent
        if sent:
            await asyncio.Event().wait()  # a client that stays
        sent = True
        return {"type": "http.request", "body": body, "more_body": False}

    scope = {
        "type": "http",
        "asgi": {"version": "3.0", "spec_version": "2.3"},
        "http_version": "1.1",
        "method": "POST",
        "scheme": "http",
        "path": path,
        "raw_path": path.encode(),
        "query_string": b"",
        "root_path": "",
        "headers": [(b"content-type", b"application/json"), *headers],
        "client": client,
        "server": None,
        "state": state if state is not None else {},
    }
    await app(scope, receive, on_message)
