"""The listening socket of a server, and the signals that end it."""

from __future__ import annotations

import asyncio
import ipaddress
import itertools
import re
import signal
import socket
from collections.abc import Callable

from lmkit.errors import ConfigError

BACKLOG = 2048
ADDRESS = re.compile(r"[\w.-]+:\d{1,5}(/.*)?")  # a URL without http://


def bind(host: str, port: int) -> socket.socket:
    """A bound socket that does not listen yet. Port 0 takes a free one. Raises ConfigError."""
    try:
        # The protocol is passed on, because asyncio sets TCP_NODELAY only for sockets with proto=IPPROTO_TCP.
        family, kind, protocol, _, address = socket.getaddrinfo(
            host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
        sock = socket.socket(family, kind, protocol)
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        sock.bind(address)
    except (OSError, UnicodeError) as error:
        raise ConfigError(f"cannot listen on {_address(host, port)}: {_reason(error)}") from None
    return sock


def listen(sock: socket.socket) -> None:
    """Accept connections from now on. Raises ConfigError."""
    try:
        sock.listen(BACKLOG)
    except OSError as error:
        raise ConfigError(f"cannot listen on {_address(*sock.getsockname()[:2])}: {_reason(error)}") from None


def url(sock: socket.socket, *, tls: bool = False) -> str:
    return f"{'https' if tls else 'http'}://{_address(*sock.getsockname()[:2])}"


def is_loopback(host: str) -> bool:
    if host.lower() == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def on_signals(first: Callable[[], None], again: Callable[[], None], reload: Callable[[], None] | None = None) -> None:
    """Call `first` on the first SIGTERM or SIGINT, `again` on every later one, and `reload` on SIGHUP.

    Needs a running event loop. Without `reload`, SIGHUP ends the process, as it does by default.
    """
    if reload is not None:
        asyncio.get_running_loop().add_signal_handler(signal.SIGHUP, reload)
    actions = itertools.chain([first], itertools.repeat(again))
    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, lambda: next(actions)())


def _address(host: str, port: int) -> str:
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def _reason(error: Exception) -> str:
    return getattr(error, "strerror", None) or str(error)
