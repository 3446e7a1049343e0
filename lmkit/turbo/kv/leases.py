"""Conversations whose KV stays: a lease holds the blocks of a session until it ends."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator
from dataclasses import dataclass

SessionKey = tuple[str, str]  # (tenant, session_id)


@dataclass(frozen=True)
class Lease:
    blocks: list[int]  # one reference each
    end: float  # on the scheduler's clock


class Leases:
    """By session, the next to end first: all leases are equally long. Whoever takes one out frees its blocks."""

    def __init__(self, seconds: float) -> None:
        self.seconds = seconds
        self._leases: OrderedDict[SessionKey, Lease] = OrderedDict()

    def __len__(self) -> int:
        return len(self._leases)

    def __iter__(self) -> Iterator[Lease]:
        return iter(self._leases.values())

    def begin(self, session: SessionKey, blocks: list[int], now: float) -> list[int]:
        """Start the session's lease anew; the blocks of the one before it."""
        before = self._leases.pop(session, None)
        self._leases[session] = Lease(blocks, now + self.seconds)
        return before.blocks if before else []

    def expired(self, now: float) -> list[int]:
        """The blocks of leases that have ended."""
        blocks: list[int] = []
        while self._leases and next(iter(self)).end <= now:
            blocks += self.pop_first()
        return blocks

    def pop_first(self) -> list[int]:
        """End the lease that would end first; its blocks."""
        return self._leases.popitem(last=False)[1].blocks
