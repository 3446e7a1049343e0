"""Forwards one request to a node and the node's response to the client, byte for byte.

Before the first byte of the response, another node may take over. After it, the client learns of a break. The request's
body has been read whole, so it can be sent again.
"""

from __future__ import annotations

import asyncio
import secrets
import time
from collections.abc import Collection
from dataclasses import dataclass
from random import Random

import httpx
from starlette.types import Receive

from lmkit.errors import RequestError
from lmkit.log import get_logger
from lmkit.proxy.config import ProxyConfig
from lmkit.proxy.downstream import DownstreamResponse
from lmkit.proxy.metrics import Metrics
from lmkit.proxy.policies import POLICIES
from lmkit.proxy.registry import Node, Registry
from lmkit.web.receive import client_disconnected, until_disconnect

log = get_logger(__name__)

# RFC 9110, 7.6.1: these headers concern one connection, not the message.
_HOP_BY_HOP = {b"connection", b"keep-alive", b"proxy-connection", b"proxy-authenticate", b"proxy-authorization", b"te",
               b"trailer", b"transfer-encoding", b"upgrade"}  # fmt: skip
# The client's credentials are for the proxy alone. The others are set anew for the node; otherwise a client could forge
# headers that a node behind a proxy trusts.
_NOT_SENT_ON = {b"authorization", b"x-api-key", b"cookie", b"host", b"content-length", b"expect", b"accept-encoding",
                b"forwarded", b"x-forwarded-for", b"x-forwarded-host", b"x-forwarded-proto", b"x-forwarded-port",
                b"x-real-ip"}  # fmt: skip
# A request that reached a node and got no response may have broken the node. It is tried once more, not on every node.
MAX_RESENDS = 1


@dataclass(frozen=True)
class Call:
    """One client request, whole."""

    path: str
    query: bytes
    headers: list[tuple[bytes, bytes]]
    body: bytes
    model: str


class Forwarder:
    """Forwards calls to the registry's nodes over one pool of connections."""

    def __init__(self, registry: Registry, client: httpx.AsyncClient, metrics: Metrics, config: ProxyConfig) -> None:
        self._registry = registry
        self._client = client
        self._metrics = metrics
        self._policy = POLICIES[config.policy]
        self._rng = Random()
        self._timeout = httpx.Timeout(config.read_timeout, connect=config.connect_timeout)
        self._own_via = b"lmkit-" + secrets.token_hex(8).encode()

    async def forward(self, call: Call, client: DownstreamResponse, receive: Receive, stop: asyncio.Event) -> None:
        """Forward a call. If the client disconnects or `stop` is set, end at once and close the node's connection.

        Raises RequestError for an error that the client has not been told yet.
        """
        if any(name == b"via" and self._own_via in value for name, value in call.headers):
            raise RequestError("bad_gateway", "a proxy loop: one of this proxy's nodes is the proxy itself")
        relay = asyncio.create_task(self._relay(call, client))
        watchers = [asyncio.create_task(until_disconnect(receive)), asyncio.create_task(stop.wait())]
        try:
            await asyncio.wait([relay, *watchers], return_when=asyncio.FIRST_COMPLETED)
            if client.finished:  # a disconnect is also reported of a client that has its whole response
                await relay
        finally:
            left, stopped = (watcher.done() for watcher in watchers)
            unfinished = not relay.done()
            for task in (relay, *watchers):
                task.cancel()
            await asyncio.gather(relay, *watchers, return_exceptions=True)
        if not unfinished:
            relay.result()
        elif left:
            raise client_disconnected()
        elif stopped:
            raise RequestError("shutting_down", "the proxy is shutting down")

    async def _relay(self, call: Call, client: DownstreamResponse) -> None:
        tried: list[Node] = []
        resends = 0
        error = self._registry.absence(call.model)
        while candidates := self._registry.candidates(call.model, tried):
            node = self._policy(candidates, self._rng)
            tried.append(node)
            if len(tried) > 1:
                tried[-2].failovers += 1
            with self._registry.using(node):
                try:
                    if await self._attempt(node, call, client, tried):
                        return
                except (httpx.ConnectError, httpx.ConnectTimeout) as failure:
                    if self._registry.failed(node, f"connections fail ({type(failure).__name__})"):
                        log.warning("node %s is down: connections fail", node.url)
                except httpx.TimeoutException:
                    raise RequestError("upstream_timeout", "the node did not answer in time") from None
                except httpx.LocalProtocolError:
                    raise RequestError("invalid_request", "a header of the request cannot be sent on") from None
                except httpx.TransportError as failure:  # not counted against the node: a client may cause it at will
                    log.warning("node %s gave no answer to a request: %s", node.url, type(failure).__name__)
                    resends += 1
            error = RequestError("bad_gateway", "no node answered the request")
            if resends > MAX_RESENDS:
                break
        raise error

    async def _attempt(self, node: Node, call: Call, client: DownstreamResponse, tried: Collection[Node]) -> bool:
        """Send the call to one node and pass its response on.

        False: the node refuses work now, and another may take it.

        Raises httpx.TransportError only as long as nothing has been sent to the client.
        """
        start = time.perf_counter()
        response = await self._client.send(self._request(node, call), stream=True)
        try:
            seconds = time.perf_counter() - start
            self._registry.answered(node, call.model, response.status_code, seconds)
            self._metrics.first_byte.observe(seconds)
            if response.status_code == 503 and self._registry.candidates(call.model, tried):
                return False
            if not 200 <= response.status_code <= 599:
                raise RequestError("bad_gateway", "the node answered with a status that does not exist")
            await self._pass_on(node, response, client)
        finally:
            await response.aclose()
        return True

    async def _pass_on(self, node: Node, response: httpx.Response, client: DownstreamResponse) -> None:
        headers = _end_to_end(response.headers.raw)
        kinds = dict(headers)
        kind = kinds.get(b"content-type", b"").partition(b";")[0].strip().lower()
        events = kind == b"text/event-stream" and b"content-encoding" not in kinds
        if events:  # an error event may have to be added
            headers = [(name, value) for name, value in headers if name != b"content-length"]
        await client.start(response.status_code, headers, events=events)
        try:
            async for piece in response.aiter_raw():
                await client.write(piece)
        except httpx.TransportError as failure:
            node.breaks += 1
            log.warning("node %s broke off in the middle of an answer: %s", node.url, type(failure).__name__)
            if isinstance(failure, httpx.TimeoutException):
                error = RequestError("upstream_timeout", "the node fell silent in the middle of its answer")
            else:
                error = RequestError("bad_gateway", "the node broke off in the middle of its answer")
            await client.fail(error)
        else:
            await client.end()

    def _request(self, node: Node, call: Call) -> httpx.Request:
        base = httpx.URL(node.url)
        target = base.raw_path.rstrip(b"/") + call.path.encode()
        if call.query:
            target += b"?" + call.query
        headers = [(name, value) for name, value in _end_to_end(call.headers) if name not in _NOT_SENT_ON]
        headers += [
            (b"accept-encoding", b"identity"),  # an error event cannot be added to a compressed stream
            (b"via", b"1.1 " + self._own_via),
        ]
        if node.config.api_key is not None:
            headers.append((b"authorization", b"Bearer " + node.config.api_key.encode()))
        url = base.copy_with(raw_path=target)
        extensions = {"timeout": self._timeout.as_dict()}
        return httpx.Request("POST", url, headers=headers, content=call.body, extensions=extensions)


def _end_to_end(headers: Collection[tuple[bytes, bytes]]) -> list[tuple[bytes, bytes]]:
    """`headers` with names in lower case, and without those that concern one connection only."""
    dropped = set(_HOP_BY_HOP)
    for name, value in headers:
        if name.lower() == b"connection":
            dropped.update(token.strip().lower() for token in value.split(b","))
    return [(name.lower(), value) for name, value in headers if name.lower() not in dropped]
