"""Loading and unloading adapters in an engine process, one at a time."""

from __future__ import annotations

import asyncio
from typing import Any

from lmkit.errors import RequestError
from lmkit.turbo.transport import messages
from lmkit.turbo.transport.spawned import EngineProcess


class AdapterCalls:
    def __init__(self) -> None:
        self._answer: asyncio.Future[messages.AdapterSet] | None = None
        self._one = asyncio.Lock()

    async def set(self, process: EngineProcess, name: str, folder: str | None) -> str | None:
        """Load the adapter in `folder` and return its path; None: unload it. Raises RequestError."""
        async with self._one:
            self._answer = asyncio.get_running_loop().create_future()
            process.send_surely(messages.SetAdapter(name, folder))
            either: set[asyncio.Future[Any]] = {self._answer, process.listening}
            await asyncio.wait(either, return_when=asyncio.FIRST_COMPLETED)
            if not self._answer.done():
                raise RequestError("engine_unavailable", "the engine ended")
            done = self._answer.result()
            if done.error:
                raise RequestError(done.code, done.error)
            return done.path

    def take(self, event: messages.AdapterSet) -> None:
        if self._answer is not None and not self._answer.done():
            self._answer.set_result(event)
