"""Requests to servers over one pool of connections, and their answers, byte for byte.

The client is small, because each request pays for what a client can do: there are no cookies, proxies of the
environment, redirections, codings and headers of its own.
"""

from __future__ import annotations

import asyncio
import functools
import ipaddress
import math
import os
import socket
import ssl
from asyncio.staggered import staggered_race
from collections import defaultdict
from collections.abc import Callable, Coroutine, Iterable
from typing import Any, NamedTuple

from lmkit.web.channel import BrokenError, Channel, SilentError, UnreachableError, UpstreamError
from lmkit.web.http1 import Head
from lmkit.web.tls import trusting

__all__ = ["Answer", "BrokenError", "SilentError", "UnreachableError", "Upstream", "UpstreamError", "client_tls"]

KEEP_ALIVE_SECONDS = 2.0  # of idle connections; less than the 5 s after which common servers close them
NAME_SECONDS = 10.0  # in which a name's addresses are not asked for again
NEXT_ADDRESS_SECONDS = 0.25  # after which the next address of a name is tried beside the first (RFC 8305)

Headers = Iterable[tuple[bytes, bytes]]
Resolve = Callable[[str, int], Coroutine[Any, Any, list[str]]]  # of a name and a port; raises UnreachableError, OSError


@functools.cache
def client_tls() -> ssl.SSLContext:
    """The TLS settings for servers on https: the authorities that httpx trusts, and those of LMKIT_CA_FILE, vouch."""
    import httpx

    return trusting(httpx.create_ssl_context(trust_env=False))


class Origin(NamedTuple):
    """Where connections lead."""

    is_tls: bool
    host: str
    port: int


class Answer:
    """An answer from its head on. `close` it in every case; only a whole one's connection is used again."""

    def __init__(self, upstream: Upstream, origin: Origin, channel: Channel, head: Head) -> None:
        self._upstream, self._origin, self._channel = upstream, origin, channel
        self.read_body: bytes | None = None  # the whole body, once `read` has it
        self._is_open = True
        self.status, self.raw_headers, self.headers = head.status, head.headers, head.fields

    @property
    def is_whole(self) -> bool:
        """Whether all of the body has come."""
        return self._channel.is_whole

    async def piece(self) -> bytes:
        """The next bytes of the body as they arrive; none at its end. Raises SilentError and BrokenError."""
        return await self._channel.piece()

    async def read(self) -> None:
        """Wait for the whole body. Raises SilentError and BrokenError."""
        self.read_body = await self.body()

    async def body(self, most: float = math.inf) -> bytes | None:
        """The whole body; None if it has more than so many bytes. Raises SilentError and BrokenError."""
        body = await self._channel.piece()
        while piece := await self._channel.piece():
            body += piece
            if len(body) > most:
                return None
        return body if len(body) <= most else None

    def close(self) -> None:
        if self._is_open:
            self._is_open = False
            self._upstream.release(self._origin, self._channel)


class Upstream:
    """The connections to several servers. They belong to one event loop; `close` them there."""

    def __init__(
        self, tls: ssl.SSLContext, *, connect_timeout: float, read_timeout: float, resolve: Resolve | None = None
    ) -> None:
        """`connect_timeout` bounds making a connection, `read_timeout` each silence of a server. Both are in seconds.

        A server that reads none of a request's body is silent, too. `resolve` finds the addresses of a name: those, and
        no others, are connected to.
        """
        self._resolve = resolve or addresses_of
        self._tls, self._connect_timeout, self.silence = tls, connect_timeout, read_timeout
        self._idle = defaultdict[Origin, list[Channel]](list)
        self.channels = set[Channel]()  # all that are open
        self._names: dict[tuple[str, int], tuple[float, asyncio.Task[list[str]]]] = {}
        self._sweeper: asyncio.TimerHandle | None = None

    async def close(self) -> None:
        if self._sweeper is not None:
            self._sweeper.cancel()
        for channel in self.channels:
            channel.close()
        await asyncio.sleep(0)  # the transports close their sockets in the next round

    async def send(self, method: str, url: str, headers: Headers, body: bytes | None = None) -> Answer:
        """The answer as soon as its head has arrived. `url` is sent as it is spelled.

        Raises UpstreamError, and ValueError for a header that cannot be sent.
        """
        origin, host, target = _parts(url)
        body = body or b""
        lines = [b"host: " + host, *(name + b": " + value for name, value in headers)]
        if body or method == "POST":
            lines.append(b"content-length: %d" % len(body))
        head = b"\r\n".join((method.encode() + b" " + target + b" HTTP/1.1", *lines, b"\r\n"))
        if not head.count(b"\r") == head.count(b"\n") == len(lines) + 2 or b"\0" in head:
            raise ValueError("a header with a line break or NUL")
        while True:
            channel = self._used_before(origin) or await self._connect(origin)
            try:
                return Answer(self, origin, channel, await channel.ask(method, head, body))
            except BrokenError:
                channel.release()
                # A server may close an idle connection just as the request comes. It has not seen that, or it has: then
                # only a request without effects is sent again at once.
                if method != "GET" or channel.num_exchanges == 1 or channel.has_begun:
                    raise
            except BaseException:
                channel.release()
                raise

    def release(self, origin: Origin, channel: Channel) -> None:
        """An answer is over."""
        if not channel.release():
            return
        loop = asyncio.get_running_loop()
        channel.idle_since = loop.time()
        self._idle[origin].append(channel)
        if self._sweeper is None:
            self._sweeper = loop.call_later(KEEP_ALIVE_SECONDS, self._sweep)

    def _used_before(self, origin: Origin) -> Channel | None:
        idle = self._idle.get(origin)
        oldest = asyncio.get_running_loop().time() - KEEP_ALIVE_SECONDS
        while idle:
            channel = idle.pop()
            if not channel.is_lost and channel.idle_since > oldest:
                return channel
            channel.close()
        return None

    def _sweep(self) -> None:
        """Close connections that have been idle for long."""
        loop = asyncio.get_running_loop()
        oldest = loop.time() - KEEP_ALIVE_SECONDS
        for origin, idle in list(self._idle.items()):
            for channel in idle:
                if channel.idle_since <= oldest:
                    channel.close()
            self._idle[origin] = [channel for channel in idle if channel.idle_since > oldest and not channel.is_lost]
            if not self._idle[origin]:
                del self._idle[origin]
        self._sweeper = loop.call_later(KEEP_ALIVE_SECONDS, self._sweep) if self._idle else None

    async def _connect(self, origin: Origin) -> Channel:
        try:
            async with asyncio.timeout(self._connect_timeout):
                addresses = await self._addresses(origin.host, origin.port)
                if len(addresses) == 1:
                    return await self._open(origin, addresses[0])
                attempts = [functools.partial(self._open, origin, address) for address in addresses]
                winner: Channel | None
                winner, _, errors = await staggered_race(attempts, NEXT_ADDRESS_SECONDS)
                if winner is None:
                    raise next(error for error in errors if error is not None)
                return winner
        except TimeoutError:
            raise UnreachableError("no connection in time") from None
        except OSError as error:
            # The numbers of these two mean other things.
            number = 0 if isinstance(error, (socket.gaierror, ssl.SSLError)) else error.errno
            raise UnreachableError(os.strerror(number) if number else type(error).__name__) from error

    async def _open(self, origin: Origin, address: str) -> Channel:
        tls: dict[str, Any] = {"ssl": self._tls, "server_hostname": origin.host} if origin.is_tls else {}
        loop = asyncio.get_running_loop()
        make = functools.partial(Channel, self.silence, self.channels.discard)
        channel: Channel
        _, channel = await loop.create_connection(make, address, origin.port, **tls)
        self.channels.add(channel)
        return channel

    async def _addresses(self, host: str, port: int) -> list[str]:
        try:
            ipaddress.ip_address(host)
            return [host]
        except ValueError:
            pass
        loop = asyncio.get_running_loop()
        since, asking = self._names.get((host, port), (-math.inf, None))
        if asking is None or loop.time() - since > NAME_SECONDS:
            asking = loop.create_task(self._resolve(host, port))
            self._names[host, port] = loop.time(), asking
            asking.add_done_callback(functools.partial(self._resolved, (host, port)))
        return await asyncio.shield(asking)

    def _resolved(self, name: tuple[str, int], asking: asyncio.Task[list[str]]) -> None:
        """Forget a name that was not found."""
        if asking.cancelled() or asking.exception() is not None:
            self._names.pop(name, None)


async def addresses_of(host: str, port: int) -> list[str]:
    """The addresses of a name, at least one. Raises UnreachableError and OSError."""
    try:
        found = await asyncio.get_running_loop().getaddrinfo(host, port, type=socket.SOCK_STREAM)
    except UnicodeError:
        raise UnreachableError("a name that no host can have") from None
    addresses = list(dict.fromkeys(str(entry[4][0]) for entry in found))
    if not addresses:
        raise UnreachableError("a name without an address")
    return addresses


@functools.lru_cache(1024)
def _origin(authority: str) -> tuple[Origin, bytes]:
    """`http://host:port` -> where it leads, and the header Host."""
    scheme, _, host = authority.partition("://")
    is_tls = scheme == "https"
    name, colon, port = host.rpartition(":")
    if not colon or host.endswith("]"):
        name, port = host, ""
    return Origin(is_tls, name.strip("[]"), int(port or (443 if is_tls else 80))), host.encode()


def _parts(url: str) -> tuple[Origin, bytes, bytes]:
    """Where a URL leads, the header Host, and the target. Raises ValueError for a target that cannot be sent."""
    start = url.find("/", url.find("://") + 3)
    authority, target = (url, "/") if start < 0 else (url[:start], url[start:])
    if " " in target:
        raise ValueError("a target with a space")
    return *_origin(authority), target.encode("latin-1")
