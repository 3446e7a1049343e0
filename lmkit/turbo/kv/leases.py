"""Leases keep the KV of conversations: a lease holds the blocks of a session until the lease ends."""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from lmkit.turbo.kv.block_pool import HOLE, BlockPool
from lmkit.turbo.kv.radix_cache import Match
from lmkit.turbo.request import TURN

SessionKey = tuple[str, str]  # (tenant, session_id)
TURN_SHARE = 0.25  # of the blocks, at most, for the leases of all sessions that are named TURN, each counted for itself


@dataclass(frozen=True)
class Lease:
    blocks: list[int]  # one reference each
    end: float  # on the scheduler's clock
    size: int  # blocks that count against TURN_SHARE


class Leases:
    """The leases by session. All leases are equally long, so the first in order ends first."""

    def __init__(self, seconds: float, pool: BlockPool) -> None:
        self.seconds = seconds
        self._pool = pool
        self._leases: OrderedDict[SessionKey, Lease] = OrderedDict()

    def __len__(self) -> int:
        return len(self._leases)

    def __iter__(self) -> Iterator[Lease]:
        return iter(self._leases.values())

    def begin(self, session: SessionKey, matches: Iterable[Match], now: float) -> None:
        """Start a lease of the session on these blocks, in place of its previous one.

        Where leases of a bounded kind hold too much, the first to end of the tenant that holds the most ends now.
        """
        blocks = [block for match in matches for block in (*match.blocks, match.tail) if block is not None]
        self._pool.share_all(blocks)
        self._drop(session)
        counts = session[1].startswith(TURN)
        size = sum(self._pool.size(block) for block in blocks if block != HOLE) if counts else 0
        self._leases[session] = Lease(blocks, now + self.seconds, size)
        while counts and (held := self._held()).total() > TURN_SHARE * self._pool.num_blocks:
            most = max(held, key=lambda tenant: held[tenant])
            self._drop(next(key for key, lease in self._leases.items() if lease.size and key[0] == most))

    def _held(self) -> Counter[str]:
        """The blocks that count, by tenant."""
        held: Counter[str] = Counter()
        for (tenant, _), lease in self._leases.items():
            held[tenant] += lease.size
        return held

    def expire(self, now: float) -> None:
        """End the leases whose time is over."""
        while self._leases and next(iter(self)).end <= now:
            self.end_first()

    def end_first(self) -> None:
        """End the lease that would end first."""
        self._drop(next(iter(self._leases)))

    def _drop(self, session: SessionKey) -> None:
        if (lease := self._leases.pop(session, None)) is not None:
            self._pool.free_all(lease.blocks)
