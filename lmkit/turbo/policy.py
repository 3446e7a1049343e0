"""Who is served next, and who gives way. A policy is two plain functions, passed to the scheduler."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from operator import attrgetter

from lmkit.turbo.sequence import Sequence

# (running, waiting in their queue's order) -> candidates of one step, best first: all the running, then the waiting.
# These are read lazily: a step that has no room must not look at all of them.
Order = Callable[[Iterable[Sequence], Iterable[Sequence]], Iterator[Sequence]]
# Non-empty running -> the one that is preempted when an older one needs its blocks.
Victim = Callable[[Iterable[Sequence]], Sequence]


def fcfs(running: Iterable[Sequence], waiting: Iterable[Sequence]) -> Iterator[Sequence]:
    """First come, first served."""
    yield from sorted(running, key=attrgetter("arrival"))
    yield from waiting


def last_arrived(running: Iterable[Sequence]) -> Sequence:
    """The one that has waited least; the oldest is therefore never preempted, and every request ends."""
    return max(running, key=attrgetter("arrival"))
