"""The HTTP server around the application.

FastAPI and uvicorn take most of a second to import. Therefore this is a module of its own, which is imported while the
engine starts.
"""

from __future__ import annotations

from collections.abc import Callable

from lmkit.config import ServerConfig
from lmkit.serve.app import create_app
from lmkit.text import Tokenizer
from lmkit.turbo.transport.async_engine import AsyncEngine
from lmkit.web.server import HttpServer
from lmkit.web.tls import Certificate

FLUSH_SECONDS = 3  # for complete responses to reach slow clients at the end


def http_server(
    engine: AsyncEngine,
    tokenizer: Tokenizer,
    config: ServerConfig,
    on_ready: Callable[[], None],
    tls: Certificate | None = None,
) -> HttpServer:
    """A server for one engine, to be given a listening socket."""
    app = create_app(engine, tokenizer, config)

    def ready() -> None:
        app.state.batches.start()
        on_ready()

    return HttpServer(
        app,
        ready,
        flush_seconds=FLUSH_SECONDS,
        tls=tls,
        limit_each=config.max_connections_per_address,
    )
