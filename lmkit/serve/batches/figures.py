"""The figures of batches at /metrics."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from typing import get_args

from prometheus_client.core import GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from lmkit.serve.batches.batch import ENDED, Batch, Status


class BatchFigures(Collector):
    """Of the batches that the server keeps. A line of one that has ended without it is not open."""

    def __init__(self, batches: Callable[[], Iterable[Batch]]) -> None:
        self._batches = batches

    def collect(self) -> Iterator[Metric]:
        kept = list(self._batches())
        statuses = Counter(batch.status for batch in kept)
        lines = {
            "open": sum(batch.total - batch.completed - batch.failed for batch in kept if batch.status not in ENDED),
            "completed": sum(batch.completed for batch in kept),
            "failed": sum(batch.failed for batch in kept),
        }
        by_status = GaugeMetricFamily("lmkit:batches", "Batches that are kept", labels=["status"])
        for status in get_args(Status):
            by_status.add_metric([status], statuses[status])
        by_state = GaugeMetricFamily("lmkit:batch_lines", "Requests of the batches that are kept", labels=["state"])
        for state, count in lines.items():
            by_state.add_metric([state], count)
        yield from (by_status, by_state)
