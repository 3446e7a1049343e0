"""Forwards one request to a node and the node's response to the client, byte for byte.

Before the first byte of the response, another node may take over. After it, the client learns of a break. The request's
body has been read whole, so it can be sent again.
"""

from __future__ import annotations

import asyncio
import functools
import secrets
import time
from dataclasses import dataclass
from random import Random

import httpx
from starlette.types import Receive

from lmkit.errors import RequestError
from lmkit.log import get_logger
from lmkit.proxy.config import ProxyConfig
from lmkit.proxy.downstream import DownstreamResponse
from lmkit.proxy.headers import to_client, to_node
from lmkit.proxy.metrics import Metrics
from lmkit.proxy.policies import POLICIES
from lmkit.proxy.registry import Node, Registry
from lmkit.proxy.tenants import named
from lmkit.web.errors import ERROR_HEADER
from lmkit.web.receive import client_disconnected, until_disconnect

log = get_logger(__name__)

BROKEN = frozenset({500, 502, 504})  # statuses that count against a node; 503 only says that it is busy
# A request that reached a node and got no response may have broken the node. It is tried once more, not on every node.
MAX_RESENDS = 1
WAIT_SECONDS = 0.1  # between looks for a node that is back


class _EngineDownError(Exception):
    """A node has no engine now. Its engine may have ended by this request, so the request is not sent at will."""


@dataclass(frozen=True)
class Call:
    """One client request, whole."""

    path: str
    query: bytes
    headers: list[tuple[bytes, bytes]]
    body: bytes
    model: str
    key: str = ""  # the client's; "" if clients have none
    client: str = ""  # the one that another proxy names


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
        while candidates := await self._candidates(call.model, tried):
            node = self._policy(candidates, self._rng)
            tried.append(node)
            if len(tried) > 1:
                tried[-2].failovers += 1
            with self._registry.using(node):
                try:
                    if await self._attempt(node, call, client, tried, movable=resends < MAX_RESENDS):
                        return
                except TimeoutError:  # of `_first_byte`
                    log.warning("node %s is down: a request that waited for its first byte goes to another", node.url)
                    resends += 1
                    self._record(node, good=False)
                except (httpx.ConnectError, httpx.ConnectTimeout) as failure:
                    if self._registry.failed(node, f"connections fail ({type(failure).__name__})"):
                        log.warning("node %s is down: connections fail", node.url)
                    self._record(node, good=False)
                except _EngineDownError:
                    if self._registry.failed(node, "its engine is not ready"):
                        log.warning("node %s is down: its engine is not ready", node.url)
                    resends += 1
                except httpx.TimeoutException:
                    self._record(node, good=False)
                    raise RequestError("upstream_timeout", "the node did not answer in time") from None
                except httpx.LocalProtocolError:
                    raise RequestError("invalid_request", "a header of the request cannot be sent on") from None
                except httpx.TransportError as failure:  # no failed check: a client may cause it at will
                    log.warning("node %s gave no usable answer to a request: %s", node.url, _reason(failure))
                    resends += 1
                    self._record(node, good=False)
            error = RequestError("bad_gateway", "no node answered the request")
            if resends > MAX_RESENDS:
                break
        raise error

    async def _candidates(self, model: str, tried: list[Node]) -> list[Node]:
        """The nodes to choose from. If there are none, wait for one that went down lately; then all may be tried again.

        Empty: no node can be expected.
        """
        while not (found := self._registry.candidates(model, tried)) and self._registry.may_return(model):
            tried.clear()
            await asyncio.sleep(WAIT_SECONDS)
        return found

    async def _attempt(
        self, node: Node, call: Call, client: DownstreamResponse, tried: list[Node], *, movable: bool
    ) -> bool:
        """Send the call to one node and pass its response on.

        False: the node refuses work now, and another may take it.

        Raises httpx.TransportError only as long as nothing has been sent to the client.
        """
        start = time.perf_counter()
        response = await self._first_byte(node, call, tried, movable=movable)
        try:
            seconds = time.perf_counter() - start
            self._registry.answered(node, call.model, response.status_code, seconds)
            self._metrics.first_byte.observe(seconds)
            if response.status_code == 503:
                if movable and response.headers.get(ERROR_HEADER) == "engine_unavailable":
                    raise _EngineDownError
                if self._registry.candidates(call.model, tried):
                    return False
            check_answer(response)
            whole = await self._pass_on(node, response, client)
            self._record(node, good=whole and response.status_code not in BROKEN)
        finally:
            await response.aclose()
        return True

    async def _first_byte(self, node: Node, call: Call, tried: list[Node], *, movable: bool) -> httpx.Response:
        """The head of the node's answer.

        Raises TimeoutError if the node goes down before it, another could answer, and the call is `movable`.
        """
        request = self._request(node, call)
        async with asyncio.timeout(None) as limit:
            abandon = functools.partial(limit.reschedule, 0)  # a time that has passed
            if movable:
                node.waiting[abandon] = (call.model, tried)
            try:
                return await self._client.send(request, stream=True)
            finally:
                node.waiting.pop(abandon, None)

    def _record(self, node: Node, *, good: bool) -> None:
        if node.breaker.record(good=good):
            log.warning("node %s: requests fail one after the other, so it gets none for a while", node.url)

    async def _pass_on(self, node: Node, response: httpx.Response, client: DownstreamResponse) -> bool:
        """Send the answer to the client. False: the node broke off."""
        headers = to_client(response.headers.raw)
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
            return False
        await client.end()
        return True

    def _request(self, node: Node, call: Call) -> httpx.Request:
        base = httpx.URL(node.url)
        target = base.raw_path.rstrip(b"/") + call.path.encode()
        if call.query:
            target += b"?" + call.query
        added, body = named(node.config, call.key, call.client, call.body)
        headers = [*to_node(call.headers), *added]
        headers += [
            (b"accept-encoding", b"identity"),  # an error event cannot be added to a compressed stream
            (b"via", b"1.1 " + self._own_via),
        ]
        if node.config.api_key is not None:
            headers.append((b"authorization", b"Bearer " + node.config.api_key.encode()))
        url = base.copy_with(raw_path=target)
        extensions = {"timeout": self._timeout.as_dict()}
        return httpx.Request("POST", url, headers=headers, content=body, extensions=extensions)


def check_answer(response: httpx.Response) -> None:
    """Raise RemoteProtocolError for an answer that cannot be passed on.

    A length beside chunks says two things about where the body ends (RFC 9112, 6.3). A redirection would lead the
    client past the proxy. 401 and 407 mean the proxy's own key, not the client's.
    """
    status, headers = response.status_code, response.headers
    if "content-length" in headers and "transfer-encoding" in headers:
        raise httpx.RemoteProtocolError("content-length beside transfer-encoding")
    if not 200 <= status <= 599 or 300 <= status <= 399:
        raise httpx.RemoteProtocolError(f"status {status}")
    if status in (401, 407):
        raise httpx.RemoteProtocolError(f"status {status}: check the node's api_key")


def _reason(failure: httpx.TransportError) -> str:
    """The name of the error. Its text may quote the client or the node, unless the text is ours."""
    ours = isinstance(failure, httpx.RemoteProtocolError) and failure.__cause__ is None
    return f"{type(failure).__name__} ({failure})" if ours else type(failure).__name__
