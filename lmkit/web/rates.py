"""Limits per minute of single API keys: requests and tokens.

Each is a bucket that holds one minute's worth and fills evenly. A request takes one from the bucket of requests when it
arrives. Tokens are taken as they are computed: those of a prompt when it is admitted, those of an answer as they come.
An answer that has begun therefore ends, and the bucket may go below zero; requests are refused until it has one token
again. Over time no key gets more than its limit.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from contextvars import ContextVar

from lmkit.errors import RequestError
from lmkit.web.auth import ApiKey

MINUTE = 60.0
Headers = list[tuple[bytes, bytes]]


class Bucket:
    """`limit` a minute, of which all may be taken at once."""

    def __init__(self, limit: int, clock: Callable[[], float] = time.monotonic) -> None:
        self.limit = limit
        self._clock = clock
        self._level, self._at = float(limit), clock()

    @property
    def level(self) -> float:
        now = self._clock()
        self._level = min(self.limit, self._level + (now - self._at) * self.limit / MINUTE)
        self._at = now
        return self._level

    def take(self, number: int) -> None:
        self._level = self.level - number

    def seconds_to(self, level: float) -> float:
        """Until it holds so much."""
        return max(0.0, (level - self.level) * MINUTE / self.limit)


class Meter:
    """The buckets of one key."""

    def __init__(self, key: ApiKey, clock: Callable[[], float] = time.monotonic, whose: str = "this key") -> None:
        self._whose = whose
        limits = {"requests": key.requests_per_minute, "tokens": key.tokens_per_minute}
        self._buckets = {what: Bucket(limit, clock) for what, limit in limits.items() if limit is not None}

    def check(self) -> None:
        """Raise RequestError if a bucket is empty."""
        for what, bucket in self._buckets.items():
            if bucket.level < 1:
                message = f"{self._whose} may have {bucket.limit} {what} a minute; try again in {self.wait():.0f} s"
                raise RequestError("rate_limit_exceeded", message)

    def request(self) -> None:
        """Count a request. Raises RequestError if a bucket is empty."""
        self.check()
        self._take("requests", 1)

    def tokens(self, number: int) -> None:
        self._take("tokens", number)

    def _take(self, what: str, number: int) -> None:
        if what in self._buckets:
            self._buckets[what].take(number)

    def wait(self) -> int:
        """Whole seconds until a request is taken."""
        return math.ceil(max(bucket.seconds_to(1) for bucket in self._buckets.values()))

    def headers(self) -> Headers:
        """OpenAI's: `x-ratelimit-limit-tokens: 6000` and so on. `reset` is the time until a bucket is full."""
        return [
            (f"x-ratelimit-{name}-{what}".encode(), str(value).encode())
            for what, bucket in self._buckets.items()
            for name, value in (
                ("limit", bucket.limit),
                ("remaining", max(0, int(bucket.level))),
                ("reset", f"{bucket.seconds_to(bucket.limit):.3f}s"),
            )
        ]


# The meter of the request that this task works on. Tasks that it starts inherit it.
_METER: ContextVar[Meter | None] = ContextVar("meter", default=None)


def measure(meter: Meter | None) -> None:
    """Count the tokens that this task and those that it starts compute."""
    _METER.set(meter)


def spend(num_tokens: int) -> None:
    """Count tokens for the key of the request that this task works on."""
    if (meter := _METER.get()) is not None:
        meter.tokens(num_tokens)
