"""How often one call may go to another node, and how long it may wait for one.

A request that nodes break by may be why they do, or they were killed. The proxy sees which: a node that is well and
was well all the time has broken this request alone. After a few of those the call is over. Nodes that went down do not
count. A request that kills nodes is why they are down, so the pauses between its moves double, and end it in time.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple, Protocol

from lmkit.proxy.journal import Journal

MAX_RESENDS = 4  # after breaks of nodes that stayed well, without a new token
MAX_LEFT = 2  # nodes that a request leaves before its first byte because checks call them down; it stays at the next
MAX_MOVES = 32  # of one stream in all
FIRST_PAUSE = 0.5  # seconds, after more than MAX_RESENDS breaks


class Broken(Protocol):
    """What is read of a node."""

    @property
    def healthy(self) -> bool: ...
    @property
    def up_since(self) -> float: ...


class Break(NamedTuple):
    at: float
    node: Broken | None  # None: it was left, or it cannot go on with the stream

    @property
    def is_told_against_the_call(self) -> bool:
        return self.node is None or (self.node.healthy and self.node.up_since <= self.at)


class Moves:
    """Of one call. A stream that gets on begins to count anew: what breaks nodes breaks them at the same token."""

    def __init__(self, journal: Journal, wait: float, deadline: float, clock: Callable[[], float]) -> None:
        """In seconds: `wait` is how long a call that all nodes refuse asks again, and `deadline` how long one that
        nodes break by is sent again. Both begin anew with each new token.
        """
        self._journal, self._wait, self._deadline, self._clock = journal, wait, deadline, clock
        self._breaks: list[Break] = []
        self._num_notes = self._num_left = self._num_moves = 0
        self._refused_since: float | None = None
        self.total = 0  # sends of a request that a node had seen

    def look(self) -> None:
        """See whether the stream has got on."""
        if self._journal.num_notes > self._num_notes:
            self._num_notes = self._journal.num_notes
            self._breaks.clear()
            self._num_left = 0
            self._refused_since = None

    def resend(self, node: Broken) -> None:
        """A node broke before its first byte, and the request may be why."""
        self._broke(node)
        self.total += 1

    def move(self, node: Broken | None) -> None:
        """A node broke off within its stream. None: it was left, or it does not go on with the stream."""
        self._broke(node)
        self._num_moves += 1

    def leave(self) -> None:
        """A node is silent and down."""
        self._num_left += 1
        self.total += 1

    def _broke(self, node: Broken | None) -> None:
        self.look()
        self._breaks.append(Break(self._clock(), node))
        self._refused_since = None  # it was taken

    @property
    def _num_told(self) -> int:
        return sum(one.is_told_against_the_call for one in self._breaks)

    @property
    def may_resend(self) -> bool:
        return self._num_told < MAX_RESENDS

    @property
    def may_leave(self) -> bool:
        return self._num_left < MAX_LEFT

    @property
    def are_over(self) -> bool:
        is_late = self._breaks and self._clock() + self.pause - self._breaks[0].at > self._deadline
        return bool(is_late) or self._num_told > MAX_RESENDS or self._num_moves > MAX_MOVES

    @property
    def pause(self) -> float:
        """Seconds to wait before the next send."""
        more = len(self._breaks) - MAX_RESENDS
        return FIRST_PAUSE * 2.0 ** (more - 1) if more > 0 else 0.0

    def may_wait(self) -> bool:
        """Whether a call that no node takes now may ask again."""
        if self._refused_since is None:
            self._refused_since = self._clock()
        return self._clock() - self._refused_since < self._wait
