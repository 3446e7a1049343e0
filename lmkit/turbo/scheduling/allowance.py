"""What requests may lose to work that no one waits for: a hundredth of the time that they take.

Such work is done in short steps, each begun while no request is there. A request that arrives during a step waits for
its end. Nobody knows when it arrived, but it is seen right after the step. So it is taken to have waited for the whole
step, or t seconds less if it is seen t seconds later. These seconds are spent. A request that ends has earned `SHARE`
of its own seconds. No step begins that the rest does not cover, so whatever arrives when, for the requests that have
ended

    seconds lost <= FIRST + SHARE * seconds taken

and under load, where requests meet such steps, they soon become rare.
"""

from __future__ import annotations

SHARE = 0.01
FIRST, MOST = 0.25, 1.0  # seconds at the start, and saved up at most


class Allowance:
    """Seconds. Calls come in this order: a step `ran`, requests `arrive`, the next step is `planned`."""

    def __init__(self) -> None:
        self.waited = 0.0  # by all requests, at most
        self._left = FIRST
        self._ran = 0.0  # by steps since the last plan
        self._ended = 0.0  # the last of them, on the scheduler's clock

    def covers(self, seconds: float) -> bool:
        """Whether a step that takes so long may begin."""
        return self._left >= seconds

    def ran(self, seconds: float, now: float) -> None:
        """A step that no one waited for took so long, and has ended."""
        self._ran += seconds
        self._ended = now

    def arrives(self, now: float) -> None:
        """A request is seen. If a step ran just before, it has waited for it."""
        waited = max(self._ran - (now - self._ended), 0.0)
        self._left -= waited
        self.waited += waited

    def planned(self) -> None:
        """The next step is planned. Whoever arrives from now on has not waited for those before it."""
        self._ran = 0.0

    def ended(self, seconds: float) -> None:
        """A request has ended, so long after it arrived."""
        self._left = min(self._left + SHARE * seconds, MOST)
