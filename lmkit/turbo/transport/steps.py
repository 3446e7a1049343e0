"""The steps of one request on their way from the engine's process to their reader."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable

from msgspec.structs import replace

from lmkit.errors import RequestError
from lmkit.turbo.request import StepOutput

Rest = Callable[[], float] | None  # the seconds of a rest
TICK_SECONDS = 0.012  # rests end together, at multiples of it: several sends in a row wake their readers less often


class Steps:
    """Steps that wait for their reader. A reader may rest after each: the steps that come meanwhile become one.

    A step costs its reader a turn of the event loop, JSON, and a send on a socket. A fast model would spend a part of
    its time on them. The first tokens, the last ones and an error do not wait.
    """

    def __init__(self) -> None:
        self._items: deque[StepOutput | RequestError] = deque()
        self._arrived = asyncio.Event()
        self._is_resting = False

    def put(self, item: StepOutput | RequestError) -> None:
        self._items.append(item)
        if not self._is_resting or isinstance(item, RequestError) or item.finish_reason is not None:
            self._arrived.set()

    async def get(self, rest: Rest = None) -> StepOutput:
        """The next step. Raises the RequestError that ended the request.

        `rest` gives the seconds until the one after it. Without it each step of the engine comes by itself.
        """
        await self._arrived.wait()
        item = self._items.popleft()
        if isinstance(item, RequestError):
            raise item
        if rest is not None and item.token_ids:
            item = self._joined(item)
            if item.finish_reason is None:
                self._is_resting = True
                loop = asyncio.get_running_loop()
                loop.call_at(end_of_rest(loop.time(), rest()), self._wake)
        if not self._items or (self._is_resting and isinstance(self._items[0], StepOutput)):
            self._arrived.clear()
        return item

    def _joined(self, first: StepOutput) -> StepOutput:
        """`first` and the steps that wait behind it."""
        steps = [first]
        while self._items and isinstance(self._items[0], StepOutput):
            steps.append(self._items.popleft())  # type: ignore[arg-type]
        if len(steps) == 1:
            return first
        return replace(
            steps[-1],
            token_ids=[token for step in steps for token in step.token_ids],
            logprobs=[entry for step in steps for entry in step.logprobs],
            prompt_logprobs=first.prompt_logprobs,
            cached_tokens=first.cached_tokens,
            kv=first.kv,
            queue_seconds=first.queue_seconds,
            num_steps=sum(bool(step.token_ids) for step in steps),
        )

    def _wake(self) -> None:
        self._is_resting = False
        if self._items:
            self._arrived.set()


def end_of_rest(now: float, rest: float) -> float:
    """The last tick of a rest that begins now; without a tick in it, its end."""
    tick = (now + rest) // TICK_SECONDS * TICK_SECONDS
    return tick if tick > now else now + rest
