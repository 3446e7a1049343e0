"""The chat page at `/`: static files that talk to OpenAI's routes of the same server.

A browser gets them without an API key, because the page itself asks for one. They hold nothing of the server.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

from starlette.datastructures import Headers
from starlette.responses import Response
from starlette.types import ASGIApp, Receive, Scope, Send

FOLDER = Path(__file__).parent / "page"
_TYPES = {
    ".html": "text/html; charset=utf-8",
    ".css": "text/css; charset=utf-8",
    ".js": "text/javascript; charset=utf-8",
    ".svg": "image/svg+xml",
}
# Nothing but the page's own files runs or is fetched, whatever a model writes, and no text becomes markup. A data: URL
# shows an image that the user attached.
_POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' data:; connect-src 'self'; "
    "base-uri 'none'; form-action 'none'; frame-ancestors 'none'; require-trusted-types-for 'script'; "
    "trusted-types 'none'"
)
HEADERS: Mapping[str, str] = {
    "Content-Security-Policy": _POLICY,
    "X-Content-Type-Options": "nosniff",
    "X-Frame-Options": "DENY",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Cache-Control": "no-cache",
    "Vary": "Accept",
}


class _File(NamedTuple):
    body: bytes
    headers: Mapping[str, str]


class StaticPage:
    """Middleware that answers GET of the files of a page. All other requests go on to the application.

    `at` is the page for a browser, which asks for text/html, and whatever the application has there for a program.
    """

    def __init__(self, app: ASGIApp, folder: Path, at: str, prefix: str) -> None:
        self._app, self._at = app, at
        self._files = {f"{prefix}{path.name}": _file(path) for path in folder.iterdir()}
        self._files[at] = self._files.pop(f"{prefix}index.html")

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        file = self._files.get(scope["path"]) if scope["type"] == "http" else None
        if file is None or scope["method"] not in ("GET", "HEAD") or not self._wants(scope):
            await self._app(scope, receive, send)
        elif Headers(scope=scope).get("if-none-match") == file.headers["ETag"]:
            await Response(status_code=304, headers=file.headers)(scope, receive, send)
        else:
            await Response(file.body, headers=file.headers)(scope, receive, send)

    def _wants(self, scope: Scope) -> bool:
        return scope["path"] != self._at or "text/html" in Headers(scope=scope).get("accept", "")


class ChatPage(StaticPage):
    def __init__(self, app: ASGIApp) -> None:
        super().__init__(app, FOLDER, "/", "/page/")


def _file(path: Path) -> _File:
    body = path.read_bytes()
    tag = f'"{hashlib.sha256(body).hexdigest()[:16]}"'
    return _File(body, {"Content-Type": _TYPES[path.suffix], "ETag": tag, **HEADERS})
