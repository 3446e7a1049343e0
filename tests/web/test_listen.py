"""The listening socket and the signals that end a server."""

from __future__ import annotations

import asyncio
import os
import signal
import socket

import pytest

from lmkit.errors import ConfigError
from lmkit.web.listen import bind, listen, on_signals, url


def test_addresses_that_cannot_be_had() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(ConfigError, match=f"^cannot listen on 127.0.0.1:{port}: Address already in use$"):
            bind("127.0.0.1", port)
    for host in ("256.0.0.1", "x" * 300):
        with pytest.raises(ConfigError, match=f"^cannot listen on {host}:0: "):
            bind(host, 0)


def test_url_of_a_socket() -> None:
    with bind("localhost", 0) as sock:
        listen(sock)
        assert url(sock).endswith(f":{sock.getsockname()[1]}")
    if socket.has_ipv6:
        try:
            sock = bind("::1", 0)
        except ConfigError:
            return  # this machine has no IPv6 address
        with sock:
            assert url(sock) == f"http://[::1]:{sock.getsockname()[1]}"


@pytest.mark.anyio
async def test_the_first_signal_and_the_later_ones() -> None:
    seen: list[str] = []
    on_signals(lambda: seen.append("first"), lambda: seen.append("again"))
    try:
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGINT):
            os.kill(os.getpid(), number)
            await asyncio.sleep(0.01)
    finally:
        for number in (signal.SIGTERM, signal.SIGINT):
            asyncio.get_running_loop().remove_signal_handler(number)
    assert seen == ["first", "again", "again"]
