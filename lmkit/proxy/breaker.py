"""A circuit breaker: a node that fails requests again and again gets none for a while, and then one as a trial."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable
from random import Random
from typing import Literal

State = Literal["closed", "open", "half-open"]
WINDOW = 20  # requests; a node that fails half of them rests too
MAX_REST = 16  # times the first rest
CALM = 10
JITTER = 0.25  # share of a rest by which it may be longer, so that proxies do not all try at once


class Breaker:
    """closed --`failures` in a row, or half of `WINDOW`--> open --rest--> half-open --a good request--> closed, else
    --> open.

    The first rest takes `seconds`. It doubles each time that the trial fails, or that the breaker opens again before
    `WINDOW` requests have gone well in all and `CALM` times the last rest has passed.
    Health checks find a node that is down. This finds one whose checks are good and whose answers are not. `eject`
    opens it for another reason.
    """

    def __init__(self, failures: int, seconds: float, clock: Callable[[], float], rng: Random | None = None) -> None:
        self._limit, self._seconds, self._clock = failures, seconds, clock
        self._rng = rng or Random()
        self._failures = 0  # in a row
        self._failed = deque[bool](maxlen=WINDOW)  # of the last requests
        self._rest = 1  # times `seconds`, of the next rest
        self._good = 0  # since the last rest
        self._rested = 0.0  # seconds of the last rest
        self._open_until: float | None = None
        self._trying = False  # a request runs that decides
        self._trials = 0  # good requests that it takes to close it
        self.opened = 0  # how often
        self.why = ""  # it is not closed
        self.closed_at = -math.inf  # when it closed last, by its clock

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
        self._failed.append(not good)
        if good:
            if self.state == "open":  # a request from before
                return False
            self._trials = max(0, self._trials - 1)
            if self._open_until is not None and not self._trials:
                self._open_until, self.why, self.closed_at = None, "", self._clock()
            self._failures = 0
            self._good += 1
            if self._good >= WINDOW and self._clock() - self.closed_at >= CALM * self._rested:
                self._rest = 1
            return False
        self._failures += 1
        often = 2 * sum(self._failed) >= WINDOW
        opens = self.state == "half-open" or (self.state == "closed" and (often or self._failures >= self._limit))
        if opens:
            self.eject("its requests fail one after the other")
        return opens

    def reset(self) -> None:
        """Forget all: the node was down, which is why requests failed, and is there again."""
        self._failures, self._rest, self._good, self._trials, self._rested = 0, 1, 0, 0, 0.0
        self._failed.clear()
        self._open_until, self.why, self.closed_at = None, "", -math.inf

    @property
    def failed_share(self) -> float:
        """Of the last `WINDOW` requests since the last rest, 0 to 1."""
        return sum(self._failed) / WINDOW

    def eject(self, why: str, trials: int = 1) -> None:
        """Open, whatever the requests were. After the rest, so many good ones close it, one after the other."""
        self._rested = self._seconds * self._rest * (1 + JITTER * self._rng.random())
        self._open_until = self._clock() + self._rested
        self._rest = min(2 * self._rest, MAX_REST)
        self._good, self._trials = 0, trials
        self._failed.clear()
        self.opened += 1
        self.why = why
