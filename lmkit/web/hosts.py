"""The names by which a server without keys answers.

A web page may let its own name mean another address than before, such as 127.0.0.1 ("DNS rebinding"). The browser then
takes a server there for the page's own site, and hands over all that it answers. The name stays in the Host header.
So a server that asks for no key answers to addresses, which no page can make its own, to names that it was given, and
to names without a dot, such as those of a container network: nobody can own one in the public name system.
"""

from __future__ import annotations

import ipaddress
import re
from collections.abc import Iterable
from fnmatch import fnmatchcase

from starlette.types import ASGIApp, Receive, Scope, Send

from lmkit.errors import RequestError
from lmkit.web.access_log import note_error
from lmkit.web.errors import error_response

# What load balancers ask, under any name; and where nodes register, which needs a key in any case.
OPEN_PATHS = frozenset({"/health", "/ping", "/nodes"})
LOOPBACK = ("localhost", "*.localhost")  # browsers ask no name server for these (RFC 6761, 6.3)
MAX_SHOWN = 100
_LOCAL_NAME = re.compile(r"[a-z][a-z0-9_-]*")
_HOST = re.compile(r"(\[[0-9A-Fa-f:.]+\]|[^\[\]:/?#@\s]+)(?::\d{0,5})?")


class Hosts:
    """Middleware that refuses requests to other names with status 403."""

    def __init__(self, app: ASGIApp, names: Iterable[str]) -> None:
        """`names` may be patterns such as *.example.com; `*` is every name."""
        self._app, self._names = app, tuple(name.lower() for name in (*LOOPBACK, *names))

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and scope["path"] not in OPEN_PATHS:
            hosts = [value.decode("latin-1") for name, value in scope["headers"] if name == b"host"]
            if (wrong := next((host for host in hosts if not self.knows(host)), None)) is not None:
                error = _refusal(wrong)
                note_error(scope, error)
                await error_response(error, path=scope["path"])(scope, receive, send)
                return
        await self._app(scope, receive, send)

    def knows(self, host: str) -> bool:
        """Whether the value of a Host header is an address, a name without a dot or one of the names, with or without a
        port."""
        name = host_name(host)
        is_local = _is_address(name) or _LOCAL_NAME.fullmatch(name) is not None
        return bool(name) and (is_local or any(fnmatchcase(name, known) for known in self._names))


def host_name(host: str) -> str:
    """`LLM.example.com.:8000` -> `llm.example.com`; an empty text for what is no host."""
    found = _HOST.fullmatch(host)
    return found[1].lower().removesuffix(".") if found else ""


def _is_address(name: str) -> bool:
    try:
        ipaddress.ip_address(name.removeprefix("[").removesuffix("]"))
    except ValueError:
        return False
    return True


def _refusal(host: str) -> RequestError:
    name = host_name(host)[:MAX_SHOWN]
    if not name.isprintable() or not name:
        return RequestError("permission_denied", "the Host header names no host")
    return RequestError(
        "permission_denied",
        f"a server without keys answers to its own names only: start it with --allowed-host {name} if this is one",
    )
