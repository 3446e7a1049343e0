"""Admission: how many sequences, and tokens of prompts, one tenant and all together may have open."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

from lmkit.config import EngineConfig
from lmkit.errors import RequestError
from lmkit.turbo.request import Request


class Admission:
    """Counts the open sequences of each tenant. A body of several prompts or choices is admitted whole or refused.

    A tenant may fill `queue_quota` of the places: those of the queue and of the running batch.
    """

    def __init__(self, config: EngineConfig, max_batch_size: Callable[[], int] | None = None) -> None:
        """`max_batch_size` gives the sequences in one step; None = as configured."""
        self._queue = config.max_queue
        self._max_batch_size = max_batch_size or (lambda: config.sequences_per_step)
        self._tokens = config.max_queued_tokens
        self._quota = config.queue_quota
        self._open: Counter[str] = Counter()
        self._open_tokens: Counter[str] = Counter()

    @contextmanager
    def admit(self, requests: Sequence[Request]) -> Iterator[None]:
        """Count the requests of one body while the block runs.

        Raises RequestError: rate_limit_exceeded if the tenant has too much open, queue_full if all together have, and
        invalid_request if the body is more than a tenant may ever have open.
        """
        tenant, count = requests[0].tenant, len(requests)
        tokens = sum(len(request.prompt_ids) for request in requests)
        self._check(tenant, count, tokens)
        self._open[tenant] += count
        self._open_tokens[tenant] += tokens
        try:
            yield
        finally:
            for counts, number in ((self._open, count), (self._open_tokens, tokens)):
                counts[tenant] -= number
                if not counts[tenant]:
                    del counts[tenant]

    def _check(self, tenant: str, count: int, tokens: int) -> None:
        for counts, number, total, what in (
            (self._open, count, self._queue + self._max_batch_size(), "sequences"),
            (self._open_tokens, tokens, self._tokens, "prompt tokens"),
        ):
            own = max(1, int(total * self._quota))
            if number > own:
                message = f"{number} {what} in one request; this server takes at most {own} of one client: send fewer"
                raise RequestError("invalid_request", message)
            if counts.total() + number > total:
                raise RequestError("queue_full", "too many requests are waiting; try again later")
            if counts[tenant] + number > own:
                message = f"{counts[tenant]} {what} of this client are open, and {own} may be: try again later"
                raise RequestError("rate_limit_exceeded", message)
