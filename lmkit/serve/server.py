"""One front-end process: its socket, engine, HTTP server, signals and drain."""

from __future__ import annotations

import asyncio
import contextlib
import socket
from collections.abc import Callable, Coroutine
from typing import TYPE_CHECKING, Any

import msgspec

from lmkit import log
from lmkit.config import ServerConfig
from lmkit.environment import tokenize_serially
from lmkit.serve.pool import ModelPool, load_tokenizer
from lmkit.text import Tokenizer
from lmkit.web.listen import bind, listen, on_signals, url
from lmkit.web.tls import Certificate, certificate

if TYPE_CHECKING:
    from lmkit.web.server import HttpServer

Tokenizers = list[Tokenizer]
ServerFactory = Callable[[ModelPool, Tokenizers, ServerConfig, Callable[[], None], Certificate | None], "HttpServer"]

logger = log.get_logger(__name__)


def serve(models: ModelPool, config: ServerConfig, on_ready: Callable[[str], None]) -> int:
    """Serve until SIGTERM or SIGINT. The exit status is 0 after a drain.

    It is 1 if a second signal cut the drain short, or if the engine died and could not be started again.
    `on_ready` gets the URL once requests are accepted. Raises LMKitError if the server cannot start.
    """
    tokenize_serially()
    return asyncio.run(_serve(models, config, on_ready))


async def _serve(models: ModelPool, config: ServerConfig, on_ready: Callable[[str], None]) -> int:
    stop, stop_now = asyncio.Event(), asyncio.Event()
    tls = certificate(config.tls_cert, config.tls_key)
    on_signals(stop.set, stop_now.set, tls.reload if tls else None)
    with contextlib.closing(bind(config.host, config.port)) as sock:
        running = asyncio.ensure_future(_run(models, config, on_ready, sock, stop, tls))
        if await _first(running, stop_now.wait()):
            return running.result()
        logger.warning("second signal: not waiting for running requests")
        models.kill()
        running.cancel()
        await asyncio.wait({running})
        return 1


async def _run(
    models: ModelPool,
    config: ServerConfig,
    on_ready: Callable[[str], None],
    sock: socket.socket,
    stop: asyncio.Event,
    tls: Certificate | None,
) -> int:
    starting = asyncio.ensure_future(_start(models))
    if not await _first(starting, stop.wait()):
        starting.cancel()
        await asyncio.wait({starting})
        return 0
    tokenizers, http_server = starting.result()
    tending = asyncio.ensure_future(models.tend())
    try:
        listen(sock)  # only now: clients that come earlier are refused and do not wait
        config = msgspec.structs.replace(config, port=sock.getsockname()[1])  # proxies are told the one that was free
        server = http_server(models, tokenizers, config, lambda: on_ready(url(sock, tls=bool(tls))), tls)
        serving = asyncio.ensure_future(server.serve(sockets=[sock]))
        await _first(serving, stop.wait(), models.until_dead())
        is_dead = models.is_dead
        if is_dead:
            logger.critical("the server ends, because its engine has ended")
        else:
            logger.info("draining: %d requests have %g s to finish", models.num_open, config.drain_seconds)
        await models.shutdown(config.drain_seconds)
        server.should_exit = True
        await serving
        return int(is_dead)
    finally:
        tending.cancel()
        await models.shutdown()


async def _start(models: ModelPool) -> tuple[Tokenizers, ServerFactory]:
    """Start the engine of the only model, and at the same time load the front end's tokenizers and modules.

    Of several models no engine is started, but the memory that each will take is found.

    Raises LMKitError.
    """
    starting = asyncio.ensure_future(models.start())
    try:
        _, loaded = await asyncio.gather(starting, asyncio.to_thread(_load, models))
    except BaseException:
        starting.cancel()
        await asyncio.wait({starting})
        if not starting.cancelled() and starting.exception() is None:
            await models.shutdown()
        raise
    return loaded


def _load(models: ModelPool) -> tuple[Tokenizers, ServerFactory]:
    tokenizers = [load_tokenizer(model.engine) for model in models.models]
    from lmkit.serve.http import http_server

    return tokenizers, http_server


async def _first(work: asyncio.Future[Any], *events: Coroutine[Any, Any, Any]) -> bool:
    """Wait until `work` is done or one of the events has ended. True if `work` is done."""
    waiting = [asyncio.ensure_future(event) for event in events]
    try:
        await asyncio.wait({work, *waiting}, return_when=asyncio.FIRST_COMPLETED)
    finally:
        for event in waiting:
            event.cancel()
    return work.done()
