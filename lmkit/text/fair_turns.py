"""Turns at a few places, fair between tenants: work that one of them sends in bulk waits behind itself."""

from __future__ import annotations

import threading
from collections import Counter, deque
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar

TENANT: ContextVar[str] = ContextVar("tenant", default="")  # whose request this thread or task works for


class FairTurns:
    """`places` threads at a time, of which one tenant has all but one at most. Those that wait take turns by tenant."""

    def __init__(self, places: int) -> None:
        self._free, self._most = places, max(1, places - 1)
        self._inside: Counter[str] = Counter()
        self._waiting: dict[str, deque[object]] = {}  # by tenant, the one that is served next first
        self._changed = threading.Condition()

    @contextmanager
    def turn(self, tenant: str) -> Iterator[None]:
        """Wait for a place and hold it."""
        mine = object()
        with self._changed:
            self._waiting.setdefault(tenant, deque()).append(mine)
            try:
                self._changed.wait_for(lambda: self._next() is mine)
                self._free -= 1
                self._inside[tenant] += 1
            finally:
                others = self._waiting.pop(tenant)
                others.remove(mine)
                if others:
                    self._waiting[tenant] = others  # behind the other tenants
                self._changed.notify_all()
        try:
            yield
        finally:
            with self._changed:
                self._free += 1
                self._inside -= Counter({tenant: 1})
                self._changed.notify_all()

    def _next(self) -> object:
        """Who may enter now; None if nobody may."""
        if not self._free:
            return None
        return next((line[0] for tenant, line in self._waiting.items() if self._inside[tenant] < self._most), None)
