"""Runs a proxy: its socket, its HTTP server, signals and drain."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import math
from collections.abc import AsyncGenerator, Callable

from starlette.types import ASGIApp

from lmkit.log import get_logger
from lmkit.proxy import dashboard
from lmkit.proxy.app import Proxy
from lmkit.proxy.auth import Access, authorize
from lmkit.proxy.config import ProxyConfig
from lmkit.proxy.reload import ConfigFile
from lmkit.web.access_log import AccessLog
from lmkit.web.chat_page import ChatPage, StaticPage
from lmkit.web.cors import with_cors
from lmkit.web.hosts import Hosts
from lmkit.web.listen import bind, is_loopback, listen, on_signals, url
from lmkit.web.resumable import Resumable
from lmkit.web.routes import WithV1
from lmkit.web.server import HttpServer
from lmkit.web.tls import Certificate, certificate
from lmkit.web.tracing import Traced

log = get_logger(__name__)
FIRST_CHECK_SECONDS = 0.5  # nodes that answer within it are known when the proxy is ready
_BREAK_OFF_SECONDS = 2  # for the last bytes of responses that are broken off


async def run(config: ProxyConfig, on_ready: Callable[[str], None], file: ConfigFile | None = None) -> None:
    """Serve until SIGTERM or SIGINT, then let requests finish for `drain_seconds`; a second signal ends them at once.

    `on_ready` gets the URL. SIGHUP reads `file` (the configuration) and the certificate again. Raises ConfigError if
    the address or the state file cannot be used.
    """
    tls = certificate(config.tls_cert, config.tls_key)
    with contextlib.closing(bind(config.host, config.port)) as listener:
        listen(listener)
        host = listener.getsockname()[0]
        async with Proxy(config, file) as proxy:
            if not is_loopback(host) and not proxy.keys.for_clients:
                log.warning("anyone who reaches %s may send requests: there are no api_keys", host)
            server = http_server(config, proxy, lambda: on_ready(url(listener, tls=bool(tls))), tls)
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(FIRST_CHECK_SECONDS):
                    await proxy.checked.wait()
            reload = functools.partial(_reload, proxy, tls) if tls or file else None
            on_signals(lambda: _drain(proxy, server), proxy.stop.set, reload)
            assert proxy.checks is not None
            # The checks end only by an error. Leaving the block raises it, which ends the process.
            proxy.checks.add_done_callback(lambda _: setattr(server, "should_exit", True))
            await server.serve(sockets=[listener])
    log.info("the proxy has ended")


def http_server(
    config: ProxyConfig, proxy: Proxy, on_ready: Callable[[], None], tls: Certificate | None = None
) -> HttpServer:
    """A server for one proxy, to be given a listening socket. A forwarded response keeps its node's own Date."""
    flush_seconds = math.ceil(config.drain_seconds) + _BREAK_OFF_SECONDS
    app: ASGIApp = ChatPage(proxy) if config.chat_page else proxy
    if config.dashboard:
        app = StaticPage(app, dashboard.PAGE, "/dashboard", "/dashboard/")
    app = with_cors(
        Resumable(app, lambda scope: authorize(proxy.keys, Access.USER, scope["headers"])),
        config.cors_origins,
        credentials=config.cors_credentials,
    )
    if not proxy.keys.for_clients:
        app = Hosts(app, (config.host, *config.allowed_hosts))
    app = WithV1(Traced(AccessLog(app)), config.root_path)
    return HttpServer(
        app,
        on_ready,
        beside=_rpc(app, proxy, flush_seconds, tls) if config.grpc_port is not None else None,
        flush_seconds=flush_seconds,
        tls=tls,
        date_header=False,
        files_each=2,
        limit_each=config.max_connections_per_address,
    )


@contextlib.asynccontextmanager
async def _rpc(app: ASGIApp, proxy: Proxy, flush_seconds: float, tls: Certificate | None) -> AsyncGenerator[None]:
    from lmkit.web.rpc.server import serving

    config = proxy.config
    assert config.grpc_port is not None
    async with serving(
        app,
        config.host,
        config.grpc_port,
        max_body_bytes=config.max_body_bytes,
        check_key=lambda headers: authorize(proxy.keys, Access.USER, headers),
        takes_requests=lambda: not proxy.draining,
        tls=tls,
        stop_seconds=flush_seconds,
    ):
        yield


def _reload(proxy: Proxy, tls: Certificate | None) -> None:
    proxy.reload()
    if tls is not None:
        tls.reload()


def _drain(proxy: Proxy, server: HttpServer) -> None:
    log.info("draining: %d requests, up to %g s", proxy.active, proxy.config.drain_seconds)
    proxy.draining = True
    server.should_exit = True
    asyncio.get_running_loop().call_later(proxy.config.drain_seconds, proxy.stop.set)
