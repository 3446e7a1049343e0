"""The names that dashboards for vLLM read, beside lmkit's own. They are copied when somebody scrapes."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from prometheus_client.core import Metric
from prometheus_client.metrics import MetricWrapperBase
from prometheus_client.registry import Collector

# lmkit's name -> vLLM's, where more than the prefix differs. Several: names of several versions.
NAMES = {
    "inter_token_latency_seconds": ("inter_token_latency_seconds", "time_per_output_token_seconds"),
    "requests": ("request_success",),
}
LABELS = {"finish_reason": "finished_reason"}


class VllmNames(Collector):
    """The families of `metrics` with vLLM's names and labels."""

    def __init__(self, metrics: Sequence[MetricWrapperBase]) -> None:
        self._metrics = metrics

    def collect(self) -> Iterator[Metric]:
        for metric in self._metrics:
            for family in metric.collect():
                own = family.name.removeprefix("lmkit:")
                for name in NAMES.get(own, (own,)):
                    yield _renamed(family, f"vllm:{name}")


def _renamed(family: Metric, name: str) -> Metric:
    renamed = Metric(name, family.documentation, family.type)
    renamed.samples = [
        sample._replace(
            name=name + sample.name.removeprefix(family.name),
            labels={LABELS.get(label, label): value for label, value in sample.labels.items()},
        )
        for sample in family.samples
    ]
    return renamed
