"""Who is served next, and who gives way. Plain functions over sequences; the scheduler asks them.

Everything follows from one number that a request gets when it arrives and keeps, its priority key:

    priority_key = arrival time + priority * priority_seconds

A level of priority is worth so many seconds of waiting, so a request of low priority goes behind those of high priority
that arrive within that time, and before all that arrive later: nobody starves, whatever comes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from collections.abc import Sequence as Seq

from lmkit.turbo.sequence import Sequence

LOOK_AHEAD = 8  # of the queue, how many are compared for what the cache has of them


def order(seq: Sequence) -> tuple[float, int]:
    """The sort key of queue and batch: priority key, then arrival."""
    return seq.priority_key, seq.arrival


def next_in(queue: Seq[Sequence], cached_tokens: Callable[[Sequence], int], max_overtakes: int) -> Sequence:
    """Of the first ones in the queue with the priority of the first, the one of which the cache has most.

    None that has been overtaken `max_overtakes` times is overtaken again.
    """
    candidates = []
    for seq in queue[:LOOK_AHEAD]:
        if seq.request.priority != queue[0].request.priority:
            break
        candidates.append(seq)
        if seq.overtaken >= max_overtakes:
            break
    return candidates[0] if len(candidates) == 1 else max(candidates, key=cached_tokens)  # the first of the best


def victim(running: Iterable[Sequence]) -> Sequence | None:
    """The sequence to preempt: the last by priority key, None if there is none.

    The first one is never preempted while others run, so every request ends.
    """
    return max(running, key=order, default=None)


def may_preempt(seq: Sequence, other: Sequence) -> bool:
    """Whether a waiting sequence may take the place of a running one.

    It must be better in priority and in priority key. Two sequences therefore never preempt each other in turn.
    """
    return seq.request.priority < other.request.priority and order(seq) < order(other)
