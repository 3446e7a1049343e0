"""The policy of admission and preemption: plain functions over sequences that the scheduler calls.

Everything follows from the priority key, a number that a request gets when it arrives and keeps:

    priority_key = arrival time + priority * priority_seconds

One level of priority is worth `priority_seconds` of waiting. A request of low priority goes behind requests of high
priority that arrive within that time, and before all that arrive later. No request starves, whatever arrives.
"""

from __future__ import annotations

from collections.abc import Callable
from collections.abc import Sequence as Seq
from operator import attrgetter

from lmkit.turbo.sequence import Sequence

LOOK_AHEAD = 8  # the first sequences of the queue that are compared by their cached tokens


order = attrgetter("priority_key", "arrival")  # the sort key of queue and batch


def next_in(queue: Seq[Sequence], cached_tokens: Callable[[Sequence], int], max_overtakes: int) -> Sequence:
    """Return the sequence with the most cached tokens among the first in the queue that have the first one's priority.

    A sequence that has been overtaken `max_overtakes` times is not overtaken again.
    """
    candidates = []
    for seq in queue[:LOOK_AHEAD]:
        if seq.request.priority != queue[0].request.priority:
            break
        candidates.append(seq)
        if seq.overtaken >= max_overtakes:
            break
    return candidates[0] if len(candidates) == 1 else max(candidates, key=cached_tokens)  # the first of the best


def may_preempt(seq: Sequence, other: Sequence) -> bool:
    """Whether a waiting sequence may take the place of a running one.

    It must be better in priority and in priority key. Two sequences therefore never preempt each other in turn.
    """
    return seq.request.priority < other.request.priority and order(seq) < order(other)
