"""One request of a batch on its way through the server's own routes.

An engine that ends takes all requests under way with it. They run again one by one, so that one that ends the engine
each time is found, and gets an error.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from contextlib import suppress
from typing import NamedTuple

import msgspec
from starlette.types import ASGIApp, Message

from lmkit.errors import RequestError
from lmkit.serve.batches.batch import Batch, Line, request_body
from lmkit.turbo.transport.async_engine import STOPPED
from lmkit.web.budget import Budget
from lmkit.web.errors import error_body
from lmkit.web.inside import call

REFUSED = ("engine_unavailable", "queue_full", "overloaded", "rate_limit_exceeded", "shutting_down")
MAX_DEATHS = 3  # of the engine while it works on a request, which then gets an error
FIRST_DELAY, MAX_DELAY = 0.25, 10.0  # seconds before a refused request is sent again


class Answer(NamedTuple):
    """What a route answered. `code` is that of its error; `is_lost` means that the engine ended while it worked."""

    status: int
    body: bytes  # JSON
    code: str | None = None
    is_lost: bool = False

    @classmethod
    def of(cls, status: int, body: bytes) -> Answer:
        if status == 200:
            return cls(status, body)
        error = msgspec.json.decode(body)["error"]
        return cls(status, body, error["code"], error["message"].startswith(STOPPED))

    @classmethod
    def failed(cls, error: RequestError) -> Answer:
        return cls(error.status, error_body(error), error.code)


class Sender:
    """Sends the requests of all batches."""

    def __init__(self, app: ASGIApp, answers: Budget, clock: Callable[[], float]) -> None:
        """`answers` bounds the memory of answers on their way to the disk."""
        self._app, self._answers, self._clock = app, answers, clock
        self._one_by_one = asyncio.Lock()  # for requests during which the engine ended

    async def send(self, batch: Batch, name: str, line: Line) -> Answer:
        """The answer of the route. A request during which the engine ended is sent again, one of them at a time."""
        async with self._one_by_one:
            pass  # those go first
        answer = await self._taken(batch, name, line)
        for _ in range(MAX_DEATHS - 1):
            if not answer.is_lost:
                break
            async with self._one_by_one:
                answer = await self._taken(batch, name, line)
        return answer

    async def _taken(self, batch: Batch, name: str, line: Line) -> Answer:
        """The answer, which may be an error, once the server has room and an engine for the request."""
        delay = FIRST_DELAY
        while (answer := await self._ask(batch, name, line)).code in REFUSED and not answer.is_lost:
            await asyncio.sleep(delay)
            delay = min(2 * delay, MAX_DELAY)
        return answer

    async def _ask(self, batch: Batch, name: str, line: Line) -> Answer:
        status, size, parts = 500, 0, bytearray()

        async def on_message(message: Message) -> None:
            nonlocal status, size
            if message["type"] == "http.response.start":
                status = message["status"]
                return
            part = message.get("body", b"")
            size += len(part)
            if share.refusal is None:
                with suppress(RequestError):  # the share then has the refusal
                    share.add(len(part))
                    parts.extend(part)

        body = request_body(line, max(batch.expires_at - self._clock(), 1.0))
        headers = [(b"x-request-id", name.encode())]
        with self._answers.share() as share:
            share.on_refusal = parts.clear
            await call(self._app, batch.endpoint, body, on_message, headers=headers, state={"owner": batch.owner})
            if size > (most := self._answers.each):
                return Answer.failed(RequestError("request_too_large", f"the answer is larger than {most} bytes"))
            if share.refusal is not None:
                return Answer.failed(RequestError("overloaded", share.refusal))
            return Answer.of(status, bytes(parts))
