"""Forwards one request to a node and the node's response to the client, byte for byte.

Before the first byte for the client, another node may take over, and after it if the journal of the answer is open.
An answer that is no stream is sent once it is whole, if it is not large. lmkit's nodes write it so that it can move.
Otherwise the client learns of a break. The request's body has been read whole, so it can be sent again.
"""

from __future__ import annotations

import asyncio
import functools
import secrets
import time
from collections.abc import Awaitable, Callable
from dataclasses import replace

import msgspec
from starlette.types import Receive

from lmkit.errors import RequestError
from lmkit.log import get_logger
from lmkit.proxy.answers import become_whole, check_answer, is_in_one, is_small, leaving_node
from lmkit.proxy.call import Call
from lmkit.proxy.downstream import DownstreamResponse
from lmkit.proxy.headers import to_client, to_node
from lmkit.proxy.metrics import Metrics
from lmkit.proxy.moves import Moves
from lmkit.proxy.pairs import Pairs
from lmkit.proxy.policies import Choice
from lmkit.proxy.registry import BROKEN, Node, Registry
from lmkit.proxy.retries import RetryBudget
from lmkit.proxy.router import Router, explanation
from lmkit.proxy.stop import Stop, breakable
from lmkit.proxy.stored import ASK_SECONDS, BATCHES, FILES, Keepers
from lmkit.proxy.stored import PATH as RESPONSES
from lmkit.proxy.tenants import named
from lmkit.web.errors import ERROR_HEADER, NOT_READY
from lmkit.web.ollama import LINES, STREAMS
from lmkit.web.resume import STREAM_HEADER, WHOLE_HEADER
from lmkit.web.upstream import Answer, BrokenError, SilentError, UnreachableError, Upstream, UpstreamError

log = get_logger(__name__)
STALL_SECONDS = 60.0  # without a byte from a node that sends a comment every 15 s; then the stream goes on elsewhere
_ERROR_HEADER, _NOT_READY = ERROR_HEADER.lower().encode(), NOT_READY.encode()
_AWAY = frozenset({_NOT_READY, b"shutting_down"})  # the engine has not seen the request
MAX_LIST_BYTES = 8 << 20  # of one page of a node's files or batches
WAIT_SECONDS = 0.1  # between looks for a node that is back


class _EngineDownError(Exception):
    """A node has no engine now. Its engine may have ended by this request, so the request is not sent at will."""


class Forwarder:
    """Forwards calls to the registry's nodes over one pool of connections."""

    def __init__(
        self,
        registry: Registry,
        upstream: Upstream,
        metrics: Metrics,
        router: Router,
        retries: RetryBudget,
        pairs: Pairs,
    ) -> None:
        self._registry = registry
        self._pairs = pairs
        self._retries = retries
        self._upstream = upstream
        self._metrics = metrics
        self._router = router
        self._own_via = b"lmkit-" + secrets.token_hex(8).encode()
        self._stored = Keepers(registry)

    async def keeper(self, id: str, call: Call, root: str = RESPONSES) -> Node | None:
        """The node that keeps what `id` names, below the path `root`, for the call's client."""
        self._check_loop(call)

        async def has(node: Node, path: str) -> bool:
            asked = replace(call, path=path, query=b"", body=b"")
            answer = await self._upstream.send("GET", *self._request(node, asked))
            answer.close()
            return answer.status == 200

        return await self._stored.keeper(root, id, bool(call.key or call.client), has)

    def may_keep(self, call: Call) -> list[Node]:
        """The healthy nodes that may keep something for the call's client."""
        return [node for node in self._stored.able(bool(call.key or call.client)) if node.healthy]

    async def listed(self, node: Node, call: Call) -> bytes | None:
        """What a node answers to a call without a body; None: it has no such route. Raises RequestError."""
        self._check_loop(call)
        failed = RequestError("bad_gateway", f"a node did not answer {call.method} {call.path}; try again")
        try:
            async with asyncio.timeout(ASK_SECONDS):
                answer = await self._upstream.send(call.method, *self._request(node, call))
                try:
                    if answer.status in (404, 405):
                        return None
                    check_answer(answer)
                    if answer.status != 200:
                        raise failed
                    if (body := await answer.body(MAX_LIST_BYTES)) is None:
                        raise failed
                    return body
                finally:
                    answer.close()
        except (UpstreamError, ValueError, TimeoutError):
            raise failed from None

    async def forward(
        self, call: Call, client: DownstreamResponse, receive: Receive, stop: Stop, node: Node | None = None
    ) -> None:
        """Forward a call, to `node` or to those of its model.

        If the client disconnects or `stop` is set, end at once and close the node's connection.

        Raises RequestError for an error that the client has not been told yet.
        """
        self._check_loop(call)
        async with breakable(client, receive, stop):
            await (self._relay(call, client) if node is None else self._to_one(node, call, client))

    def _check_loop(self, call: Call) -> None:
        if any(name == b"via" and self._own_via in value for name, value in call.headers):
            raise RequestError("bad_gateway", "a proxy loop: one of this proxy's nodes is the proxy itself")

    async def _to_one(self, node: Node, call: Call, client: DownstreamResponse) -> None:
        client.node = node.url
        with self._registry.using(node):
            try:
                answer = await self._upstream.send(call.method, *self._request(node, call))
                try:
                    check_answer(answer)
                    await self._pass_on(node, answer, call, client, [node], self._moves(call, 0.0))
                finally:
                    answer.close()
            except SilentError:
                raise RequestError("upstream_timeout", "the node did not answer in time") from None
            except ValueError:
                raise RequestError("invalid_request", "a header of the request cannot be sent on") from None
            except UpstreamError as failure:
                log.warning("node %s gave no usable answer to a request: %s", node.url, failure)
                raise RequestError("bad_gateway", "the node that keeps it did not answer") from None

    async def _relay(self, call: Call, client: DownstreamResponse) -> None:
        tried: list[Node] = []
        wait = max(self._registry.node_wait, self._registry.on_demand.get(call.model, 0.0))
        moves, sent_again = self._moves(call, wait), 0
        error: RequestError | None = None
        self._retries.earn()
        while candidates := await self._candidates(call, client, tried):
            choice = self._router.choose(candidates, call.routing)
            node = choice.node
            tried.append(node)
            client.node = node.url
            if call.routing.explained:
                resting = self._registry.resting(call.model)
                client.add_headers(explanation(choice, call.routing, len(candidates), resting))
            if len(tried) > 1:
                tried[-2].failovers += 1
            with self._registry.using(node, call.routing.prompt):
                try:
                    if await self._attempt(choice, call, client, tried, moves):
                        return
                except TimeoutError:  # of `leaving_node`
                    log.warning("node %s is down: a request that waited for its answer goes to another", node.url)
                    moves.leave()
                    self._record(node, good=False)
                except UnreachableError as failure:
                    if self._registry.failed(node, f"connections fail ({failure})"):
                        log.warning("node %s is down: connections fail", node.url)
                    self._record(node, good=False)
                except _EngineDownError:
                    self._not_ready(node)
                    moves.resend(node)
                except SilentError:
                    self._record(node, good=False)
                    raise RequestError("upstream_timeout", "the node did not answer in time") from None
                except ValueError:
                    raise RequestError("invalid_request", "a header of the request cannot be sent on") from None
                except BrokenError as failure:  # no failed check: a client may cause it at will
                    log.warning("node %s gave no usable answer to a request: %s", node.url, failure)
                    moves.resend(node)
                    self._record(node, good=False)
            if moves.total or call.journal.has_begun:  # a node has seen the request
                error = RequestError("bad_gateway", "no node answered the request")
            if client.started:
                error = RequestError("bad_gateway", "the node broke off in the middle of its answer")
            moves.look()
            if moves.are_over:
                break
            if moves.total > sent_again:  # a node has seen the request, so it may have cost something
                sent_again = moves.total
                if not self._retries.spend():
                    break
                await asyncio.sleep(self._retries.pause(sent_again))
            await client.wait(moves.pause)
        raise error or self._registry.absence(call.model)

    def _moves(self, call: Call, seconds: float) -> Moves:
        return Moves(call.journal, seconds, self._upstream.silence, lambda: self._registry.clock())

    def _not_ready(self, node: Node) -> None:
        if self._registry.failed(node, "its engine is not ready"):
            log.warning("node %s is down: its engine is not ready", node.url)

    def _may_wait(self, call: Call, moves: Moves) -> bool:
        """Whether a call may ask again, although no other node is there now."""
        return moves.may_wait() and self._registry.may_return(call.model, self._registry.clock())

    async def _candidates(self, call: Call, client: DownstreamResponse, tried: list[Node]) -> list[Node]:
        """The nodes to choose from. If there are none, wait for one that may come; then all may be tried again.

        Empty: no node can be expected.
        """
        if found := self._registry.candidates(call.model, tried):
            return found
        since = self._registry.clock()
        with self._registry.holding(call.model, call.routing.tokens):
            while not found and self._registry.may_return(call.model, since):
                tried.clear()
                await client.wait(WAIT_SECONDS)
                found = self._registry.candidates(call.model, tried)
        return found

    async def _attempt(
        self, choice: Choice, call: Call, client: DownstreamResponse, tried: list[Node], moves: Moves
    ) -> bool:
        """Send the call to one node and pass its response on.

        False: the node refuses work now, and another may take it.

        Raises UpstreamError only as long as nothing has been sent to the client.
        """
        node, start = choice.node, time.perf_counter()
        leaving = functools.partial(leaving_node, node, call, movable=moves.may_leave)
        async with self._pairs.prompt_of(choice, call, self._request) as added, leaving():
            with self._registry.prefilling(node, 0 if added else choice.missing):
                url, headers, body = self._request(node, call)
                answer = await self._upstream.send("POST", url, [*headers, *added], body)
        try:
            seconds = time.perf_counter() - start
            self._registry.answered(node, call.model, answer.status, seconds)
            self._metrics.first_byte.observe(seconds)
            goes_on = client.started or call.journal.has_begun
            begun = call.journal.begin(answer.headers.get(STREAM_HEADER))
            code = answer.headers.get(_ERROR_HEADER) if answer.status == 503 else None
            if code == b"shutting_down" and node.origin == "registered":
                node.leaving = True  # it is about to say so itself
            if code == _NOT_READY:
                self._not_ready(node)
            is_away = code in _AWAY or (goes_on and code not in (None, b"engine_unavailable"))
            if is_away and (call.last or goes_on) and self._may_wait(call, moves):
                return False
            if goes_on and not begun:
                if not client.started:
                    call.journal.forget()
                if client.started or _takes_notes(node):  # it cannot go on with the answer; others begin it anew
                    moves.move(None)
                    return False
            if answer.status == 503:
                if moves.may_resend and code == b"engine_unavailable":
                    raise _EngineDownError
                if self._registry.candidates(call.model, tried) and self._retries.spend():
                    return False
                if not call.last:
                    raise RequestError("queue_full", "the nodes of the model are busy")
            check_answer(answer)
            is_held = not call.journal.is_open and is_small(answer)
            if is_held and call.journal.reserve(int(answer.headers[b"content-length"])):
                if answer.is_whole:
                    await answer.read()
                else:
                    async with leaving():
                        await answer.read()
            whole = await self._pass_on(node, answer, call, client, tried, moves)
            self._record(node, good=whole and answer.status not in BROKEN)
            return whole or not call.journal.is_open
        finally:
            answer.close()

    def _record(self, node: Node, *, good: bool) -> None:
        if node.breaker.record(good=good):
            log.warning("node %s: requests fail one after the other, so it gets none for a while", node.url)

    async def _pass_on(
        self, node: Node, answer: Answer, call: Call, client: DownstreamResponse, tried: list[Node], moves: Moves
    ) -> bool:
        """Send the answer to the client. False: the node broke off. If the journal is open, another one goes on."""
        journal = call.journal
        if is_in_one(answer):
            events = bytearray()

            async def gather(_: bytes, ready: bytes) -> None:
                if not journal.reserve(len(ready)):
                    message = "the answer does not fit the proxy's memory for bodies; try again later"
                    raise RequestError("overloaded", message)
                events.extend(ready)

            if not await self._follow(node, answer, call, client, tried, moves, gather):
                return False
            become_whole(answer, bytes(events + journal.rest()))
        headers = to_client(answer.raw_headers)
        kinds = dict(headers)
        kind = kinds.get(b"content-type", b"").partition(b";")[0].strip().lower()
        stream = LINES.encode() if call.path in STREAMS else b"text/event-stream"
        is_stream = kind == stream and b"content-encoding" not in kinds
        if is_stream:  # an error event may have to be added
            headers = [(name, value) for name, value in headers if name != b"content-length"]
        if client.started and call.path == RESPONSES:
            self._stored.remember(f"resp_{journal.key}", node)  # it stores the response
        if not client.started:
            await client.start(answer.status, headers, events=is_stream)
        first = call.path in (RESPONSES, FILES, BATCHES) and answer.status == 200
        if answer.read_body is not None:
            if first:
                self._stored.learn(node, answer.read_body)
            if first and call.recorder is not None:
                await call.recorder.whole(answer.read_body)
            await client.end(answer.read_body)
            return True

        async def write(piece: bytes, ready: bytes) -> None:
            nonlocal first
            if first:
                self._stored.learn(node, piece)
                first = False
            if call.recorder is not None:
                await call.recorder.events(ready)
            await client.write(ready)

        if not await self._follow(node, answer, call, client, tried, moves, write):
            return False
        await client.write(journal.rest())
        await client.end()
        return True

    async def _follow(
        self, node: Node, answer: Answer, call: Call, client: DownstreamResponse, tried: list[Node], moves: Moves,
        take: Callable[[bytes, bytes], Awaitable[None]],
    ) -> bool:  # fmt: skip
        """Read the answer to its end. `take` gets each piece, and what of it and the last ones the client may have.

        False: the node broke off. If the journal is open, another one goes on; else the client has been told.
        """
        journal = call.journal
        try:
            async with leaving_node(node, call, movable=journal.is_open and moves.may_resend) as limit:
                while piece := await answer.piece():
                    limit.reschedule(None)  # a slow client is no silence of the node
                    await take(piece, journal.feed(piece))
                    if journal.is_open:
                        limit.reschedule(asyncio.get_running_loop().time() + STALL_SECONDS)
        except (UpstreamError, TimeoutError) as failure:
            if journal.is_complete:
                return True
            node.breaks += 1
            log.warning("node %s broke off in the middle of an answer: %s", node.url, failure)
            if isinstance(failure, SilentError):
                error = RequestError("upstream_timeout", "the node fell silent in the middle of its answer")
            else:
                error = RequestError("bad_gateway", "the node broke off in the middle of its answer")
            if journal.is_open:
                moves.move(node if isinstance(failure, BrokenError) else None)
            else:
                await client.fail(error)
            return False
        moves.look()
        if journal.is_open and (self._registry.candidates(call.model, tried) or self._may_wait(call, moves)):
            log.warning("node %s gave up an answer, which goes on at another", node.url)  # its error is held
            moves.move(node)
            return False
        return True

    def _request(self, node: Node, call: Call) -> tuple[str, list[tuple[bytes, bytes]], bytes]:
        """The URL, headers and body of a call to a node."""
        url = node.url + call.path
        if call.query:
            url += "?" + call.query.decode("latin-1").replace("#", "%23")
        added, body = named(node.config, call.key, call.client, call.body)
        body = body if call.form is None else call.form.written(msgspec.json.decode(body))
        headers = [*to_node(call.headers), *added]
        headers += [
            (b"accept-encoding", b"identity"),  # an error event cannot be added to a compressed stream
            (b"via", b"1.1 " + self._own_via),
        ]
        if node.key is not None:
            if _takes_notes(node) and call.form is None:
                headers += [call.journal.header(), (WHOLE_HEADER, b"1")]
                body = call.journal.known() + body
            headers.append((b"authorization", b"Bearer " + node.key.encode()))
        return url, headers, body


def _takes_notes(node: Node) -> bool:
    """Whether the node is asked to write notes, and gets those of other nodes: see `web.resume`."""
    return node.key is not None and node.config.tenants == "header"
