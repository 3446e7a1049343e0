"""The deadlines of sequences."""

from __future__ import annotations

import heapq
import math
from collections.abc import Iterator

from lmkit.turbo.sequence import Sequence, Status


class Deadlines:
    """A heap. Those of sequences that ended long before them are dropped once there are many."""

    def __init__(self) -> None:
        self._heap: list[tuple[float, int, Sequence]] = []

    def __len__(self) -> int:
        return len(self._heap)

    def add(self, seq: Sequence, num_open: int) -> None:
        """The sequence's deadline. `num_open`: sequences that have not ended."""
        if seq.deadline == math.inf:
            return
        if len(self._heap) > 2 * num_open + 64:
            self._heap = [entry for entry in self._heap if entry[2].status is not Status.FINISHED]
            heapq.heapify(self._heap)
        heapq.heappush(self._heap, (seq.deadline, seq.arrival, seq))

    def over(self, now: float) -> Iterator[Sequence]:
        """The sequences whose time is over, and that have not ended."""
        while self._heap and self._heap[0][0] <= now:
            _, _, seq = heapq.heappop(self._heap)
            if seq.status is not Status.FINISHED:
                yield seq
