"""uvicorn with lmkit's limits. The import takes most of a second, so import it while something else loads."""

from __future__ import annotations

import contextlib
import gc
import socket
from collections.abc import Callable, Iterator
from typing import Any

import uvicorn
from starlette.types import ASGIApp

from lmkit.garbage import search_rarely
from lmkit.web import connection
from lmkit.web.accept import Acceptor, most_connections
from lmkit.web.connection import Connection, Turns
from lmkit.web.tls import Certificate

USUALLY = gc.get_threshold()
CLOSE_SECONDS = 3.0  # for a client to confirm the end of a TLS connection


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
        files_each: int = 1,
        limit_each: int | None = None,
        beside: contextlib.AbstractAsyncContextManager[None] | None = None,
    ) -> None:
        """`files_each` is the number of open files that a connection needs, `limit_each` the most connections of one
        address. `beside` is entered before the first request and left after the last one."""
        self._beside, self._stack = beside, contextlib.AsyncExitStack()
        self._on_ready, self._files_each, self._turns, self._tls = on_ready, files_each, Turns(), tls
        self._limit_each = limit_each
        super().__init__(
            uvicorn.Config(
                app,
                http=Connection,
                ws="none",
                lifespan="off",
                log_config=None,
                log_level="critical",
                access_log=False,
                server_header=False,
                date_header=date_header,
                proxy_headers=False,
                timeout_graceful_shutdown=flush_seconds,
                timeout_keep_alive=connection.KEEP_ALIVE_SECONDS,
            )
        )

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        tls: dict[str, Any] = {}
        if self._tls:
            tls["ssl"] = self._tls.context
            tls |= {"ssl_handshake_timeout": connection.HEAD_SECONDS, "ssl_shutdown_timeout": CLOSE_SECONDS}
        limit = most_connections(self._files_each)
        self.servers = [
            Acceptor(sock, self._connection, limit=limit, limit_each=self._limit_each, tls=tls)  # type: ignore[misc]
            for sock in sockets or ()
        ]
        if self._beside is not None:
            await self._stack.enter_async_context(self._beside)
        gc.freeze()  # a search for garbage through all modules would stop every connection for 0.1 s
        search_rarely()
        self.started = True
        self._on_ready()

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        await super().shutdown(sockets)
        await self._stack.aclose()
        gc.set_threshold(*USUALLY)
        gc.unfreeze()

    def _connection(self, on_lost: Callable[[], None], has_room: bool) -> Connection:
        return Connection(
            config=self.config,
            server_state=self.server_state,
            app_state={},
            turns=self._turns,
            on_lost=on_lost,
            has_room=has_room,
        )

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:  # type: ignore[override]
        """uvicorn would stop listening before the drain.

        It would also raise the signal again at the end, so the exit status would never be 0.
        """
        yield
