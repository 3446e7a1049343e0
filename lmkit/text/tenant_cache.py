"""A cache whose values have sizes, with a limit for each tenant and one for all."""

from __future__ import annotations

import threading
from collections import Counter, OrderedDict
from typing import Generic, TypeVar

V = TypeVar("V")


class TenantCache(Generic[V]):
    """The values used last, by tenant and key. No tenant finds another's. Several threads may use it."""

    def __init__(self, each: int, total: int) -> None:
        """`each` and `total` are in the unit of the sizes."""
        self._each, self._total = each, total
        self._kept: OrderedDict[tuple[str, bytes], tuple[V, int]] = OrderedDict()
        self._sizes: Counter[str] = Counter()
        self._lock = threading.Lock()

    @property
    def size(self) -> int:
        return self._sizes.total()

    def __len__(self) -> int:
        return len(self._kept)

    def get(self, tenant: str, key: bytes) -> V | None:
        with self._lock:
            if (found := self._kept.get((tenant, key))) is None:
                return None
            self._kept.move_to_end((tenant, key))
            return found[0]

    def put(self, tenant: str, key: bytes, value: V, size: int) -> None:
        """Keep a value, whatever its size. The tenant's oldest others leave if it has too much, then the oldest of all
        if there is too much."""
        with self._lock:
            self._drop((tenant, key))
            self._kept[tenant, key] = value, size
            self._sizes[tenant] += size
            while self._sizes[tenant] > max(self._each, size):
                self._drop(next(kept for kept in self._kept if kept[0] == tenant))
            while self.size > max(self._total, size):
                self._drop(next(iter(self._kept)))

    def grow(self, tenant: str, key: bytes, size: int) -> None:
        """A value has become so much larger."""
        with self._lock:
            found = self._kept.get((tenant, key))
        if found is not None:
            self.put(tenant, key, found[0], found[1] + size)

    def drop(self, tenant: str, key: bytes) -> None:
        with self._lock:
            self._drop((tenant, key))

    def _drop(self, key: tuple[str, bytes]) -> None:
        if (found := self._kept.pop(key, None)) is not None:
            self._sizes -= Counter({key[0]: found[1]})  # and forget tenants that have nothing
