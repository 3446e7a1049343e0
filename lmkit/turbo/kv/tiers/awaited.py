"""Loads of blocks that another engine is computing. Each has a thread and a connection of its own.

The blocks come in order. The other engine answers for each one as soon as it keeps it, and at the latest after
WAIT_SECONDS that it does not yet. A load ends early if the first block does not come within FIRST_SECONDS, if the
load's own time is up, or if the other engine is gone. The scheduler then computes the rest.
"""

from __future__ import annotations

import threading
import time
from collections import Counter
from collections.abc import Callable
from contextlib import suppress

from lmkit.errors import ConfigError
from lmkit.turbo.kv.tiers import wire
from lmkit.turbo.kv.tiers.failures import Failures
from lmkit.turbo.plan import Load

FIRST_SECONDS = 1.0  # the other engine has begun when it is named, so that its first block is on its way
ANSWER_SECONDS = wire.WAIT_SECONDS + 0.5  # for one answer
FAILURES = (OSError, RuntimeError, ValueError, MemoryError, ConfigError)

Fetch = Callable[[bytes, memoryview], bool]  # fills the memory with a block; False = a miss
Place = Callable[[bytes, int, Fetch], str | None]  # loads a block, and says where it was found
End = Callable[[Load, dict[str, int]], None]


class AwaitedLoads:
    """`place` loads one block from a tier of this engine, or else by the function that it gets.

    `end` is called once for each load, with the number of its blocks that were loaded, by tier.
    """

    def __init__(self, kind: wire.Kind, place: Place, end: End) -> None:
        self._kind, self._place, self._end = kind, place, end
        self.failures = Failures()
        self._cancelled: dict[int, threading.Event] = {}  # of each load that has not ended

    def start(self, load: Load) -> None:
        self._cancelled[load.job] = threading.Event()
        threading.Thread(target=self._run, args=(load,), name="kv-await", daemon=True).start()

    def cancel(self, job: int) -> None:
        """End a load soon. An unknown one has ended."""
        if (cancelled := self._cancelled.get(job)) is not None:
            cancelled.set()

    def close(self) -> None:
        for job in list(self._cancelled):
            self.cancel(job)

    def _run(self, load: Load) -> None:
        source = _Source(load, self._kind, self._cancelled[load.job])
        hits: Counter[str] = Counter()
        try:
            for key, block in zip(load.keys, load.blocks, strict=True):
                tier = self._place(key, block, source.fetch)
                if tier is None:
                    break
                hits[tier] += 1
        except FAILURES as error:
            self.failures.note("fetching KV that another engine computes", error)
        finally:
            source.close()
            del self._cancelled[load.job]
            self._end(load, dict(hits))


class _Source:
    """The engine that computes the blocks of a load."""

    def __init__(self, load: Load, kind: wire.Kind, cancelled: threading.Event) -> None:
        self._load, self._kind, self._cancelled = load, kind, cancelled
        self._link: wire.Link | None = None
        now = time.monotonic()
        self._first, self._last = now + FIRST_SECONDS, now + load.seconds  # when it gives up

    def fetch(self, key: bytes, out: memoryview) -> bool:
        """Wait for a block. Raises OSError if the engine is gone or slow."""
        if self._link is None:
            self._link = wire.connect(wire.address_of(self._load.source, "kv_from"), self._kind)
        while not self._cancelled.is_set() and time.monotonic() < min(self._first, self._last):
            if self._link.fetch(wire.WAIT, key, out, ANSWER_SECONDS):
                self._first = self._last
                return True
        return False

    def close(self) -> None:
        if self._link is not None:
            with suppress(OSError):
                self._link.close()
