"""The blocks of another engine, which computes prompts (kv_listen there, kv_peer here).

A thread connects and connects again. The scheduler asks once for a prompt which of its blocks the peer keeps, within
ASK_SECONDS, and the loader thread fetches them one by one, each within BLOCK_SECONDS. A peer that is slow, gone or
wrong is a miss: its blocks are computed, and it is not asked again before the connection stands anew.
"""

from __future__ import annotations

import threading
import time
from collections import OrderedDict
from collections.abc import Sequence
from contextlib import suppress
from typing import NamedTuple

from lmkit.log import get_logger
from lmkit.turbo.kv.tiers import wire
from lmkit.turbo.kv.tiers.failures import Failures
from lmkit.turbo.kv.tiers.keys import KEY_BYTES

log = get_logger(__name__)

ASK_SECONDS = 0.05  # decoding waits for this at most once for each connection that fails
BLOCK_SECONDS = 0.25
RETRY_SECONDS = 1.0
FORGET_SECONDS = 0.5  # how long a block counts as missing at the peer
MAX_KNOWN = 1 << 16  # keys


class _Links(NamedTuple):
    ask: wire.Link  # the scheduler's
    load: wire.Link  # the loader's


class PeerTier:
    """Blocks of `kind.block_bytes` at the engine that listens at `address`.

    One thread may call `ask` and `last`, another one `read`, any one the rest. OSErrors become misses.
    """

    def __init__(self, address: tuple[str, int], kind: wire.Kind) -> None:
        self._address, self._kind = address, kind
        self.failures = Failures()
        self._mutex = threading.Lock()  # guards the index
        self._known: OrderedDict[bytes, float | None] = OrderedDict()  # None = kept, else missing up to this time
        self._links: _Links | None = None
        self._closed = threading.Event()
        self._connect()  # the first request is to find it
        self._thread = threading.Thread(target=self._reconnect, name="kv-peer", daemon=True)
        self._thread.start()

    @property
    def connected(self) -> bool:
        return self._links is not None

    def __contains__(self, key: bytes) -> bool:
        return self._links is not None and self._known.get(key, 0.0) is None

    def ask(self, keys: Sequence[bytes]) -> None:
        """Learn how many of `keys` the peer keeps, from the first on, unless that is known."""
        unknown = [key for key in keys[: wire.MAX_KEYS] if key not in self]
        if unknown and not self._is_missing(unknown[0]) and (count := self._counted(wire.HAS, unknown)) is not None:
            for key in unknown[:count]:
                self._note(key)
            for key in unknown[count : count + 1]:
                self._note(key, missing=True)

    def last(self, keys: Sequence[bytes]) -> int:
        """The number of `keys` up to the last one that the peer keeps. Of very many keys it looks at the last."""
        before = max(0, len(keys) - wire.MAX_KEYS)
        if not keys or self._is_missing(keys[-1]):
            return 0
        count = self._counted(wire.LAST, keys[before:])
        if count is not None:
            self._note(keys[before + count - 1] if count else keys[-1], missing=not count)
        return before + count if count else 0

    def _is_missing(self, key: bytes) -> bool:
        return (self._known.get(key) or 0.0) > time.monotonic()

    def _counted(self, op: bytes, keys: Sequence[bytes]) -> int | None:
        """The peer's answer to this question about `keys`, at most MAX_KEYS. None: there is none."""
        if (links := self._links) is None:
            return None
        try:
            links.ask.send(ASK_SECONDS, wire.HEAD.pack(op, len(keys)), b"".join(keys))
            answer = links.ask.take(wire.COUNT.size, ASK_SECONDS)
            links.ask.check(ASK_SECONDS, answer)
            (count,) = wire.COUNT.unpack(answer)
            if count > len(keys):
                raise wire.WireError("an answer of another form")
        except OSError as error:
            self._lost(links, error)
            return None
        return int(count)

    def read(self, key: bytes, out: memoryview) -> bool:
        """Fill `out` [block_bytes]. False = a miss, and the content of `out` is undefined."""
        links = self._links
        if links is None:
            return False
        try:
            found = links.load.fetch(key, out, BLOCK_SECONDS)
        except OSError as error:
            self._lost(links, error)
            return False
        if not found:
            self._note(key, missing=True)
        return found

    def _note(self, key: bytes, *, missing: bool = False) -> None:
        assert len(key) == KEY_BYTES
        with self._mutex:
            self._known[key] = time.monotonic() + FORGET_SECONDS if missing else None
            self._known.move_to_end(key)
            while len(self._known) > MAX_KNOWN:
                self._known.popitem(last=False)

    def _lost(self, links: _Links, error: OSError) -> None:
        self.failures.note("fetching KV from the peer", error)
        with self._mutex:
            if self._links is not links:
                return  # the other thread was first
            self._links = None
            self._known.clear()
        for link in links:
            link.close()

    def _connect(self) -> None:
        made: list[wire.Link] = []
        try:
            for _ in _Links._fields:
                made.append(wire.connect(self._address, self._kind))
        except OSError as error:
            for link in made:
                link.close()
            self.failures.note("connecting to the kv_peer", error)
            return
        self._links = _Links(*made)
        log.info("KV of the peer at %s:%d is at hand", *self._address)

    def _reconnect(self) -> None:
        while not self._closed.wait(RETRY_SECONDS):
            if self._links is None:
                self._connect()

    def close(self) -> None:
        self._closed.set()
        self._thread.join(2 * wire.HANDSHAKE_SECONDS)
        links, self._links = self._links, None
        for link in links or ():
            with suppress(OSError):
                link.close()
