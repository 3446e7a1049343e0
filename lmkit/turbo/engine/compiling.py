"""Requests whose grammar is being compiled, beside the steps: the scheduler gets each when its first mask is ready.

One grammar is compiled at a time. Tenants take turns, so that one that sends many waits behind itself.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from concurrent.futures import Future
from concurrent.futures import wait as wait_for
from typing import NamedTuple

from msgspec.structs import replace

from lmkit.errors import RequestError
from lmkit.log import get_logger
from lmkit.turbo.request import Request, StepOutput
from lmkit.turbo.runners.guides import Guides
from lmkit.turbo.scheduling.limits import SchedulerLimits, check_request

log = get_logger(__name__)

TOO_MUCH = "following its grammar takes too much time or memory; make it simpler"


class _Pending(NamedTuple):
    request: Request
    deadline: float

    @property
    def grammar(self) -> tuple[str, str]:
        return self.request.tenant, self.request.params.grammar


class Compiling:
    """`admit` gives a request to the scheduler."""

    def __init__(
        self,
        guides: Guides,
        limits: SchedulerLimits,
        admit: Callable[[Request], None],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._guides, self._limits, self._admit, self._clock = guides, limits, admit, clock
        self._pending: list[_Pending] = []  # in the order in which they came
        self._under_way: tuple[tuple[str, str], Future[None]] | None = None
        self._served: dict[str, None] = {}  # tenants that wait, the one that was served last at the end
        self._outputs: list[StepOutput] = []

    def __len__(self) -> int:
        return len(self._pending)

    def has_work(self) -> bool:
        """Whether to call `advance`."""
        return bool(self._pending or self._outputs)

    def add(self, request: Request) -> None:
        """Raises RequestError if the request can never run, or if too many wait."""
        grammar = request.params.grammar
        if not grammar or self._guides.has(request.tenant, grammar):
            self._admit(request)
            return
        check_request(request, self._limits)
        if len(self._pending) >= self._limits.max_queue:
            raise RequestError("queue_full", f"{len(self._pending)} requests wait already, the limit: try again later")
        timeout = self._limits.request_timeout if request.timeout is None else request.timeout
        self._pending.append(_Pending(request, math.inf if timeout is None else self._clock() + timeout))
        self._begin()

    def abort(self, request_id: str) -> None:
        self._end(lambda pending: pending.request.request_id == request_id, finish_reason="abort")

    def advance(self) -> list[StepOutput]:
        """Hand over the requests whose grammar is ready. Returns the ends of requests that get no further."""
        now = self._clock()
        late = {"error": "its time was up", "error_code": "deadline_exceeded"}
        self._end(lambda pending: pending.deadline <= now, finish_reason="error", **late)
        if self._under_way is not None:
            grammar, done = self._under_way
            if done.done():
                self._under_way = None
                self._finish(grammar, done.exception())
                self._begin()
        outputs, self._outputs = self._outputs, []
        return outputs

    def wait(self, seconds: float) -> None:
        """Until a grammar is ready, so long at most."""
        if self._under_way is not None and not self._outputs:
            wait_for([self._under_way[1]], seconds)

    def _begin(self) -> None:
        """Compile the next grammar, unless one is under way."""
        if self._under_way is not None or not self._pending:
            return
        waiting = {pending.request.tenant: pending for pending in reversed(self._pending)}
        self._served = {tenant: None for tenant in self._served if tenant in waiting}
        new = [tenant for tenant in waiting if tenant not in self._served]
        tenant = new[-1] if new else next(iter(self._served))
        self._served.pop(tenant, None)
        self._served[tenant] = None
        grammar = waiting[tenant].grammar
        self._under_way = grammar, self._guides.compile(*grammar)

    def _finish(self, grammar: tuple[str, str], error: BaseException | None) -> None:
        if error is not None:
            log.warning("a grammar could not be compiled; its requests end with an error: %r", error)
            refused = {"error": TOO_MUCH, "error_code": "invalid_request"}
            self._end(lambda pending: pending.grammar == grammar, finish_reason="error", **refused)
            return
        ready = [pending for pending in self._pending if pending.grammar == grammar]
        self._pending = [pending for pending in self._pending if pending.grammar != grammar]
        for request, deadline in ready:
            timeout = None if deadline == math.inf else max(deadline - self._clock(), 1e-3)
            try:
                self._admit(replace(request, timeout=timeout))
            except RequestError as refusal:
                failed = {"error": refusal.message, "error_code": refusal.code}
                self._outputs.append(_last(request, finish_reason="error", **failed))

    def _end(self, which: Callable[[_Pending], bool], **fields: str) -> None:
        self._outputs += [_last(pending.request, **fields) for pending in self._pending if which(pending)]
        self._pending = [pending for pending in self._pending if not which(pending)]


def _last(request: Request, **fields: str) -> StepOutput:
    return StepOutput(request_id=request.request_id, token_ids=[], **fields)  # type: ignore[arg-type]
