"""What a cluster should do: how many replicas a group needs, which of them to start and which to end. Pure functions.

The caller gives the time, so that tests need no clock.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Collection, Sequence
from typing import Literal, NamedTuple

from lmkit.cluster.config import Bounds, Scaling

State = Literal["starting", "ready", "lost", "draining"]  # lost: it was ready, and fails its health checks
MAX_BACKOFF = 60.0  # seconds
SETTLED_SECONDS = 60.0  # a replica that was ready for so long has not failed to start


class Seen(NamedTuple):
    """One replica, as it is now."""

    id: str
    digest: str  # of its version
    state: State
    in_flight: int = 0


class Changes(NamedTuple):
    start: int  # replicas of the wanted version
    drain: list[str]  # ids


def changes(digest: str, want: int, seen: Collection[Seen], *, surge: int = 1) -> Changes:
    """The next step towards `want` replicas of one version. `seen` are those that have not ended.

    `surge` is how many more there may be while versions change. Old replicas end one by one as new ones become ready,
    so that never fewer than `want` are ready if that many were. A version that does not start therefore leaves the old
    one running. Without a surge an old replica ends before a new one starts, so that one fewer is ready.
    """
    live = [replica for replica in seen if replica.state != "draining"]
    new, old = [r for r in live if r.digest == digest], [r for r in live if r.digest != digest]
    start = max(0, min(want - len(new), want + surge - len(live)))
    drain = [r for r in old if r.state == "starting"]  # they have no request yet
    if len(new) >= want:
        drain += _first_to_end(new)[: len(new) - want]
    spare = sum(r.state == "ready" for r in live if r not in drain) - (want if surge else want - 1)
    drain += _first_to_end([r for r in old if r.state == "ready"])[: max(0, spare)]
    return Changes(start, [replica.id for replica in drain])


def _first_to_end(replicas: Sequence[Seen]) -> list[Seen]:
    """Those that are not ready come first, then those with the fewest requests."""
    return sorted(replicas, key=lambda replica: (replica.state == "ready", replica.in_flight))


class Autoscaler:
    """How many replicas a group needs: more at once, fewer only after `idle_seconds`."""

    def __init__(self) -> None:
        self._needed = deque[tuple[float, int]]()  # (time, replicas), falling from the first to the last

    def want(self, bounds: Bounds, scaling: Scaling, requests: int, tokens: int, now: float) -> int:
        """`requests` run or wait, `tokens` of prompts wait. The result lies within the bounds."""
        needed = max(math.ceil(requests / scaling.requests), math.ceil(tokens / scaling.tokens))
        while self._needed and self._needed[-1][1] <= needed:
            self._needed.pop()
        self._needed.append((now, needed))
        while now - self._needed[0][0] > scaling.idle_seconds:
            self._needed.popleft()
        return min(bounds.max, max(bounds.min, self._needed[0][1]))


class Backoff:
    """When the next replica may start: the first one that failed is replaced at once, later ones after a wait."""

    def __init__(self) -> None:
        self._failures, self._until = 0, -math.inf

    def failed(self, ready_seconds: float, now: float) -> None:
        """A replica has ended that was not to end. It was ready for so long."""
        if ready_seconds >= SETTLED_SECONDS:
            self._failures = 0
        self._until = now + min(MAX_BACKOFF, 2.0 ** (self._failures - 1)) if self._failures else now
        self._failures += 1

    def allows(self, now: float) -> bool:
        return now >= self._until
