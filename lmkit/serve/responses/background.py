"""Responses that are made while no client waits. They end with the server; the store then has one that failed."""

from __future__ import annotations

import asyncio
from contextlib import ExitStack
from typing import Any

import msgspec

from lmkit.errors import RequestError
from lmkit.serve.responses.answer import ResponsesAnswer
from lmkit.web.errors import public_error

OPEN = ("queued", "in_progress")  # the states of a response that has not ended


class Background:
    """The responses under way, by their id. Each is in the store from its beginning on."""

    def __init__(self) -> None:
        self._running: dict[str, tuple[ResponsesAnswer, asyncio.Task[None]]] = {}

    async def begin(self, answer: ResponsesAnswer, held: ExitStack) -> dict[str, Any]:
        """Start a prepared answer, and return it as it is now. `held` is closed at its end. Raises RequestError."""
        with held:
            response = await answer.keep(answer.response("queued"))
            if not response["store"]:
                raise RequestError("overloaded", "the response cannot be stored, so nobody could fetch it later")
            left = held.pop_all()
        task = asyncio.create_task(self._run(answer, left))
        self._running[answer.id] = answer, task
        task.add_done_callback(lambda _: self._running.pop(answer.id, None))
        return response

    def now(self, stored: bytes) -> bytes:
        """A stored response in its present state."""
        response = msgspec.json.decode(stored)
        if response["status"] not in OPEN:
            return stored
        running = self._running.get(response["id"])
        if running is None:
            error = {"code": "server_error", "message": "the server ended before the response did"}
            response |= {"status": "failed", "error": error}
        elif running[0].has_begun:
            response["status"] = "in_progress"
        return msgspec.json.encode(response)

    async def cancel(self, id: str) -> None:
        """End a response if it is under way, and keep it as cancelled."""
        if (running := self._running.get(id)) is not None:
            answer, task = running
            task.cancel()
            await asyncio.wait({task})
            if task.cancelled():
                await answer.keep(answer.response("cancelled"))

    async def _run(self, answer: ResponsesAnswer, held: ExitStack) -> None:
        with held:
            made = await asyncio.gather(answer.whole(), return_exceptions=True)
            if isinstance(error := made[0], Exception):
                await answer.keep(answer.failure(public_error(error)))
            else:
                answer.ended()
