"""Requests that two nodes answer: one computes the prompt, and the other decodes.

The prefill node gets the request first. As soon as it has computed the first blocks, the decode node gets the same
request, with the address of these blocks, and fetches them while the rest is computed. If anything goes wrong, the
decode node computes what it lacks. So its tokens are those of one node in every case.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator, Callable, Iterable
from contextlib import AbstractAsyncContextManager, asynccontextmanager, nullcontext
from dataclasses import replace

import httpx

from lmkit.log import get_logger
from lmkit.proxy.call import Call
from lmkit.proxy.config import NodeConfig, ProxyConfig
from lmkit.proxy.metrics import Metrics
from lmkit.proxy.policies import Choice
from lmkit.proxy.registry import BROKEN, Node, Registry
from lmkit.proxy.router import Router
from lmkit.web.auth import client_name, tenant_of
from lmkit.web.pair import Part
from lmkit.web.upstream import UnreachableError, Upstream, UpstreamError

log = get_logger(__name__)

PATHS = frozenset({"/v1/chat/completions", "/v1/completions", "/v1/responses", "/v1/messages", "/generate"})
Headers = list[tuple[bytes, bytes]]
Request = tuple[str, Headers, bytes]  # URL, headers, body
Added = Iterable[tuple[bytes, bytes]]


class Pairs:
    """Finds a prefill node for a request, and lets it compute the prompt."""

    def __init__(
        self, registry: Registry, upstream: Upstream, metrics: Metrics, router: Router, config: ProxyConfig
    ) -> None:
        self._registry, self._upstream, self._metrics = registry, upstream, metrics
        self._router, self._config = router, config

    def prompt_of(
        self, choice: Choice, call: Call, request: Callable[[Node, Call], Request]
    ) -> AbstractAsyncContextManager[Added]:
        """Headers for the chosen node, once a prefill node computes the prompt; none if it is to compute it itself.

        The prefill node goes on until the block ends.
        """
        node = self._prefill_node(choice, call)
        return nullcontext(()) if node is None else self._paired(node, choice, call, request)

    @asynccontextmanager
    async def _paired(
        self, node: Node, choice: Choice, call: Call, request: Callable[[Node, Call], Request]
    ) -> AsyncGenerator[Added]:
        begun = asyncio.Event()
        computing = asyncio.create_task(self._compute(node, choice.node, call, request, begun))
        waiting = asyncio.create_task(begun.wait())

        def give_up() -> None:  # checks call the node down
            computing.cancel()

        node.waiting[give_up] = call.model
        try:
            limit = self._config.pair_wait
            await asyncio.wait({computing, waiting}, timeout=limit, return_when=asyncio.FIRST_COMPLETED)
            self._metrics.pairs.labels("paired" if begun.is_set() else "left_out").inc()
            if begun.is_set():
                yield (Part("decode", kv_address(node.config)).header(),)
            else:
                computing.cancel()
                yield ()
        finally:
            node.waiting.pop(give_up, None)
            for task in (computing, waiting):
                task.cancel()
            await asyncio.gather(computing, waiting, return_exceptions=True)

    def _prefill_node(self, choice: Choice, call: Call) -> Node | None:
        decode = choice.node
        if decode.config.role != "decode" or call.path not in PATHS or choice.missing < self._config.pair_tokens:
            return None
        if call.routing.has_session:  # the prompt is made of tokens that the decode node keeps
            return None
        able = [
            node
            for node in self._registry.prefill_nodes(call.model)
            if (node.config.api_key is None) == (decode.config.api_key is None) and not self._is_slow(node, choice)
        ]
        if not able:
            return None
        return self._router.choose(able, replace(call.routing, keeper=None, tags=frozenset())).node

    def _is_slow(self, node: Node, choice: Choice) -> bool:
        """Whether what waits there will probably take longer than a request waits for it."""
        return bool(node.pace) and node.load / (node.pace or 1.0) > self._config.pair_wait

    async def _compute(
        self, node: Node, decode: Node, call: Call, request: Callable[[Node, Call], Request], begun: asyncio.Event
    ) -> None:
        """Send the prompt to a prefill node, and wait for its end. Sets `begun` when the first blocks are there."""
        url, headers, body = request(node, call)
        headers = [*headers, Part("prefill", _tenant(decode.config, call)).header()]
        with self._registry.using(node, call.routing.prompt):
            try:
                with self._registry.prefilling(node, call.routing.tokens):
                    start = time.perf_counter()
                    answer = await self._upstream.send("POST", url, headers, body)
                    try:
                        self._registry.answered(node, call.model, answer.status, time.perf_counter() - start)
                        if answer.status == 200:
                            begun.set()
                        while await answer.piece():
                            pass
                    finally:
                        answer.close()
                node.breaker.record(good=answer.status not in BROKEN)
            except UpstreamError as failure:
                if isinstance(failure, UnreachableError):
                    self._registry.failed(node, f"connections fail ({failure})")
                log.warning("node %s did not compute a prompt: %s", node.url, failure)
                node.breaker.record(good=False)


def kv_address(node: NodeConfig) -> str:
    """Where a prefill node gives its blocks. It cannot name another host than its own."""
    host = httpx.URL(node.url).host
    return f"[{host}]:{node.kv_port}" if ":" in host else f"{host}:{node.kv_port}"


def _tenant(decode: NodeConfig, call: Call) -> str:
    """The name that the decode node has for the client, see serve.auth.owner_of."""
    if decode.api_key is None:
        return "-"
    return tenant_of(decode.api_key, client_name(call.key, call.client, decode.api_key))
