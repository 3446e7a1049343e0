"""Interactive sessions in the front end: it keeps each conversation's tokens, so that a new turn reuses its KV."""

from __future__ import annotations

import time
from collections import OrderedDict
from collections.abc import Callable

from lmkit.text import TokenHistory

MAX_BYTES = 128 << 20

Key = tuple[str, str]  # tenant, session id


class Sessions:
    """Token histories by tenant and session id, for as long as the engine keeps their KV.

    Their bytes are bounded: the history that was answered longest ago is dropped first. A dropped history costs time,
    but changes no text.
    """

    def __init__(
        self, lease: float, *, max_bytes: int = MAX_BYTES, clock: Callable[[], float] = time.monotonic
    ) -> None:
        """`lease` is in seconds, from a session's last answer."""
        self._lease, self._max_bytes, self._clock = lease, max_bytes, clock
        self._histories: OrderedDict[Key, tuple[TokenHistory, float]] = OrderedDict()  # each with its lease's end
        self._num_bytes = 0

    def __len__(self) -> int:
        return len(self._histories)

    def get(self, key: Key) -> TokenHistory:
        """The history, or an empty one if it was dropped or its lease has ended."""
        self._expire()
        return self._histories[key][0] if key in self._histories else TokenHistory()

    def put(self, key: Key, history: TokenHistory) -> None:
        self._drop(key)
        if history.num_bytes > self._max_bytes:
            return
        self._histories[key] = history, self._clock() + self._lease
        self._num_bytes += history.num_bytes
        self._expire()
        while self._num_bytes > self._max_bytes:
            self._drop(next(iter(self._histories)))

    def _expire(self) -> None:
        now = self._clock()
        while self._histories and next(iter(self._histories.values()))[1] <= now:
            self._drop(next(iter(self._histories)))

    def _drop(self, key: Key) -> None:
        if key in self._histories:
            self._num_bytes -= self._histories.pop(key)[0].num_bytes
