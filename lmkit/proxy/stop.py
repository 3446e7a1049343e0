"""What breaks requests off: a client that leaves, and a proxy whose time to drain is over."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable
from contextlib import asynccontextmanager

from starlette.types import Receive

from lmkit.errors import RequestError
from lmkit.proxy.downstream import DownstreamResponse
from lmkit.web.receive import client_disconnected, until_disconnect


class Stop:
    """`set` calls all of `ends`, each of which breaks one request off."""

    def __init__(self) -> None:
        self.is_set = False
        self.ends = set[Callable[[], None]]()

    def set(self) -> None:
        self.is_set = True
        for end in list(self.ends):
            end()


@asynccontextmanager
async def breakable(client: DownstreamResponse, receive: Receive, stop: Stop) -> AsyncGenerator[None]:
    """Breaks the block off if the client disconnects or `stop` is set. Raises RequestError then."""
    stopped = RequestError("shutting_down", "the proxy is shutting down")
    if stop.is_set:
        raise stopped
    watcher = asyncio.ensure_future(until_disconnect(receive))
    try:
        async with asyncio.timeout(None) as limit:

            def end(*_: object) -> None:
                # A disconnect is also reported of a client that has its whole response.
                if end in stop.ends and not client.finished:
                    limit.reschedule(0)  # a time that has passed

            stop.ends.add(end)
            watcher.add_done_callback(end)
            try:
                yield
            finally:
                stop.ends.discard(end)
    except TimeoutError:
        if not limit.expired():
            raise
        raise client_disconnected() if watcher.done() else stopped from None
    finally:
        watcher.cancel()
        watcher.add_done_callback(lambda ended: ended.cancelled() or ended.exception())
