"""One background thread that handles one item after the other."""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from typing import Generic, TypeVar

T = TypeVar("T")


class TierThread(Generic[T]):
    """Calls `work` with each item, in order. After `stop`, once time is up, it calls `drop` instead.

    Neither may raise.
    """

    def __init__(self, name: str, work: Callable[[T], None], drop: Callable[[T], None]) -> None:
        self._work, self._drop = work, drop
        self._items: deque[T] = deque()
        self._changed = threading.Condition()
        self._deadline: float | None = None  # set by `stop`
        self._busy = False
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)  # an exit never waits for it
        self._thread.start()

    def __len__(self) -> int:
        """The number of items that wait or are being handled."""
        return len(self._items) + self._busy

    @property
    def overdue(self) -> bool:
        """Whether time is up: `work` should then return."""
        return self._deadline is not None and time.monotonic() > self._deadline

    def put(self, items: Sequence[T]) -> None:
        with self._changed:
            if self._deadline is None:
                self._items.extend(items)
                self._changed.notify()
                return
        for item in items:
            self._drop(item)

    def stop(self, deadline: float) -> None:
        """Accept no more items, and drop those that are left at `deadline` (time.monotonic). Does not wait."""
        with self._changed:
            self._deadline = deadline
            self._changed.notify()

    def join(self, seconds: float) -> bool:
        """Wait for the thread. Returns whether it has ended. Items that a hanging thread has not begun are dropped."""
        self._thread.join(seconds)
        while self._items:
            self._drop(self._items.popleft())
        return not self._thread.is_alive()

    def _run(self) -> None:
        while (item := self._take()) is not None:
            (self._drop if self.overdue else self._work)(item)
            self._busy = False

    def _take(self) -> T | None:
        with self._changed:
            while not self._items:
                if self._deadline is not None:
                    return None
                self._changed.wait()
            self._busy = True
            return self._items.popleft()
