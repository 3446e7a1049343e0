"""Threads for templates, tokenizing and detokenizing, so that neither the event loop nor a short text waits for long
texts.
"""

from __future__ import annotations

import asyncio
import contextlib
import contextvars
import ctypes
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import NamedTuple, TypeVar
from weakref import WeakValueDictionary

from starlette.types import Receive

from lmkit.errors import RequestError
from lmkit.text.fair_turns import TENANT
from lmkit.web.receive import while_connected

T = TypeVar("T")

# (characters of the longest text, threads). A tokenizer takes about 120 bytes for each character of a text and 0.4 s
# for a million, so all lanes together take less than 300 MB and the longest body's share.
GUIDED_THREADS, TENANT_TURNS = 32, 8  # for requests with a grammar, which wait for their tenant's turn to check it
LANES = ((1 << 16, 4), (1 << 20, 2), (1 << 62, 1))
QUICK_CHARS = 1 << 11  # a tokenizer needs less than a millisecond, and handing the work to a thread about as much
MAX_WAITING_CHARS = 1 << 26  # of texts that are worked on or wait
TRIM_CHARS = 1 << 18  # the memory of a longer text is given back to the system after the work


class _Lane(NamedTuple):
    max_chars: int
    threads: ThreadPoolExecutor


class TextPool:
    """Lanes for texts by their length, each with its own threads."""

    def __init__(self) -> None:
        self._lanes = [_Lane(size, ThreadPoolExecutor(threads, "lmkit-text")) for size, threads in LANES]
        self._guided = ThreadPoolExecutor(GUIDED_THREADS, "lmkit-guided")
        self._turns: WeakValueDictionary[str, asyncio.Semaphore] = WeakValueDictionary()
        self._num_chars = 0

    async def run(self, receive: Receive, num_chars: int, work: Callable[[], T], *, only_tokens: bool = False,
                  guided: str | None = None) -> T:  # fmt: skip
        """The result of `work` on a text, or ids, of this length.

        `guided` is the tenant of work that checks a grammar. It runs in threads of its own, a part of them for one
        tenant, so that nobody else waits for it.

        `only_tokens`: the work only tokenizes, so that of a very short text is done here and now.

        Work on a long text that has not begun is dropped if the client disconnects. Raises RequestError for that, and
        if too much waits.
        """
        if guided is not None:
            TENANT.set(guided)
            if num_chars <= self._lanes[0].max_chars:
                return await while_connected(receive, self._run_guided(guided, work))
        if only_tokens and num_chars <= QUICK_CHARS:
            return work()
        work = partial(contextvars.copy_context().run, work)
        lane = next(lane for lane in self._lanes if num_chars <= lane.max_chars)
        if lane is self._lanes[0]:
            return await asyncio.get_running_loop().run_in_executor(lane.threads, work)
        return await while_connected(receive, self._run_long(lane, num_chars, work))

    async def _run_guided(self, tenant: str, work: Callable[[], T]) -> T:
        async with self._turns.setdefault(tenant, asyncio.Semaphore(TENANT_TURNS)):
            run = partial(contextvars.copy_context().run, work)
            return await asyncio.get_running_loop().run_in_executor(self._guided, run)

    async def _run_long(self, lane: _Lane, num_chars: int, work: Callable[[], T]) -> T:
        if self._num_chars and self._num_chars + num_chars > MAX_WAITING_CHARS:
            raise RequestError("queue_full", "too many long texts are waiting to be tokenized; try again later")
        self._num_chars += num_chars
        try:
            long = _trimmed(work) if num_chars > TRIM_CHARS else work
            return await asyncio.get_running_loop().run_in_executor(lane.threads, long)
        finally:
            self._num_chars -= num_chars


def _trimmed(work: Callable[[], T]) -> Callable[[], T]:
    """`work`, followed by glibc giving free memory back. A thread's heap would keep what a long text took."""

    def run() -> T:
        try:
            return work()
        finally:
            with contextlib.suppress(AttributeError):  # another C library
                ctypes.CDLL(None).malloc_trim(0)

    return run
