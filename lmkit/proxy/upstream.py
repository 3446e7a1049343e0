"""Requests to nodes over one pool of connections, and their answers, byte for byte."""

from __future__ import annotations

import asyncio
import os
import socket
import ssl
from collections.abc import AsyncGenerator, Generator, Iterable
from contextlib import contextmanager, suppress
from functools import cached_property

import aiohttp
import yarl
from aiohttp.abc import ResolveResult

from lmkit.log import get_logger
from lmkit.proxy.addresses import refusal

log = get_logger(__name__)

KEEP_ALIVE_SECONDS = 2.0  # of idle connections; less than the 5 s after which common servers close them
MAX_FIELD_BYTES = 64 << 10  # of one header
PIECE_BYTES = 64 << 10  # a body larger than this is sent in such pieces, with other work between them

Headers = Iterable[tuple[bytes, bytes]]


class UpstreamError(Exception):
    """A request to a node failed. The text gives the reason, and never quotes the node or the client."""


class UnreachableError(UpstreamError):
    """There is no connection to the node, so it has not seen the request."""


class SilentError(UpstreamError):
    """The node sent nothing for too long."""


class BrokenError(UpstreamError):
    """The node gave no answer that can be read, or broke off within one."""


class Answer:
    """A node's answer from its head on. `close` it in every case; only a whole one's connection is used again."""

    def __init__(self, response: aiohttp.ClientResponse) -> None:
        self._response = response
        self._whole: bytes | None = None
        self.status = response.status
        self.headers = {name.lower(): value for name, value in response.raw_headers}
        self.raw_headers = response.raw_headers
        protocol = response.connection and response.connection.protocol  # None: the answer is whole
        self._closed = None if protocol is None else protocol.closed
        if self._closed is not None:
            self._closed.add_done_callback(self._end)
        elif protocol is not None:  # its connection is closed already
            self._end()

    def _end(self, closed: asyncio.Future[None] | None = None) -> None:
        """End the body with the connection. aiohttp's parser (3.14) forgets it if a chunk has no length."""
        if closed is not None:
            closed.exception()  # or asyncio logs that nobody has asked for it
        body = self._response.content
        if not body.is_eof() and body.exception() is None:
            body.set_exception(aiohttp.ClientPayloadError())

    async def pieces(self) -> AsyncGenerator[bytes]:
        """The body as it arrives. Raises SilentError and BrokenError."""
        if self._whole is not None:
            yield self._whole
            return
        with _failures():
            async for piece in self._response.content.iter_any():
                yield piece

    async def read(self) -> None:
        """Wait for the whole body, so that `pieces` cannot fail. Raises SilentError and BrokenError."""
        self._whole = b"".join([piece async for piece in self.pieces()])

    def close(self) -> None:
        if self._closed is not None:
            self._closed.remove_done_callback(self._end)
        self._response.release()


class CheckedResolver(aiohttp.ThreadedResolver):
    """Names -> addresses that may be nodes. A node's name can come to mean a metadata service later."""

    async def resolve(
        self, host: str, port: int = 0, family: socket.AddressFamily = socket.AF_INET
    ) -> list[ResolveResult]:
        found = await super().resolve(host, port, family)
        if refused := [reason for entry in found if (reason := refusal(entry["host"], registered=True))]:
            log.warning("%s %s", host, refused[0])
            raise OSError(None, "an address that may not be a node")
        return found


class Upstream:
    """The connections to all nodes. They belong to one event loop; `close` them there.

    Cookies, proxies of the environment, redirections, and headers of its own are off.
    """

    def __init__(self, tls: ssl.SSLContext, *, connect_timeout: float, read_timeout: float) -> None:
        """`connect_timeout` bounds making a connection, `read_timeout` each silence of a node. Both are in seconds.

        A node that reads none of a request's body is silent, too.
        """
        self._tls, self._silence = tls, read_timeout
        self._timeout = aiohttp.ClientTimeout(total=None, connect=connect_timeout, sock_read=read_timeout)

    @cached_property
    def _session(self) -> aiohttp.ClientSession:
        return aiohttp.ClientSession(
            connector=aiohttp.TCPConnector(
                ssl=self._tls, limit=0, keepalive_timeout=KEEP_ALIVE_SECONDS, resolver=CheckedResolver()
            ),
            timeout=self._timeout,
            cookie_jar=aiohttp.DummyCookieJar(),
            skip_auto_headers=("accept", "accept-encoding", "content-type", "user-agent"),
            auto_decompress=False,
            max_field_size=MAX_FIELD_BYTES,
        )

    async def close(self) -> None:
        await self._session.close()

    async def send(self, method: str, url: str, headers: Headers, body: bytes | None = None) -> Answer:
        """The answer as soon as its head has arrived. `url` is sent as it is spelled.

        Raises UpstreamError, and ValueError for a header that cannot be sent.
        """
        fields = [(name.decode(), value.decode()) for name, value in headers]
        try:
            async with asyncio.timeout(None) as limit:
                data: bytes | AsyncGenerator[memoryview] | None = body
                if body is not None and len(body) > PIECE_BYTES:
                    fields.append(("content-length", str(len(body))))
                    data = _slices(body, limit, self._silence)
                with _failures():
                    response = await self._session.request(
                        method, yarl.URL(url, encoded=True), headers=fields, data=data, allow_redirects=False
                    )
        except TimeoutError:
            raise SilentError("it does not read the request") from None
        return Answer(response)


async def _slices(body: bytes, limit: asyncio.Timeout, silence: float) -> AsyncGenerator[memoryview]:
    """The body in pieces of `PIECE_BYTES`. If the next one is not wanted within `silence` seconds, the limit ends."""
    clock = asyncio.get_running_loop().time
    for start in range(0, len(body), PIECE_BYTES):
        with suppress(RuntimeError):  # the answer has begun, and the limit is over
            limit.reschedule(clock() + silence)
        yield memoryview(body)[start : start + PIECE_BYTES]
        await asyncio.sleep(0)
    with suppress(RuntimeError):
        limit.reschedule(None)


@contextmanager
def _failures() -> Generator[None]:
    """aiohttp's errors as ours."""
    try:
        yield
    except aiohttp.ClientConnectorError as error:
        known = error.errno is not None and error.errno > 0
        raise UnreachableError(os.strerror(error.errno or 0) if known else type(error).__name__) from None
    except aiohttp.ConnectionTimeoutError:
        raise UnreachableError("no connection in time") from None
    except aiohttp.ServerTimeoutError:
        raise SilentError("it sends nothing") from None
    except (aiohttp.ClientError, OSError) as error:
        raise BrokenError(type(error).__name__) from None
