"""Failures of a tier. All are counted, each kind is logged once a minute, and writing rests if it keeps failing."""

from __future__ import annotations

import errno
import time
from collections.abc import Callable

from lmkit.log import get_logger

log = get_logger(__name__)

LOG_SECONDS = 60.0
FAILURES_IN_A_ROW = 5  # failed writes before writing rests
REST_SECONDS = 30.0


class Failures:
    """Several threads use it. At worst a count misses one failure, or a line is logged twice."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self.count = 0
        self._clock = clock
        self._logged: dict[str, float] = {}  # kind -> when
        self._in_a_row = 0
        self._rests_until = 0.0

    def note(self, what: str, error: Exception) -> None:
        """Count a failure, and log it if its kind was not logged lately. `what` was tried: "writing KV to disk"."""
        self.count += 1
        number = getattr(error, "errno", None)
        kind = f"{what} {errno.errorcode.get(number, number) if number else type(error).__name__}"
        now = self._clock()
        if now - self._logged.get(kind, -LOG_SECONDS) >= LOG_SECONDS:
            self._logged[kind] = now
            log.warning("%s failed, %d failures so far: %s", what, self.count, error)

    def note_write(self, what: str, error: Exception) -> None:
        """Like `note`. After several failures in a row, `resting` is true for a while."""
        self.note(what, error)
        self._in_a_row += 1
        if self._in_a_row >= FAILURES_IN_A_ROW:
            self._rests_until = self._clock() + REST_SECONDS

    def written(self) -> None:
        self._in_a_row = 0

    @property
    def resting(self) -> bool:
        """Whether writing rests. After a rest one write is tried; if it fails too, the next rest begins."""
        return self._in_a_row >= FAILURES_IN_A_ROW and self._clock() < self._rests_until
