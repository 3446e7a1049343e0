"""/metrics: Prometheus text, in a registry of its own. Labels are the model's name and closed lists of values.

The three gauges by which third-party routers balance load are there under vLLM's names too.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager

from fastapi import APIRouter, Request, Response
from prometheus_client import CONTENT_TYPE_LATEST, CollectorRegistry, Counter, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from lmkit.turbo.async_engine import AsyncEngine
from lmkit.turbo.output import RequestOutput

_SECONDS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 25.0, 60.0, 120.0, 300.0)

router = APIRouter()


@router.get("/metrics")
async def metrics(request: Request) -> Response:
    registry = request.app.state.serving.metrics.registry
    return Response(generate_latest(registry), media_type=CONTENT_TYPE_LATEST)


class Metrics:
    """Counts what requests do; asks the engine for the rest when scraped."""

    def __init__(self, engine: AsyncEngine, model_name: str) -> None:
        self.registry = CollectorRegistry()
        self.registry.register(_EngineCollector(engine, model_name))
        labels = ("model_name",)

        def histogram(name: str, text: str) -> Histogram:
            return Histogram(name, text, labels, buckets=_SECONDS, registry=self.registry).labels(model_name)

        self.first_token = histogram("lmkit:time_to_first_token_seconds", "From a request's arrival to its first token")
        self.between_tokens = histogram("lmkit:inter_token_latency_seconds", "Between two tokens of a request")
        self.whole = histogram("lmkit:e2e_request_latency_seconds", "From a request's arrival to its last token")
        self.prompt_tokens = Counter(
            "lmkit:prompt_tokens", "Prompt tokens of requests that began to answer", labels, registry=self.registry
        ).labels(model_name)
        self.generation_tokens = Counter(
            "lmkit:generation_tokens", "Tokens generated", labels, registry=self.registry
        ).labels(model_name)
        self.ended = Counter(
            "lmkit:requests",
            "Requests that ended: stop, length, error, or abort (the client left)",
            (*labels, "finish_reason"),
            registry=self.registry,
        )
        self.model_name = model_name
        for reason in ("stop", "length", "error", "abort"):
            self.ended.labels(model_name, reason)

    @contextmanager
    def track(self) -> Iterator[_Tracker]:
        """Follow one engine request from its arrival to its end, however it ends."""
        tracker = _Tracker(self)
        try:
            yield tracker
        except Exception:
            tracker.reason = "error"
            raise
        finally:
            self.ended.labels(self.model_name, tracker.reason).inc()
            if tracker.reason in ("stop", "length"):
                self.whole.observe(time.monotonic() - tracker.start)


class _Tracker:
    def __init__(self, metrics: Metrics) -> None:
        self._metrics = metrics
        self.start = self._last = time.monotonic()
        self.reason = "abort"  # unless something else ends it
        self._num_tokens = 0

    def output(self, output: RequestOutput) -> None:
        now = time.monotonic()
        new = output.num_output_tokens - self._num_tokens
        if new and not self._num_tokens:
            self._metrics.first_token.observe(now - self.start)
            self._metrics.prompt_tokens.inc(output.num_prompt_tokens)
        elif new:
            self._metrics.between_tokens.observe((now - self._last) / new)
        self._metrics.generation_tokens.inc(new)
        self._num_tokens, self._last = output.num_output_tokens, now
        if output.finish_reason is not None:
            self.reason = output.finish_reason


class _EngineCollector(Collector):
    def __init__(self, engine: AsyncEngine, model_name: str) -> None:
        self._engine = engine
        self._model_name = model_name

    def collect(self) -> Iterator[Metric]:
        stats, engine = self._engine.stats(), self._engine
        usage = stats.blocks_used / stats.blocks_total if stats.blocks_total else 0.0
        for prefix in ("lmkit", "vllm"):
            yield self._gauge(f"{prefix}:num_requests_running", "Requests in the batch", stats.num_running)
            yield self._gauge(f"{prefix}:num_requests_waiting", "Requests in the queue", stats.num_waiting)
            yield self._gauge(f"{prefix}:kv_cache_usage_perc", "Share of KV blocks in use, 0 to 1", usage)
        failures = engine.num_failures + stats.failed_steps
        yield self._gauge("lmkit:engine_up", "1 if requests are accepted", float(engine.state == "ready"))
        yield self._counter("lmkit:num_preemptions", "Sequences that lost their KV blocks", stats.preemptions)
        yield self._counter("lmkit:engine_steps", "Steps of the engine", stats.steps)
        yield self._counter("lmkit:engine_failures", "Engine calls that raised", failures)
        yield self._counter("lmkit:engine_starts", "Starts of the engine process", engine.num_starts)

    def _gauge(self, name: str, text: str, value: float) -> GaugeMetricFamily:
        family = GaugeMetricFamily(name, text, labels=["model_name"])
        family.add_metric([self._model_name], value)
        return family

    def _counter(self, name: str, text: str, value: float) -> CounterMetricFamily:
        family = CounterMetricFamily(name, text, labels=["model_name"])
        family.add_metric([self._model_name], value)
        return family
