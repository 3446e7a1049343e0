"""Prompts that are computed ahead, while no request is there: what can be known of the next turns of conversations.

A front end knows how a conversation's next prompt begins as soon as an answer has ended. Such a beginning waits here.
The scheduler computes one at a time, in small steps that follow each other, and only while no request waits or runs and
the allowance covers the next step. It gives way to a request before the next plan: its KV stays in the cache, and the
rest waits again.

What was computed is remembered until a request of the same namespace goes on with it, so that its use can be counted.
The bounds are for each tenant first. Nothing of one tenant is found, timed or counted by the requests of another.
"""

from __future__ import annotations

import math
from collections import OrderedDict, deque
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import numpy as np

from lmkit.errors import RequestError
from lmkit.log import get_logger
from lmkit.turbo.kv.radix_tree import Namespace
from lmkit.turbo.request import Request
from lmkit.turbo.scheduling.allowance import Allowance
from lmkit.turbo.scheduling.audits import Audits, StoredKV
from lmkit.turbo.scheduling.planner import Planner, Step
from lmkit.turbo.sequence import Sequence, Status

MAX_OF_TENANT, MAX_IN_ALL = 4, 64  # prompts that wait, and as many that were computed; the oldest leave
STEP_SECONDS = 0.02  # of a step ahead: a request that arrives meanwhile waits for half of it, on average
AUDIT_SECONDS = (
    0.005  # of a step of an audit: a quarter as long, it meets a quarter of the requests, which wait as much
)
LEAST_TOKENS = 32  # of such a step: fewer cost about as much
LEAST_GAIN = 8  # tokens that the cache lacks: a request computes fewer beside its own in hardly more time


logger = get_logger(__name__)


@dataclass
class Prepared:
    """The beginning of a prompt, of which tokens `start` to `end` were computed ahead."""

    tokens: np.ndarray  # int32 [n], as the cache knows them
    start: int
    end: int


class NextTurns:
    """What waits, what runs, and what became of it. It shares the planner, and what that moves, with the scheduler."""

    def __init__(self, planner: Planner, make: Callable[[Request], Sequence], stored: StoredKV | None = None) -> None:
        """`make`: the sequence of a request. Raises RequestError if it cannot run any more. `stored`: see Audits."""
        self.allowance, self.audits = Allowance(), Audits(planner.limits.audit, planner, make, stored)
        self._planner, self._make = planner, make
        self._expected = STEP_SECONDS  # that the next step ahead takes at most
        self._running: Sequence | None = None
        self._prepared = self._used = self._wasted = self._num_known = 0  # tokens
        self._known: deque[Request] = deque()  # of the start, for which there is time until
        self._known_until = math.inf
        self._waiting: deque[Request] = deque()
        self._records: OrderedDict[str, tuple[Namespace, Prepared]] = OrderedDict()  # by request, the oldest first

    def __bool__(self) -> bool:
        """Whether a prompt runs, or one waits and may be computed."""
        return self._running is not None or (bool(self._waiting or self._known or self.audits) and self._may_run)

    @property
    def num_running(self) -> int:
        return self._running is not None

    def takes(self, seq: Sequence) -> bool:
        """Whether a sequence that has arrived is computed ahead. It then waits here."""
        if not seq.request.is_ahead:
            self.allowance.arrives(seq.arrived)
            return False
        self._add(seq)
        return True

    def _add(self, seq: Sequence) -> None:
        """Let a prompt wait. If it has a session, what the cache has of it is held at once. Of each tenant, and of all,
        the one that has waited longest leaves if there are too many."""
        request = seq.request
        if request.is_known:  # the operator's, within a budget
            self._known.append(request)
            self._known_until = seq.deadline
            return
        self._planner.kv.hold(seq, seq.num_tokens, seq.arrived)
        own = [other for other in self._waiting if other.tenant == request.tenant]
        if len(own) >= MAX_OF_TENANT or len(self._waiting) >= MAX_IN_ALL:
            self._waiting.remove(own[0] if len(own) >= MAX_OF_TENANT else self._waiting[0])
        self._waiting.append(request)

    def turn(self, now: float) -> int | None:
        """Before a plan: give way to requests, or run if there are none. Returns the most tokens of a plan ahead."""
        planner = self._planner
        self.allowance.planned()
        num_requests = len(planner.slots.running) + len(planner.waiting) - self.num_running
        seq = self._running
        if seq is not None:
            self._expect(seq.num_computed)
        if seq is not None and seq.status is Status.RUNNING and (num_requests or not self._may_run):
            planner.take_back(seq)
            seq.status = Status.FINISHED  # what its steps under way give is not wanted
            if not self.audits.runs(seq):
                self._row(seq.request).appendleft(seq.request)
            self._end()
        if self._known and now > self._known_until:
            logger.info("warm: the time is over, %d prefixes are left out", len(self._known))
            self._known.clear()
        while (row := self._waiting or self._known) and not (self._running or num_requests) and self._may_run:
            self._begin(row.popleft())
        if self.audits and not (self._running or num_requests) and self._may_run:
            self._audit()
        if self._running is None or num_requests:  # one that loads computes nothing
            return None
        return planner.pacer.tokens_within(STEP_SECONDS, self._running.num_computed, LEAST_TOKENS)

    def _begin(self, request: Request) -> None:
        """Queue a prompt unless the cache has nearly all that the next turn finds of it."""
        kv = self._planner.kv
        try:
            seq = self._make(request)
        except RequestError:  # its adapter has gone
            return
        found = kv.find(seq).num_tokens
        if seq.num_tokens - found < LEAST_GAIN:
            return
        self._expect(found)
        if self._may_run:
            self._run(seq)
        else:
            self._row(request).appendleft(request)

    def _row(self, request: Request) -> deque[Request]:
        return self._known if request.is_known else self._waiting

    def _run(self, seq: Sequence) -> None:
        self._running = seq
        self._planner.waiting.add(seq)

    def _audit(self) -> None:
        """Queue the next piece of an audit, if there is one."""
        self._expect(self.audits.context)
        seq = self.audits.next(partial(self._planner.pacer.tokens_within, AUDIT_SECONDS, least=LEAST_TOKENS))
        if seq is not None:
            self._run(seq)

    @property
    def _may_run(self) -> bool:
        return self.allowance.covers(self._expected)

    def _expect(self, context: int) -> None:
        """The next step ahead comes after so many tokens."""
        self._expected = max(STEP_SECONDS, self._planner.pacer.alone_seconds(LEAST_TOKENS, context))

    def _end(self) -> None:
        self._running = None
        self.audits.leave()

    def planned(self, step: Step) -> None:
        """After a plan: drop what found no room. Count what requests that begin have of next turns."""
        seq, slots = self._running, self._planner.slots
        if seq is not None and seq.status is Status.WAITING:
            self._planner.waiting.remove(seq)
            seq.status = Status.FINISHED
            if self.audits.runs(seq):
                self.audits.drop()
            self._end()
        for slot in step.new:
            if (new := slots[slot]) is not seq and not new.num_preemptions:
                self.audits.note(new)
                self._follow(new)

    def ends(self, seq: Sequence, now: float) -> bool:
        """Whether this sequence, which has ended, was computed ahead."""
        if seq is not self._running:
            self.allowance.ended(now - seq.arrived)
            return False
        self._end()
        return True

    @property
    def is_under_way(self) -> bool:
        """Whether a step ahead runs. The next one is not planned before its end, so that no request waits for two."""
        seq = self._running
        return seq is not None and seq.status is Status.RUNNING and seq.in_flight > 0

    def ran(self, sequences: list[Sequence], seconds: float, clock: Callable[[], float]) -> None:
        """A step of these sequences took so long, and has ended. One is computed ahead alone."""
        if sequences and sequences[0].request.is_ahead:
            self.allowance.ran(seconds, clock())

    def computes(self, seq: Sequence, start: int, count: int) -> bool:
        """Whether a step has computed `count` tokens of this sequence ahead. It counts them."""
        if seq is not self._running:
            return False
        if self.audits.runs(seq):
            self.audits.computes(seq, count)
            return True
        if seq.request.is_known:
            self._num_known += count
            return True
        namespace = self._planner.kv.namespace(seq)
        self._prepared, end = self._prepared + count, start + count
        known = self._records.get(seq.request_id)
        if known is None:
            self._records[seq.request_id] = namespace, Prepared(seq.cached_as(seq.num_tokens).copy(), start, end)
            self._bound(namespace)
        else:
            known[1].end = max(known[1].end, end)
        return True

    def _bound(self, namespace: Namespace) -> None:
        own = [name for name, (other, _) in self._records.items() if other == namespace]
        gone = own[:-MAX_OF_TENANT] or list(self._records)[: max(len(self._records) - MAX_IN_ALL, 0)]
        for name in gone:
            _, left = self._records.pop(name)
            self._wasted += left.end - left.start

    def _follow(self, seq: Sequence) -> None:
        """A request begins, with what the cache had. Count what it has of a prompt that was computed ahead, which then
        is no longer expected."""
        namespace, cached = self._planner.kv.namespace(seq), seq.cached_tokens or 0
        for name, (other, ahead) in self._records.items():
            if other == namespace and (same := _common(seq, ahead.tokens)) > ahead.start:
                del self._records[name]
                used = max(min(same, cached, ahead.end) - ahead.start, 0)
                self._used += used
                self._wasted += ahead.end - ahead.start - used
                self._waiting = deque(request for request in self._waiting if request.request_id != name)
                return

    def stats(self) -> dict[str, int]:
        """Tokens that were prepared, and those of them that a request has used, or that none can use any more. Tokens
        of what was known at the start (warm), and prompts of it that wait."""
        known = {"warm": self._num_known, "waiting": len(self._known)} if self._known or self._num_known else {}
        return {"prepared": self._prepared, "used": self._used, "wasted": self._wasted} | known


def _common(seq: Sequence, tokens: np.ndarray) -> int:
    """The number of first tokens that the sequence has in common with these."""
    count = min(seq.num_tokens, len(tokens))
    differ = np.flatnonzero(seq.cached_as(count) != tokens[:count])
    return int(differ[0]) if len(differ) else count
