"""How many requests may be sent once more, and when. Retries beyond that would keep a sick cluster sick."""

from __future__ import annotations

from collections.abc import Callable
from random import Random

REFILL = 1.0  # retries a second that are earned without requests, so that a quiet proxy always has some
FIRST_PAUSE, LONGEST_PAUSE = 0.025, 0.25  # seconds


class RetryBudget:
    """A bucket of retries. Each request of a client puts `share` of one into it, and each retry takes one out.

    It begins full. It holds `reserve` retries at most, so that the loss of a node can move all of its requests.
    """

    def __init__(self, share: float, reserve: int, clock: Callable[[], float], rng: Random | None = None) -> None:
        self._share, self._reserve, self._clock = share, float(reserve), clock
        self._rng = rng or Random()
        self._left, self._at = self._reserve, clock()
        self.spent = 0
        self.refused = 0

    @property
    def left(self) -> float:
        return min(self._reserve, self._left + REFILL * (self._clock() - self._at))

    def earn(self) -> None:
        """A client sends a request."""
        self._set(self.left + self._share)

    def spend(self) -> bool:
        """Whether a request may be sent once more. It is then counted."""
        left = self.left
        if left < 1:
            self.refused += 1
            return False
        self._set(left - 1)
        self.spent += 1
        return True

    def _set(self, left: float) -> None:
        self._left, self._at = min(self._reserve, left), self._clock()

    def pause(self, number: int) -> float:
        """Seconds to wait before the retry of this number, from 1 on: by chance, so that many do not come at once."""
        return self._rng.random() * min(LONGEST_PAUSE, FIRST_PAUSE * 2.0 ** (number - 1))
