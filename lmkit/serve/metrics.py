"""/metrics: Prometheus text from a registry of its own. Labels are the model's name and closed lists of values.

The metrics that routers and dashboards for vLLM read have vLLM's names, too.
"""

from __future__ import annotations

import math
import time
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from fastapi import APIRouter, Request, Response
from prometheus_client import CONTENT_TYPE_LATEST, CollectorRegistry, Counter, Histogram, generate_latest
from prometheus_client.core import Metric

from lmkit import hints
from lmkit.errors import RequestError
from lmkit.log import get_logger
from lmkit.serve.engine_figures import EngineFigures
from lmkit.serve.vllm_names import VllmNames
from lmkit.turbo.request import Request as EngineRequest
from lmkit.turbo.transport.async_engine import AsyncEngine
from lmkit.turbo.transport.output import RequestOutput
from lmkit.web import tracing

WELL = ("stop", "length", "repetition")
REASONS = (*WELL, "error", "timeout", "abort")
MAX_RETRY_SECONDS = 60  # also the period over which the queue's pace is measured
_SECONDS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 25.0, 60.0, 120.0, 300.0)
_LENGTHS = tuple(float(digit * 10**zeros) for zeros in range(6) for digit in (1, 2, 5))
_FEW = (0.0, 1.0, 2.0, 5.0, 10.0, 20.0, 50.0, 100.0)
HISTOGRAMS = {  # of requests that ended with stop or length, but for the first two
    "time_to_first_token_seconds": ("From a request's arrival to its first token", _SECONDS),
    "inter_token_latency_seconds": ("Between two tokens of a request", _SECONDS),
    "e2e_request_latency_seconds": ("From a request's arrival to its last token", _SECONDS),
    "request_queue_time_seconds": ("In the engine's queue", _SECONDS),
    "request_prefill_time_seconds": ("From the end of its waiting to its first token", _SECONDS),
    "request_decode_time_seconds": ("From its first token to its last", _SECONDS),
    "request_inference_time_seconds": ("From the end of its waiting to its last token", _SECONDS),
    "request_prompt_tokens": ("Tokens of a prompt", _LENGTHS),
    "request_generation_tokens": ("Tokens of an answer", _LENGTHS),
    "request_num_preemptions": ("Times that a request lost its KV blocks", _FEW),
}
ASKED = {  # of prompts that were admitted
    "request_params_n": ("Choices of a prompt", _FEW),
    "request_params_max_tokens": ("The most tokens that a choice may have", _LENGTHS),
}
REJECTIONS = ("queue_full", "rate_limit_exceeded")

router = APIRouter()
log = get_logger(__name__)


@router.get("/metrics")
async def metrics(request: Request) -> Response:
    registries = [model.serving.metrics.registry for model in request.app.state.pool.models]
    registries.append(request.app.state.batches.registry)
    return Response(generate_latest(_Merged(registries)), media_type=CONTENT_TYPE_LATEST)


class _Merged(CollectorRegistry):
    """The metrics of several registries, each name once with the series of all. They differ in the model's name."""

    def __init__(self, registries: Sequence[CollectorRegistry]) -> None:
        super().__init__()
        self._registries = registries

    def collect(self) -> Iterator[Metric]:
        families: dict[str, Metric] = {}
        for metric in (metric for registry in self._registries for metric in registry.collect()):
            if (family := families.setdefault(metric.name, metric)) is not metric:
                family.samples += metric.samples
        yield from families.values()


class Metrics:
    """Counters and histograms of requests. A scrape reads the engine's own figures from the engine."""

    def __init__(self, engine: AsyncEngine, model_name: str) -> None:
        self.registry = CollectorRegistry()
        self.registry.register(EngineFigures(engine, model_name))
        labels = ("model_name",)
        histograms = {
            name: Histogram(f"lmkit:{name}", text, labels, buckets=buckets, registry=self.registry)
            for name, (text, buckets) in {**HISTOGRAMS, **ASKED}.items()
        }
        self.histograms = {name: histogram.labels(model_name) for name, histogram in histograms.items()}
        prompt_tokens = Counter(
            "lmkit:prompt_tokens", "Prompt tokens of requests that began to answer", labels, registry=self.registry
        )
        generation_tokens = Counter("lmkit:generation_tokens", "Tokens generated", labels, registry=self.registry)
        self.prompt_tokens = prompt_tokens.labels(model_name)
        self.generation_tokens = generation_tokens.labels(model_name)
        self.ended = Counter(
            "lmkit:requests",
            "Requests that ended: stop, length, error, timeout (their own), or abort (the client left)",
            (*labels, "finish_reason"),
            registry=self.registry,
        )
        self.rejected = Counter(
            "lmkit:admission_rejections",
            "Requests that were refused because too much waits: of all clients, or of this one",
            (*labels, "reason"),
            registry=self.registry,
        )
        self._ignored = Counter(
            "lmkit:ignored_fields",
            "Fields of requests that were left out because they change nothing",
            labels,
            registry=self.registry,
        ).labels(model_name)
        self._noted: set[str] = set()  # fields that the log has named
        counters = [prompt_tokens, generation_tokens, self.ended, self.rejected]
        self.registry.register(VllmNames([*histograms.values(), *counters]))
        self.model_name = model_name
        self._engine = engine
        self._finished: deque[float] = deque(maxlen=256)  # times at which the last requests finished
        for reason in REASONS:
            self.ended.labels(model_name, reason)
        for reason in REJECTIONS:
            self.rejected.labels(model_name, reason)

    def ignored(self, name: str) -> None:
        """Count a field that was left out. The log names each once."""
        self._ignored.inc()
        if name not in self._noted and len(self._noted) < hints.MAX_NAMES:
            self._noted.add(name)
            log.info("requests have the field %r, which changes nothing here and is left out", name)

    @contextmanager
    def admitting(self) -> Iterator[None]:
        """Count the refusal that the block raises, if it is one of admission."""
        try:
            yield
        except RequestError as error:
            self._refused(error)
            raise

    def _refused(self, error: Exception) -> None:
        if isinstance(error, RequestError) and error.code in REJECTIONS:
            self.rejected.labels(self.model_name, error.code).inc()

    def admitted(self, requests: Sequence[EngineRequest], choices_per_prompt: int, max_model_len: int) -> None:
        """Observe what the requests of one body ask for, unless they are for embeddings."""
        for request in requests[::choices_per_prompt]:
            if request.pooling is not None:
                continue
            self.histograms["request_params_n"].observe(choices_per_prompt)
            most, room = request.params.max_tokens, max_model_len - len(request.prompt_ids)
            self.histograms["request_params_max_tokens"].observe(room if most is None else most)

    def retry_seconds(self) -> int:
        """Seconds that a client should wait if the queue is full, in [1, MAX_RETRY_SECONDS].

        It is the time in which the waiting requests are answered at the pace of the last minute; 1 if no request was
        finished in that minute.
        """
        now = time.monotonic()
        recent = [end for end in self._finished if now - end < MAX_RETRY_SECONDS]
        if not recent:
            return 1
        seconds = (now - recent[0]) / len(recent) * self._engine.stats().num_waiting
        return min(max(math.ceil(seconds), 1), MAX_RETRY_SECONDS)

    @contextmanager
    def track(self, request: EngineRequest | None = None) -> Iterator[_Tracker]:
        """Follow one engine request from its arrival to its end, however it ends. `request` is for its trace."""
        tracker = _Tracker(self)
        try:
            yield tracker
        except Exception as error:
            late = isinstance(error, RequestError) and error.code == "deadline_exceeded"
            tracker.reason = "timeout" if late else "error"
            self._refused(error)
            raise
        finally:
            self.ended.labels(self.model_name, tracker.reason).inc()
            if tracker.reason in WELL:
                self._finished.append(tracker.end())
            if tracing.is_on() and request is not None:
                tracker.trace(request)


class _Tracker:
    """One request's times. `prefill` ends with its first token, `decode` with its last."""

    def __init__(self, metrics: Metrics) -> None:
        self._metrics = metrics
        self._start = self._last = self._first = time.monotonic()
        self.reason = "abort"  # unless something else ends it
        self._num_tokens = self._num_prompt_tokens = self._num_preemptions = 0
        self._queued = 0.0

    def output(self, output: RequestOutput) -> None:
        now, histograms = time.monotonic(), self._metrics.histograms
        new = output.num_output_tokens - self._num_tokens
        since, later = (now - self._last) / max(new, 1), new
        if new and not self._num_tokens:
            histograms["time_to_first_token_seconds"].observe(now - self._start)
            since, later = 0.0, new - 1
            self._metrics.prompt_tokens.inc(output.num_prompt_tokens)
            self._first, self._queued = now, output.queue_seconds
        for _ in range(later):  # tokens of one output are as far apart as they came on average
            histograms["inter_token_latency_seconds"].observe(since)
        self._metrics.generation_tokens.inc(new)
        self._num_tokens, self._last = output.num_output_tokens, now
        self._num_prompt_tokens = output.num_prompt_tokens
        self._num_preemptions = output.num_preemptions
        if output.finish_reason is not None:
            self.reason = "repetition" if output.repeats else output.finish_reason

    def end(self) -> float:
        """Observe a request that has ended well. Returns the time."""
        now = time.monotonic()
        whole, first = now - self._start, self._first - self._start
        values = {
            "e2e_request_latency_seconds": whole,
            "request_prompt_tokens": self._num_prompt_tokens,
            "request_generation_tokens": self._num_tokens,
            "request_num_preemptions": self._num_preemptions,
        }
        if self._num_tokens:
            values |= {
                "request_queue_time_seconds": self._queued,
                "request_prefill_time_seconds": max(0.0, first - self._queued),
                "request_decode_time_seconds": whole - first,
                "request_inference_time_seconds": max(0.0, whole - self._queued),
            }
        for name, value in values.items():
            self._metrics.histograms[name].observe(value)
        return now

    def trace(self, request: EngineRequest) -> None:
        """Spans of the request that has ended: the whole, and its time in the queue, in prefill and in decoding."""
        now = time.monotonic()
        stages = [tracing.Stage("request", self._start, now)]
        if self._num_tokens:
            begun = min(self._start + self._queued, self._first)
            stages.append(tracing.Stage("queue", self._start, begun))
            stages.append(tracing.Stage("prefill", begun, self._first))
            stages.append(tracing.Stage("decode", self._first, self._last))
        params = request.params
        about = {
            "gen_ai.request.model": self._metrics.model_name,
            "gen_ai.response.model": self._metrics.model_name,
            "gen_ai.response.id": request.request_id,
            "gen_ai.request.temperature": params.temperature,
            "gen_ai.request.top_p": params.top_p,
            "gen_ai.usage.input_tokens": len(request.prompt_ids),
            "gen_ai.usage.output_tokens": self._num_tokens,
            "gen_ai.response.finish_reasons": (self.reason,),
        }
        if params.max_tokens is not None:
            about["gen_ai.request.max_tokens"] = params.max_tokens
        failed = self.reason if self.reason in ("error", "timeout") else ""
        tracing.record(self._metrics.model_name, stages, about, failed=failed)
