"""The state that all prefix caches over one pool share: their clock of uses, and the blocks that each tenant keeps."""

from __future__ import annotations

import math
from collections import Counter
from typing import Protocol


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
            if not given:
                break
        return evicted

    def _next(self, tenant: str | None) -> tuple[Cache, float]:
        """The cache with the least recently used idle stripe, and the time of use of the next cache's stripe."""
        if len(self.caches) == 1:
            return self.caches[0], math.inf
        used = [cache.oldest(tenant) for cache in self.caches]
        first = used.index(min(used))
        return self.caches[first], min(used[:first] + used[first + 1 :])
