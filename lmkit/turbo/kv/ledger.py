"""The state that all prefix caches over one pool share: their clock of uses, and the blocks that each tenant keeps."""

from __future__ import annotations

import math
from collections import Counter, deque
from itertools import islice
from typing import Protocol

MAX_SAMPLES = 4096  # of the clock; with more, every other one is dropped


class Cache(Protocol):
    """A prefix cache as the ledger sees it."""

    stripe: int  # blocks of the pool that are evicted together

    def oldest(self, tenant: str | None = None) -> float:
        """The last use of the stripe that an eviction takes first; inf if none is idle."""

    def evict(self, count: int, tenant: str | None = None, *, until: float, spare: int | None) -> int:
        """See RadixCache.evict."""


class Ledger:
    """All counts are counts of the pool's blocks."""

    def __init__(self, quota: int | None = None) -> None:
        """quota: the most blocks that one tenant may keep."""
        self.quota = quota
        self.now = 0  # ticks once per use
        self.held: Counter[str] = Counter()  # by tenant
        self.caches: list[Cache] = []
        self._has_lost = False  # blocks that eviction took
        self._lost = 0  # the last use of what `lost` was told of
        self._samples = deque[tuple[int, float]]()  # (ticks, time)

    def evict(self, count: int, tenant: str | None = None, spare: int | None = None) -> int:
        """Evict at least `count` idle blocks if there are so many, the least recently used first.

        If `tenant` is given, only its blocks are evicted. The path that is used at `spare` is kept. Returns the number
        of evicted blocks.
        """
        evicted = given = 0
        while evicted < count:
            cache, until = self._next(tenant)
            given = cache.evict(-(-(count - evicted) // cache.stripe), tenant, until=until, spare=spare)
            evicted += given * cache.stripe
            self._has_lost |= given > 0 and tenant is None
            if not given:
                break
        return evicted

    def lost(self, used: int) -> None:
        """Something beside the blocks is gone, without which a prefix is not found. It was used last at this tick."""
        self._lost = max(self._lost, used)

    def kept_since(self, now: float) -> float:
        """The time since which the caches have lost nothing that was used; that of the first call if they lost nothing.

        `now` is the caller's time. The result is as exact as calls are frequent. What the quota takes from a tenant is
        not looked at.
        """
        samples = self._samples
        if not samples or samples[-1][0] < self.now:
            samples.append((self.now, now))
        if len(samples) > MAX_SAMPLES:
            self._samples = samples = deque(islice(samples, 0, None, 2))
        oldest: float = self._lost + 1
        if self._has_lost:  # eviction has taken what was used before
            oldest = max(oldest, min(cache.oldest() for cache in self.caches))
        while len(samples) > 1 and samples[1][0] < oldest:
            samples.popleft()
        return samples[0][1]

    def _next(self, tenant: str | None) -> tuple[Cache, float]:
        """The cache with the least recently used idle stripe, and the time of use of the next cache's stripe."""
        if len(self.caches) == 1:
            return self.caches[0], math.inf
        used = [cache.oldest(tenant) for cache in self.caches]
        first = used.index(min(used))
        return self.caches[first], min(used[:first] + used[first + 1 :])
