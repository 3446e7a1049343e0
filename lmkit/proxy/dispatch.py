"""Sends a call to the models that its rule names: the first, then those that it falls back to, and a shadow's copy."""

from __future__ import annotations

import asyncio
from collections.abc import MutableMapping
from dataclasses import replace
from typing import Any

import msgspec
from starlette.types import Receive

from lmkit.errors import RequestError
from lmkit.log import get_logger
from lmkit.proxy.call import Call
from lmkit.proxy.downstream import DownstreamResponse
from lmkit.proxy.forward import Forwarder
from lmkit.proxy.journal import Journal
from lmkit.proxy.metrics import Metrics
from lmkit.proxy.stop import Stop
from lmkit.web.budget import Budget

FALL_BACK_ON = frozenset({"engine_unavailable", "bad_gateway", "upstream_timeout", "queue_full", "model_not_found"})

log = get_logger(__name__)


class Dispatcher:
    """Runs calls. Shadows run beside them, at most `max_shadows`; one more is left out."""

    def __init__(self, forwarder: Forwarder, bodies: Budget, metrics: Metrics, max_shadows: int) -> None:
        self._forwarder, self._bodies, self._metrics = forwarder, bodies, metrics
        self._max_shadows = max_shadows
        self._shadows = set[asyncio.Task[None]]()

    async def run(self, call: Call, client: DownstreamResponse, receive: Receive, stop: Stop) -> None:
        """Answer the client. Raises RequestError for an error that the client has not been told yet."""
        routing = call.routing
        if routing.shadow:
            self._shadow(_for_model(call, routing.shadow), stop)
        models = (routing.model, *routing.fallback)
        for model in models:
            last = model == models[-1]
            try:
                await self._forwarder.forward(replace(_for_model(call, model), last=last), client, receive, stop)
                return
            except RequestError as error:
                if last or client.started or error.code not in FALL_BACK_ON:
                    raise
                log.info("no node answers for %s, another model does: %s", model, error)

    async def close(self) -> None:
        """End the shadows."""
        for task in self._shadows:
            task.cancel()
        await asyncio.gather(*self._shadows, return_exceptions=True)

    def _shadow(self, call: Call, stop: Stop) -> None:
        bodies = self._bodies  # a copy must not take the memory that clients need
        if len(self._shadows) >= self._max_shadows or bodies.used + len(call.body) > bodies.total // 2:
            self._metrics.shadows.labels("left_out").inc()
            return
        task = asyncio.create_task(self._copy(call, stop))
        self._shadows.add(task)
        task.add_done_callback(self._shadows.discard)

    async def _copy(self, call: Call, stop: Stop) -> None:
        outcome = "failed"
        try:
            with self._bodies.share() as share:
                share.add(len(call.body))
                await self._forwarder.forward(
                    replace(call, journal=Journal(share), recorder=None), DownstreamResponse(_drop), _nothing, stop
                )
            outcome = "answered"
        except RequestError as error:
            log.debug("the copy for %s failed: %s", call.model, error)
        finally:
            self._metrics.shadows.labels(outcome).inc()


def _for_model(call: Call, model: str) -> Call:
    """The call with another model in its body. Other values keep their bytes."""
    if model == call.model:
        return call
    fields = msgspec.json.decode(call.body, type=dict[str, msgspec.Raw])
    body = msgspec.json.encode(fields | {"model": msgspec.Raw(msgspec.json.encode(model))})
    return replace(call, body=body, model=model)


async def _drop(message: MutableMapping[str, Any]) -> None:
    """The client of a shadow."""


async def _nothing() -> MutableMapping[str, Any]:
    await asyncio.Event().wait()
    raise AssertionError
