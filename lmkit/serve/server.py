"""One front end process: socket, engine, uvicorn, signals, drain."""

from __future__ import annotations

import asyncio
import contextlib
import signal
import socket
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lmkit import log
from lmkit.config import ServerConfig
from lmkit.errors import ConfigError
from lmkit.text import Tokenizer
from lmkit.turbo.transport.async_engine import AsyncEngine

if TYPE_CHECKING:
    import uvicorn

ServerFactory = Callable[[AsyncEngine, Tokenizer, ServerConfig], "uvicorn.Server"]

logger = log.get_logger(__name__)


def serve(engine: AsyncEngine, config: ServerConfig, announce: Callable[[str], None]) -> int:
    """Serve until SIGTERM or SIGINT. The exit status: 0 after a drain, 1 if a second signal cut it short.

    `announce` gets one line once requests are accepted. Raises the LMKitError that kept the server from starting.
    """
    return asyncio.run(_serve(engine, config, announce))


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


async def _serve(engine: AsyncEngine, config: ServerConfig, announce: Callable[[str], None]) -> int:
    stop, stop_now = asyncio.Event(), asyncio.Event()

    def on_signal() -> None:
        (stop_now if stop.is_set() else stop).set()

    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, on_signal)

    with contextlib.closing(bind(config.host, config.port)) as sock:
        running = asyncio.ensure_future(_run(engine, config, announce, sock, stop))
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
    config: ServerConfig,
    announce: Callable[[str], None],
    sock: socket.socket,
    stop: asyncio.Event,
) -> None:
    starting = asyncio.ensure_future(_start(engine))
    if not await _first(starting, stop.wait()):
        starting.cancel()
        await asyncio.wait({starting})
        return
    tokenizer, http_server = starting.result()
    try:
        listen(sock)
        server = http_server(engine, tokenizer, config)
        serving = asyncio.ensure_future(server.serve(sockets=[sock]))
        while not server.started:
            await asyncio.sleep(0.01)
        announce(f"serving {config.served_model_name or engine.model_path.name} on {url(sock)}")
        await _first(serving, stop.wait())
        logger.info("draining: %d requests have %g s to finish", engine.num_open, config.drain_seconds)
        await engine.shutdown(config.drain_seconds)
        server.should_exit = True
        await serving
    finally:
        await engine.shutdown()


async def _start(engine: AsyncEngine) -> tuple[Tokenizer, ServerFactory]:
    """Start the engine's process, and meanwhile load what the front end itself needs. Raises LMKitError."""
    starting = asyncio.ensure_future(engine.start())
    try:
        _, loaded = await asyncio.gather(starting, asyncio.to_thread(_load, engine.model_path))
    except BaseException:
        starting.cancel()
        await asyncio.wait({starting})
        if not starting.cancelled() and starting.exception() is None:
            await engine.shutdown()
        raise
    return loaded


def _load(model_path: Path) -> tuple[Tokenizer, ServerFactory]:
    tokenizer = Tokenizer.from_pretrained(model_path)
    from lmkit.serve.http import http_server

    return tokenizer, http_server


async def _first(work: asyncio.Future[Any], event: Coroutine[Any, Any, Any]) -> bool:
    """Wait for either; was it `work`?"""
    waiting = asyncio.ensure_future(event)
    both: set[asyncio.Future[Any]] = {work, waiting}
    try:
        await asyncio.wait(both, return_when=asyncio.FIRST_COMPLETED)
    finally:
        waiting.cancel()
    return work.done()
