"""What requests may lose to work that no one waits for: a hundredth of the time that they take.

Such work is done in short steps, each begun while no request is there. A request that arrives during a step waits for
its end. It is taken to have waited for the whole step, and these seconds are spent. A request that ends has earned
`SHARE` of its own seconds. No step begins that the rest does not cover, so whatever arrives when, for the requests that
have ended

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

    def covers(self, seconds: float) -> bool:
        """Whether a step that takes so long may begin."""
        return self._left >= seconds

    def ran(self, seconds: float) -> None:
        """A step that no one waited for took so long."""
        self._ran += seconds

    def arrives(self) -> None:
        """A request has arrived. If a step ran meanwhile, it has waited for it."""
        self._left -= self._ran
        self.waited += self._ran

    def planned(self) -> None:
        """The next step is planned. Whoever arrives from now on has not waited for those before it."""
        self._ran = 0.0

    def ended(self, seconds: float) -> None:
        """A request has ended, so long after it arrived."""
        self._left = min(self._left + SHARE * seconds, MOST)
