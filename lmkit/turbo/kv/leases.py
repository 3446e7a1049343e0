"""Leases keep the KV of conversations: a lease holds the blocks of a session until the lease ends."""

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
    """The leases by session. All leases are equally long, so the first in order ends first.

    The methods return the blocks of leases that they remove; the caller frees these blocks.
    """

    def __init__(self, seconds: float) -> None:
        self.seconds = seconds
        self._leases: OrderedDict[SessionKey, Lease] = OrderedDict()

    def __len__(self) -> int:
        return len(self._leases)

    def __iter__(self) -> Iterator[Lease]:
        return iter(self._leases.values())

    def begin(self, session: SessionKey, blocks: list[int], now: float) -> list[int]:
        """Start a new lease of the session. Returns the blocks of its previous lease."""
        before = self._leases.pop(session, None)
        self._leases[session] = Lease(blocks, now + self.seconds)
        return before.blocks if before else []

    def expired(self, now: float) -> list[int]:
        """Remove the leases that have ended. Returns their blocks."""
        blocks: list[int] = []
        while self._leases and next(iter(self)).end <= now:
            blocks += self.pop_first()
        return blocks

    def pop_first(self) -> list[int]:
        """End the lease that would end first. Returns its blocks."""
        return self._leases.popitem(last=False)[1].blocks
