"""The queue: sequences that wait to be admitted, by priority key."""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Iterator
from typing import overload

from lmkit.turbo.scheduling import policy
from lmkit.turbo.sequence import Sequence


class RequestQueue:
    """Sorted by policy.order. A sequence keeps its key, so a preempted sequence returns to its old place."""

    def __init__(self) -> None:
        self._sequences: list[Sequence] = []
        self._by_id: dict[str, Sequence] = {}

    def __len__(self) -> int:
        return len(self._sequences)

    def __iter__(self) -> Iterator[Sequence]:
        return iter(self._sequences)

    @overload
    def __getitem__(self, index: int) -> Sequence: ...
    @overload
    def __getitem__(self, index: slice) -> list[Sequence]: ...
    def __getitem__(self, index: int | slice) -> Sequence | list[Sequence]:
        return self._sequences[index]

    def __contains__(self, request_id: object) -> bool:
        return request_id in self._by_id

    def get(self, request_id: str) -> Sequence | None:
        return self._by_id.get(request_id)

    def add(self, seq: Sequence) -> None:
        insort(self._sequences, seq, key=policy.order)
        self._by_id[seq.request_id] = seq

    def remove(self, seq: Sequence) -> None:
        index = bisect_left(self._sequences, policy.order(seq), key=policy.order)
        assert self._sequences[index] is seq, "the queue is not in order"
        del self._sequences[index]
        del self._by_id[seq.request_id]
