"""One front end process: socket, engine, uvicorn, signals, drain."""

from __future__ import annotations

import asyncio
import contextlib
import signal
import socket
from collections.abc import Callable, Coroutine, Iterator
from typing import Any

import uvicorn

from lmkit import log
from lmkit.config import ServerConfig
from lmkit.errors import ConfigError
from lmkit.serve.app import create_app
from lmkit.serve.serving import model_name
from lmkit.text import Tokenizer
from lmkit.turbo.async_engine import AsyncEngine

FLUSH_SECONDS = 3.0  # how long answers that are complete may take to reach slow clients at the end

logger = log.get_logger(__name__)


def serve(engine: AsyncEngine, tokenizer: Tokenizer, config: ServerConfig, announce: Callable[[str], None]) -> int:
    """Serve until SIGTERM or SIGINT. The exit status: 0 after a drain, 1 if a second signal cut it short.

    `announce` gets one line once requests are accepted. Raises the LMKitError that kept the server from starting.
    """
    return asyncio.run(_serve(engine, tokenizer, config, announce))


def bind(host: str, port: int) -> socket.socket:
    """A bound socket that does not listen yet. Port 0 takes a free one. Raises ConfigError."""
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(
            host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
        sock = socket.socket(family, kind, protocol)
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        sock.bind(address)
    except (OSError, UnicodeError) as error:
        raise ConfigError(f"cannot listen on {host} port {port}: {error}") from None
    return sock


def listen(sock: socket.socket) -> None:
    """Only now, when requests can be served: until then clients are refused instead of kept waiting."""
    try:
        sock.listen(2048)
    except OSError as error:
        raise ConfigError(f"cannot listen on {url(sock)}: {error}") from None


def url(sock: socket.socket) -> str:
    host, port = sock.getsockname()[:2]
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


async def _serve(
    engine: AsyncEngine, tokenizer: Tokenizer, config: ServerConfig, announce: Callable[[str], None]
) -> int:
    stop, stop_now = asyncio.Event(), asyncio.Event()

    def on_signal() -> None:
        (stop_now if stop.is_set() else stop).set()

    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, on_signal)

    with contextlib.closing(bind(config.host, config.port)) as sock:
        running = asyncio.ensure_future(_run(engine, tokenizer, config, announce, sock, stop))
        if await _first(running, stop_now.wait()):
            running.result()
            return 0
        logger.warning("second signal: not waiting for running requests")
        engine.kill()
        running.cancel()
        await asyncio.wait({running})
        return 1


async def _run(
    engine: AsyncEngine,
    tokenizer: Tokenizer,
    config: ServerConfig,
    announce: Callable[[str], None],
    sock: socket.socket,
    stop: asyncio.Event,
) -> None:
    starting = asyncio.ensure_future(engine.start())
    if not await _first(starting, stop.wait()):
        starting.cancel()
        await asyncio.wait({starting})
        return
    starting.result()
    try:
        listen(sock)
        server = _Server(_uvicorn_config(create_app(engine, tokenizer, config)))
        serving = asyncio.ensure_future(server.serve(sockets=[sock]))
        while not server.started:
            await asyncio.sleep(0.01)
        announce(f"serving {model_name(engine, config)} on {url(sock)}")
        await _first(serving, stop.wait())
        logger.info("draining: %d requests have %g s to finish", engine.num_open, config.drain_seconds)
        await engine.shutdown(config.drain_seconds)
        server.should_exit = True
        await serving
    finally:
        await engine.shutdown()


async def _first(work: asyncio.Future[Any], event: Coroutine[Any, Any, Any]) -> bool:
    """Wait for either; was it `work`?"""
    waiting = asyncio.ensure_future(event)
    both: set[asyncio.Future[Any]] = {work, waiting}
    try:
        await asyncio.wait(both, return_when=asyncio.FIRST_COMPLETED)
    finally:
        waiting.cancel()
    return work.done()


class _Server(uvicorn.Server):
    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Signals are `_serve`'s: uvicorn would stop listening before the drain."""
        yield


def _uvicorn_config(app: Any) -> uvicorn.Config:
    return uvicorn.Config(
        app,
        http="h11",
        ws="none",
        lifespan="off",
        log_config=None,
        access_log=False,
        proxy_headers=False,
        server_header=False,
        timeout_graceful_shutdown=int(FLUSH_SECONDS),
    )
