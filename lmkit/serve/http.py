"""uvicorn around the application. A module of its own: it takes most of a second to import, while the engine starts."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import uvicorn

from lmkit.config import ServerConfig
from lmkit.serve.app import create_app
from lmkit.text import Tokenizer
from lmkit.turbo.transport.async_engine import AsyncEngine

FLUSH_SECONDS = 3.0  # how long answers that are complete may take to reach slow clients at the end


def http_server(engine: AsyncEngine, tokenizer: Tokenizer, config: ServerConfig) -> uvicorn.Server:
    """A server for one engine, to be given a listening socket."""
    uvicorn_config = uvicorn.Config(
        create_app(engine, tokenizer, config),
        http="h11",
        ws="none",
        lifespan="off",
        log_config=None,
        access_log=False,
        proxy_headers=False,
        server_header=False,
        timeout_graceful_shutdown=int(FLUSH_SECONDS),
    )
    return _Server(uvicorn_config)


class _Server(uvicorn.Server):
    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Signals are the caller's: uvicorn would stop listening before the drain."""
        yield
