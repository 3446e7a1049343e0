"""Runs a proxy: the socket, limits on what a connection may do before its request is whole, and the way down."""

from __future__ import annotations

import asyncio
import contextlib
import math
import signal
import socket
from collections.abc import Callable, Iterator
from typing import Any

import h11
import uvicorn
from uvicorn.protocols.http.h11_impl import H11Protocol

from lmkit.errors import ConfigError
from lmkit.log import get_logger
from lmkit.proxy.app import MAX_HEAD_BYTES, Proxy
from lmkit.proxy.auth import is_loopback
from lmkit.proxy.config import ProxyConfig

log = get_logger(__name__)
HEAD_SECONDS = 10.0
FIRST_CHECK_SECONDS = 0.5  # nodes that answer within it are known before the proxy says that it is ready
_BREAK_OFF_SECONDS = 2  # for the last words of broken-off answers


async def run(config: ProxyConfig, on_ready: Callable[[str], None]) -> None:
    """Serve until SIGTERM or SIGINT, then let requests finish for `drain_seconds`; a second signal ends them at once.

    `on_ready` gets the URL. Raises ConfigError when the address cannot be used, or the state file.
    """
    listener = _listen(config.host, config.port)
    host, port = listener.getsockname()[:2]
    async with Proxy(config, loopback=is_loopback(host)) as proxy:
        if not is_loopback(host) and not config.api_keys:
            log.warning("anyone who reaches %s may send requests: there are no api_keys", host)
        url = f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"
        server = ProxyServer(config, proxy, lambda: on_ready(url))
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(FIRST_CHECK_SECONDS):
                await proxy.checked.wait()
        loop = asyncio.get_running_loop()
        for name in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(name, _end, proxy, server)
        assert proxy.checks is not None
        proxy.checks.add_done_callback(
            lambda _: setattr(server, "should_exit", True)
        )  # its error then ends the process
        await server.serve(sockets=[listener])
    log.info("the proxy has ended")


def _end(proxy: Proxy, server: uvicorn.Server) -> None:
    if proxy.draining:
        proxy.stop.set()
        return
    log.info("draining: %d requests, up to %g s", proxy.active, proxy.config.drain_seconds)
    proxy.draining = True
    server.should_exit = True
    asyncio.get_running_loop().call_later(proxy.config.drain_seconds, proxy.stop.set)


def _listen(host: str, port: int) -> socket.socket:
    try:
        family, _, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)[0]
        return socket.create_server(address[:2], family=family, backlog=1024)  # type: ignore[arg-type]
    except OSError as error:
        raise ConfigError(f"cannot listen on {host}:{port}: {error.strerror or error}") from None


class ProxyServer(uvicorn.Server):
    """uvicorn with this proxy's limits; it leaves signals to its caller."""

    def __init__(self, config: ProxyConfig, proxy: Proxy, on_ready: Callable[[], None]) -> None:
        self._on_ready = on_ready
        super().__init__(
            uvicorn.Config(
                proxy,
                http=_Protocol,
                ws="none",
                lifespan="off",
                log_config=None,
                log_level="critical",  # the application logs for itself
                access_log=False,
                server_header=False,
                date_header=False,  # a node's own headers are passed on
                proxy_headers=False,
                h11_max_incomplete_event_size=MAX_HEAD_BYTES,
                timeout_graceful_shutdown=math.ceil(config.drain_seconds) + _BREAK_OFF_SECONDS,
            )
        )

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        self._on_ready()

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:  # type: ignore[override]
        """uvicorn would raise the signal again in the end, and so never exit with 0."""
        yield


class _Protocol(H11Protocol):
    """Sends every piece at once, and closes a connection whose request head drips in too slowly."""

    _head_timer: asyncio.TimerHandle | None = None

    def connection_made(self, transport: Any) -> None:
        super().connection_made(transport)
        # asyncio does it only for sockets made with proto=IPPROTO_TCP; without it each answer waits 40 ms for an ACK.
        transport.get_extra_info("socket").setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._time_head()

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        self._time_head()

    def connection_lost(self, exc: Exception | None) -> None:
        self._stop_timer()
        super().connection_lost(exc)

    def _time_head(self) -> None:
        if self.conn.their_state is not h11.IDLE:
            self._stop_timer()
        elif self._head_timer is None:
            self._head_timer = self.loop.call_later(HEAD_SECONDS, self.transport.close)

    def _stop_timer(self) -> None:
        if self._head_timer is not None:
            self._head_timer.cancel()
            self._head_timer = None
