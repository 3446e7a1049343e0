"""uvicorn with lmkit's limits. The import takes most of a second, so import it while something else loads."""

from __future__ import annotations

import asyncio
import contextlib
import socket
from collections.abc import Callable, Iterator
from typing import Any

import h11
import uvicorn
from starlette.types import ASGIApp
from uvicorn.protocols.http.h11_impl import H11Protocol

from lmkit.web.tls import Certificate

CLOSE_SECONDS = 3.0  # for a client to confirm the end of a TLS connection
HEAD_SECONDS = 10.0  # for the head of a connection's first request, and for one that has begun to arrive


class HttpServer(uvicorn.Server):
    """Serves `app` on sockets that it is given: `await server.serve(sockets=[sock])`, until `should_exit` is set.

    `on_ready` is called once requests are accepted. After `should_exit`, responses have `flush_seconds` to end. The
    caller handles signals, and the application logs its requests.
    """

    def __init__(
        self,
        app: ASGIApp,
        on_ready: Callable[[], None],
        *,
        flush_seconds: int,
        tls: Certificate | None = None,
        date_header: bool = True,
        max_head_bytes: int | None = None,
    ) -> None:
        self._on_ready, self._tls = on_ready, tls
        super().__init__(
            uvicorn.Config(
                app,
                http=_Protocol,
                ws="none",
                lifespan="off",
                log_config=None,
                log_level="critical",
                access_log=False,
                server_header=False,
                date_header=date_header,
                proxy_headers=False,
                h11_max_incomplete_event_size=max_head_bytes,
                timeout_graceful_shutdown=flush_seconds,
            )
        )

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Accept connections. uvicorn would give a TLS handshake a minute."""
        self.servers = [
            await asyncio.get_running_loop().create_server(
                self._protocol,
                sock=sock,
                backlog=self.config.backlog,
                ssl=self._tls.context if self._tls else None,
                ssl_handshake_timeout=HEAD_SECONDS if self._tls else None,
                ssl_shutdown_timeout=CLOSE_SECONDS if self._tls else None,
            )
            for sock in sockets or ()
        ]
        self.started = True
        self._on_ready()

    def _protocol(self) -> asyncio.Protocol:
        return _Protocol(config=self.config, server_state=self.server_state, app_state={})

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:  # type: ignore[override]
        """uvicorn would stop listening before the drain.

        It would also raise the signal again at the end, so the exit status would never be 0.
        """
        yield


class _Protocol(H11Protocol):
    """Closes a connection if the head of its request arrives too slowly."""

    _head_timer: asyncio.TimerHandle | None = None

    def connection_made(self, transport: Any) -> None:
        super().connection_made(transport)
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
