"""CORS: the web pages of other sites that may call this server from a browser. None may by default."""

from __future__ import annotations

from collections.abc import Sequence

from starlette.middleware.cors import CORSMiddleware
from starlette.types import ASGIApp, Receive, Scope, Send


def with_cors(app: ASGIApp, origins: Sequence[str], *, credentials: bool = False) -> ASGIApp:
    """`app`, whose answers pages of these origins may read. A preflight of any other page gets status 400.

    A page sends its own API key. With `credentials` it may also send cookies, which a login in front may need. The
    origins are named one by one: there is no "*", with which every page could send the cookies of its visitors.
    """
    checked = CORSMiddleware(
        app,
        allow_origins=origins,
        allow_methods=("GET", "POST", "DELETE", "OPTIONS"),
        allow_credentials=credentials,
        allow_private_network=True,  # a page of these origins may be a public one, and the server a private one
        allow_headers=("*",),  # OpenAI's JavaScript client sends some of its own
        expose_headers=("x-request-id", "retry-after") if origins else (),
    )
    if origins:
        return checked

    async def answer(scope: Scope, receive: Receive, send: Send) -> None:
        is_preflight = scope["type"] == "http" and scope["method"] == "OPTIONS"
        await (checked if is_preflight else app)(scope, receive, send)

    return answer
