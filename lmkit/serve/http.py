"""The HTTP server around the application.

FastAPI and uvicorn take most of a second to import. Therefore this is a module of its own, which is imported while the
engine starts.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, Callable
from contextlib import AsyncExitStack, asynccontextmanager

from fastapi import FastAPI

from lmkit.config import ServerConfig
from lmkit.serve.app import create_app
from lmkit.serve.load_log import load_logged
from lmkit.serve.serving import model_name
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
    return HttpServer(
        app,
        on_ready,
        beside=_beside(app, engine, config, tls),
        flush_seconds=FLUSH_SECONDS,
        tls=tls,
        limit_each=config.max_connections_per_address,
    )


@asynccontextmanager
async def _beside(
    app: FastAPI, engine: AsyncEngine, config: ServerConfig, tls: Certificate | None
) -> AsyncGenerator[None]:
    """What runs beside the HTTP server: batches, hooks, lines about the load, and gRPC."""
    app.state.batches.start()
    async with AsyncExitStack() as stack:
        stack.push_async_callback(app.state.serving.hooks.close)
        await stack.enter_async_context(load_logged({model_name(engine, config): engine.stats}))
        if config.grpc_port is not None:
            from lmkit.serve.rpc.server import serving

            await stack.enter_async_context(serving(app, engine, config, tls))
        yield
