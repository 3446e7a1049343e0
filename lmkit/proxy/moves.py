"""How often one call may go to another node, and how long it may wait for one."""

from __future__ import annotations

from collections.abc import Callable

from lmkit.proxy.journal import MAX_MOVES, MAX_RESUMES, Journal

# A request that reached a node and got no response may have broken the node. It is sent so often again, not for ever.
MAX_RESENDS = 4
MAX_LEFT = 2  # nodes that a request leaves before its first byte because checks call them down; it stays at the next


class Moves:
    """Of one call. A stream that gets on begins to count anew: what breaks nodes breaks them at the same token."""

    def __init__(self, journal: Journal, seconds: float, clock: Callable[[], float]) -> None:
        """`seconds` is how long a call that nodes refuse may wait for one, from its last new token on."""
        self._journal, self._seconds, self._clock = journal, seconds, clock
        self._num_notes = self._resends = self._num_left = 0
        self._refused_since: float | None = None
        self.total = 0  # sends of a request that a node had seen

    def look(self) -> None:
        """See whether the stream has got on."""
        if self._journal.num_notes > self._num_notes:
            self._num_notes = self._journal.num_notes
            self._resends = self._num_left = 0
            self._refused_since = None

    def resend(self) -> None:
        """A node broke, and the request may be why."""
        self._resends += 1
        self.total += 1

    def leave(self) -> None:
        """A node is silent and down."""
        self._num_left += 1
        self.total += 1

    @property
    def may_resend(self) -> bool:
        return self._resends < MAX_RESENDS

    @property
    def may_leave(self) -> bool:
        return self._num_left < MAX_LEFT

    @property
    def are_over(self) -> bool:
        journal = self._journal
        return self._resends > MAX_RESENDS or journal.num_resumes > MAX_RESUMES or journal.num_moves > MAX_MOVES

    def may_wait(self) -> bool:
        """Whether a call that no node takes now may ask again."""
        if self._refused_since is None:
            self._refused_since = self._clock()
        return self._clock() - self._refused_since < self._seconds
