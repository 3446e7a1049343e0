"""What the prefix caches over one pool share: the clock of their uses, and what each tenant keeps in all of them."""

from __future__ import annotations

import math
from collections import Counter
from typing import Protocol


class Cache(Protocol):
    """A prefix cache as the ledger sees it."""

    stripe: int  # blocks of the pool that leave together

    def oldest(self, tenant: str | None = None) -> float:
        """When the stripe that an eviction takes first was used; inf = none is idle."""

    def evict(self, count: int, tenant: str | None = None, *, until: float, spare: int | None) -> int:
        """See RadixCache.evict."""


class Ledger:
    """Counts are of the pool's blocks."""

    def __init__(self, quota: int | None = None) -> None:
        """quota: blocks that one tenant may keep."""
        self.quota = quota
        self.now = 0  # ticks once per use
        self.held: Counter[str] = Counter()  # by tenant
        self.caches: list[Cache] = []

    def evict(self, count: int, tenant: str | None = None, spare: int | None = None) -> int:
        """Give at least `count` idle blocks back to the pool if there are so many, those used longest ago first.

        Only a tenant's, if one is named, and none of the path that is used at `spare`. Returns how many it gave.
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
        """The cache whose idle stripe was used longest ago, and when the next cache's was."""
        if len(self.caches) == 1:
            return self.caches[0], math.inf
        used = [cache.oldest(tenant) for cache in self.caches]
        first = used.index(min(used))
        return self.caches[first], min(used[:first] + used[first + 1 :])
