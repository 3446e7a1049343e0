"""The HTTP server around the application.

FastAPI and uvicorn take most of a second to import. Therefore this is a module of its own, which is imported while the
engine starts.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import AsyncExitStack, asynccontextmanager

from fastapi import FastAPI

from lmkit.config import ServerConfig
from lmkit.serve.announce import announced
from lmkit.serve.app import create_app
from lmkit.serve.auth import ApiKeys
from lmkit.serve.load_log import load_logged
from lmkit.serve.pool import TAKES_REQUESTS, ModelPool
from lmkit.serve.warm import Line, read_lines, warmed
from lmkit.text import Tokenizer
from lmkit.web.server import HttpServer
from lmkit.web.tls import Certificate

FLUSH_SECONDS = 3  # for complete responses to reach slow clients at the end


def http_server(
    models: ModelPool,
    tokenizers: Sequence[Tokenizer],
    config: ServerConfig,
    on_ready: Callable[[], None],
    tls: Certificate | None = None,
) -> HttpServer:
    """A server for these models, to be given a listening socket."""
    lines = read_lines(config)
    app = create_app(models, tokenizers, config)
    return HttpServer(
        app,
        on_ready,
        beside=_beside(app, models, config, tls, lines),
        flush_seconds=FLUSH_SECONDS,
        tls=tls,
        limit_each=config.max_connections_per_address,
    )


@asynccontextmanager
async def _beside(
    app: FastAPI, models: ModelPool, config: ServerConfig, tls: Certificate | None, lines: list[Line]
) -> AsyncGenerator[None]:
    """What runs beside the HTTP server: batches, hooks, lines about the load, known prefixes, gRPC, and proxies."""
    app.state.batches.start()
    async with AsyncExitStack() as stack:
        stack.push_async_callback(models.models[0].serving.hooks.close)
        stats = {model.name: model.engine.stats for model in models.models}
        await stack.enter_async_context(load_logged(stats))
        if config.grpc_port is not None:
            from lmkit.web.rpc.server import PATH, serving

            keys = ApiKeys(app, config.api_keys, config.api_key_file)
            rpc = serving(
                app,
                config.host,
                config.grpc_port,
                max_body_bytes=config.max_body_bytes,
                check_key=lambda headers: keys.key(PATH, headers),
                takes_requests=lambda: models.health in TAKES_REQUESTS,
                tls=tls,
            )
            await stack.enter_async_context(rpc)
        await stack.enter_async_context(announced(models, config))
        await stack.enter_async_context(warmed(models, config, lines))
        yield
