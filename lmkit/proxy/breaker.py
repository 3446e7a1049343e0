"""A circuit breaker: a node that fails requests again and again gets none for a while, and then one as a trial."""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal

State = Literal["closed", "open", "half-open"]


class Breaker:
    """closed --`failures` in a row--> open --`seconds`--> half-open --a good request--> closed, else --> open.

    Health checks find a node that is down. This finds one whose checks are good and whose answers are not.
    """

    def __init__(self, failures: int, seconds: float, clock: Callable[[], float]) -> None:
        self._limit, self._seconds, self._clock = failures, seconds, clock
        self._failures = 0  # in a row
        self._open_until: float | None = None
        self._trying = False  # a request runs that decides
        self.opened = 0  # how often

    @property
    def state(self) -> State:
        if self._open_until is None:
            return "closed"
        return "open" if self._clock() < self._open_until else "half-open"

    @property
    def admits(self) -> bool:
        return self._open_until is None or (self.state == "half-open" and not self._trying)

    def begin(self) -> None:
        """A request goes to the node."""
        self._trying = self._trying or self.state == "half-open"

    def end(self) -> None:
        """A request has left the node. It may have told nothing, because its client has left."""
        self._trying = False

    def record(self, *, good: bool) -> bool:
        """The outcome of a request. True if the breaker opens."""
        if good:
            self._failures, self._open_until = 0, None
            return False
        self._failures += 1
        opens = self.state == "half-open" or (self.state == "closed" and self._failures >= self._limit)
        if opens:
            self._open_until = self._clock() + self._seconds
            self.opened += 1
        return opens
