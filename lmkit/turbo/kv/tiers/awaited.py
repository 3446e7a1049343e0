"""Loads of blocks that another engine is computing. Each has a thread and a connection of its own.

The blocks come in order, piece by piece while their layers are computed (filling.py). A block is loaded when all of it
has come. The other engine gives a sign at the latest after WAIT_SECONDS. A load ends early if nothing of the first
block comes within FIRST_SECONDS, if the load's own time is up, or if the other engine is gone. The scheduler then
computes the rest.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress

import numpy as np

from lmkit.errors import ConfigError
from lmkit.turbo.kv.tiers import wire
from lmkit.turbo.kv.tiers.failures import Failures
from lmkit.turbo.plan import Load

FIRST_SECONDS = 1.0  # the other engine has begun when it is named, so that its first block is on its way
ANSWER_SECONDS = wire.WAIT_SECONDS + 0.5  # for one frame
FAILURES = (OSError, RuntimeError, ValueError, MemoryError, ConfigError)

Find = Callable[[bytes, int], str | None]  # loads a block from a tier of this engine, and says where it was found
Place = Callable[[bytes, int, memoryview], None]  # loads a block with these bytes
End = Callable[[Load, list[str]], None]


class AwaitedLoads:
    """`find` loads the first blocks, and `place` those of the other engine.

    `end` is called once for each load, with the tier of each of its blocks that were loaded.
    """

    def __init__(self, kind: wire.Kind, find: Find, place: Place, end: End) -> None:
        self._kind, self._find, self._place, self._end = kind, find, place, end
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
        tiers: list[str] = []
        try:
            for key, block in zip(load.keys, load.blocks, strict=True):
                if (tier := self._find(key, block)) is None:
                    break
                tiers.append(tier)
            at = len(tiers)
            for key, block, data in zip(load.keys[at:], load.blocks[at:], source.blocks(load.keys[at:]), strict=False):
                self._place(key, block, data)
                tiers.append("peer")
        except FAILURES as error:
            self.failures.note("fetching KV that another engine computes", error)
        finally:
            source.close()
            del self._cancelled[load.job]
            self._end(load, tiers)


class _Source:
    """The engine that computes the blocks of a load."""

    def __init__(self, load: Load, kind: wire.Kind, cancelled: threading.Event) -> None:
        self._load, self._kind, self._cancelled = load, kind, cancelled
        self._link: wire.Link | None = None
        now = time.monotonic()
        self._first, self._last = now + FIRST_SECONDS, now + load.seconds  # when it gives up

    def blocks(self, keys: Sequence[bytes]) -> Iterator[memoryview]:
        """The blocks with `keys`, one after the other, until it gives up. Raises OSError if the engine is gone or
        slow."""
        for start in range(0, len(keys), wire.MAX_KEYS):
            part = keys[start : start + wire.MAX_KEYS]
            if self._link is None:
                self._link = wire.connect(wire.address_of(self._load.source, "kv_from"), self._kind)
            self._link.send(ANSWER_SECONDS, wire.HEAD.pack(wire.FOLLOW, len(part)), b"".join(part))
            count = 0
            while count < len(part):
                if not (run := self._run(self._link, count, len(part))):
                    return
                yield from run
                count += len(run)

    def _run(self, link: wire.Link, first: int, num_keys: int) -> list[memoryview]:
        """The next blocks, which come together. None if it gives up."""
        run: list[memoryview] = []
        filled = 0
        while not self._cancelled.is_set() and time.monotonic() < min(self._first, self._last):
            frame, data = link.frame(ANSWER_SECONDS, num_keys, self._kind.block_bytes)
            if frame == wire.NOTHING:
                continue
            if not run:
                run = [np.empty(self._kind.block_bytes, np.uint8).data for _ in range(frame.num_blocks)]
            if not frame.nbytes or frame[:3] != (first, len(run), filled):
                raise wire.WireError("a frame at another place")
            self._first, size = self._last, frame.end - filled
            for i, block in enumerate(run):
                block[filled : frame.end] = data[i * size : (i + 1) * size]
            if (filled := frame.end) == self._kind.block_bytes:
                return run
        return []

    def close(self) -> None:
        if self._link is not None:
            with suppress(OSError):
                self._link.close()
