"""Fair shares between tenants: a virtual token counter for each (VTC, arXiv 2401.00588).

A tenant's counter grows by the tokens that are computed for it, divided by its weight. Among the tenants that wait, the
one with the smallest counter is admitted next. A counter that lags behind those of all waiting tenants is lifted to the
smallest of these: a tenant that asks for nothing saves nothing up. When nobody waits, all debts are forgotten.

Bound: let two tenants wait from one moment to another, and let U be `max_batch_size * max_model_len`, the most tokens
that admitted sequences can still compute. A tenant whose counter is ahead is admitted no more, so it gets ahead by at
most U / weight. The tokens that the two get in that time, each divided by its weight, therefore differ by at most
2 * U / min(weights). Sequences that wait for a prefix under way do not count as waiting.

Priorities stand above shares. A level of priority is worth `priority_seconds` of waiting, also between tenants: a
sequence of low priority counts as one of normal priority when it has waited that long. A sequence with a raised
priority goes before other tenants until these have waited as long.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Iterator
from typing import NamedTuple

from lmkit.turbo.scheduling import policy
from lmkit.turbo.sequence import Sequence

MANY = 4096  # counters; from here on, those that would be lifted anyway are dropped


class Rank(NamedTuple):
    """A tenant's place among those that wait; the smallest is next. It depends on the first sequence of its queue."""

    level: int  # of priority that is left after its waiting
    counter: float
    order: tuple[float, int]  # policy.order of the sequence
    tenant: str


class Shares:
    """The counters of all tenants."""

    def __init__(self, priority_seconds: float) -> None:
        self._priority_seconds = priority_seconds
        self._counters: dict[str, float] = {}
        self._floor = 0.0  # no counter is less
        self._least = 0  # the best priority that waits, or normal: waiting makes no sequence better than that

    def counter(self, tenant: str) -> float:
        return max(self._counters.get(tenant, 0.0), self._floor)

    def charge(self, seq: Sequence, num_tokens: int) -> None:
        """Count tokens of a plan; a negative number takes back what was counted for the same plan."""
        if len(self._counters) > MANY:
            self._counters = {tenant: value for tenant, value in self._counters.items() if value > self._floor}
        tenant = seq.request.tenant
        self._counters[tenant] = self.counter(tenant) + num_tokens / seq.request.weight

    def settle(self) -> None:
        """Forget all counters, because nobody waits."""
        self._counters.clear()
        self._floor = 0.0

    def ranks(self, heads: Iterable[Sequence], now: float) -> list[Rank]:
        """The ranks of the tenants that wait, best first. `heads` is the first sequence of each one's queue."""
        heads = list(heads)
        self._least = min((seq.request.priority for seq in heads), default=0)
        ranks = [self.rank(seq, now) for seq in heads]
        self._floor = max(self._floor, min(ranks).counter if ranks else 0.0)
        return sorted(rank._replace(counter=max(rank.counter, self._floor)) for rank in ranks)

    def rank(self, seq: Sequence, now: float) -> Rank:
        """The rank of a tenant whose first waiting sequence is `seq`."""
        level = 0
        if self._priority_seconds:
            level = max(math.ceil((seq.priority_key - now) / self._priority_seconds), min(self._least, 0))
        tenant = seq.request.tenant
        return Rank(level, self.counter(tenant), policy.order(seq), tenant)

    def comes_before(self, seq: Sequence, other: Sequence) -> bool:
        """Whether a waiting sequence goes before the prompt of another tenant that is under way."""
        mine, theirs = seq.request, other.request
        return (
            mine.tenant != theirs.tenant
            and mine.priority <= theirs.priority
            and self.counter(mine.tenant) < self.counter(theirs.tenant)
        )


def may_preempt(seq: Sequence, other: Sequence, now: float) -> bool:
    """Whether a waiting sequence may take the place of a running one because of their priorities.

    That of another tenant is safe once it has waited out its low priority: by then the two stand on one level.
    """
    if not policy.may_preempt(seq, other):
        return False
    return seq.request.tenant == other.request.tenant or other.priority_key > now


def over_share(seq: Sequence, running: Iterable[Sequence]) -> Iterator[Sequence]:
    """The running sequences that a waiting one may preempt because their tenants hold more than their share of seats.

    After each of these preemptions the other tenant still has at least as many seats for its weight as the tenant of
    `seq`. So neither preempts the other in turn, and the first sequence of a tenant stays.
    """
    mine, running = seq.request, list(running)
    seats = Counter([other.request.tenant for other in running])
    if seats.keys() <= {mine.tenant}:
        return
    last_first = sorted(running, key=policy.order, reverse=True)
    share = (seats[mine.tenant] + 1) / mine.weight
    for other in last_first:
        theirs = other.request
        is_over = share <= (seats[theirs.tenant] - 1) / theirs.weight
        if theirs.tenant != mine.tenant and is_over and mine.priority <= theirs.priority:
            seats[theirs.tenant] -= 1
            yield other


def victim(running: Iterable[Sequence]) -> Sequence | None:
    """The sequence to preempt if one needs a block: the last of the tenant with the most seats for its weight.

    The first of all by priority key is never preempted, so every request ends. None if nothing else runs.
    """
    ordered = sorted(running, key=policy.order)
    seats = Counter(seq.request.tenant for seq in ordered)

    def rank(seq: Sequence) -> tuple[float, tuple[float, int]]:
        return seats[seq.request.tenant] / seq.request.weight, policy.order(seq)

    return max(ordered[1:], key=rank, default=None)
