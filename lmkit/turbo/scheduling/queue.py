"""The queue: sequences that wait to be admitted, by tenant and priority key."""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Iterator

from lmkit.turbo.scheduling import policy
from lmkit.turbo.sequence import Sequence


class RequestQueue:
    """A row for each tenant, sorted by policy.order. A preempted sequence returns to its old place."""

    def __init__(self) -> None:
        self._by_tenant: dict[str, list[Sequence]] = {}  # no row is empty
        self._by_id: dict[str, Sequence] = {}

    def __len__(self) -> int:
        return len(self._by_id)

    def __iter__(self) -> Iterator[Sequence]:
        return (seq for row in self._by_tenant.values() for seq in row)

    def __contains__(self, request_id: object) -> bool:
        return request_id in self._by_id

    def heads(self) -> Iterator[Sequence]:
        """The first sequence of each tenant."""
        return (row[0] for row in self._by_tenant.values())

    def of(self, tenant: str) -> list[Sequence]:
        """The tenant's sequences in order; not to be changed."""
        return self._by_tenant.get(tenant, [])

    def get(self, request_id: str) -> Sequence | None:
        return self._by_id.get(request_id)

    def add(self, seq: Sequence) -> None:
        insort(self._by_tenant.setdefault(seq.request.tenant, []), seq, key=policy.order)
        self._by_id[seq.request_id] = seq

    def remove(self, seq: Sequence) -> None:
        row = self._by_tenant[seq.request.tenant]
        index = bisect_left(row, policy.order(seq), key=policy.order)
        assert row[index] is seq, "the queue is not in order"
        del row[index]
        if not row:
            del self._by_tenant[seq.request.tenant]
        del self._by_id[seq.request_id]
