"""OpenTelemetry traces: a span for each request, in server and proxy, and below it what the engine did for it.

Traces are off unless `start` has been called, which alone imports the packages. Spans have no prompts, answers or keys.
"""

from __future__ import annotations

import re
import time
from collections.abc import Mapping
from typing import Any, NamedTuple

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from lmkit.environment import environment
from lmkit.errors import ConfigError
from lmkit.extras import needed_for

TRACES_PATH = "/v1/traces"  # of a collector, by default
OPERATIONS = {  # gen_ai.operation.name
    "/v1/chat/completions": "chat",
    "/v1/messages": "chat",
    "/v1/responses": "chat",
    "/api/chat": "chat",
    "/v1/completions": "text_completion",
    "/generate": "text_completion",
    "/api/generate": "text_completion",
    "/completion": "text_completion",
    "/infill": "text_completion",
    "/v1/embeddings": "embeddings",
    "/api/embed": "embeddings",
    "/api/embeddings": "embeddings",
}
_HEADERS = ("traceparent", "tracestate")


class _Process:
    """What `start` has set up."""

    tracer: Any = None
    trace: Any = None  # the module opentelemetry.trace
    propagator: Any = None


_process = _Process()


class Stage(NamedTuple):
    """A part of a request's time, in seconds of `time.monotonic`."""

    name: str
    start: float
    end: float


def is_on() -> bool:
    return _process.tracer is not None


def start(service: str, endpoint: str | None = None, exporter: Any = None) -> None:
    """Record traces from now on. The variables OTEL_* say where they go, unless there is an `endpoint`.

    `exporter` gets each span at its end, in place of a collector. Raises UnsupportedError without lmkit[otel].
    """
    with needed_for("traces"):
        from opentelemetry import trace
        from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
        from opentelemetry.sdk.resources import SERVICE_NAME, Resource
        from opentelemetry.sdk.trace import TracerProvider
        from opentelemetry.sdk.trace.export import BatchSpanProcessor, SimpleSpanProcessor
        from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator
    resource = Resource.create()
    if str(resource.attributes.get(SERVICE_NAME, "unknown_service")).startswith("unknown_service"):
        resource = resource.merge(Resource({SERVICE_NAME: service}))
    provider = TracerProvider(resource=resource)
    if exporter is not None:
        provider.add_span_processor(SimpleSpanProcessor(exporter))
    else:
        provider.add_span_processor(BatchSpanProcessor(OTLPSpanExporter(endpoint=_traces_url(endpoint))))
    _process.trace, _process.propagator = trace, TraceContextTextMapPropagator()
    _process.tracer = provider.get_tracer("lmkit")


def start_if_wanted(service: str, endpoint: str | None) -> None:
    """Start if there is an endpoint, here or in the environment. Raises ConfigError and UnsupportedError."""
    if endpoint is not None and not re.fullmatch(r"https?://[^/\s]+(/\S*)?", endpoint):
        raise ConfigError(f"--otlp-traces-endpoint {endpoint!r}: write a URL, for example http://localhost:4318")
    if endpoint is not None or environment().traces:
        start(service, endpoint)


def stop() -> None:
    """Record nothing from now on."""
    _process.tracer = None


def _traces_url(endpoint: str | None) -> str | None:
    """`http://collector:4318` -> its address of traces. One with a path stays."""
    if endpoint is None or "/" in endpoint.partition("://")[2].rstrip("/"):
        return endpoint
    return endpoint.rstrip("/") + TRACES_PATH


class Traced:
    """Middleware: a span for each POST request, below the one that its traceparent names.

    Inside, the request's traceparent names the new span, so what is sent on carries it.
    """

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if not is_on() or scope["type"] != "http" or scope["method"] != "POST":
            await self._app(scope, receive, send)
            return
        trace, path = _process.trace, scope["path"][:128]
        carried = {name.decode(): value.decode("latin-1") for name, value in reversed(scope["headers"])}
        parent = _process.propagator.extract({name: carried[name] for name in _HEADERS if name in carried})
        about = {"http.request.method": "POST", "url.path": path}
        if path in OPERATIONS:
            about["gen_ai.operation.name"] = OPERATIONS[path]
        name = f"POST {path if path in OPERATIONS else 'other'}"  # a closed list, so that names can be grouped
        with _process.tracer.start_as_current_span(name, parent, kind=trace.SpanKind.SERVER, attributes=about) as span:

            async def watched(message: Message) -> None:
                if message["type"] == "http.response.start":
                    span.set_attribute("http.response.status_code", message["status"])
                    if message["status"] >= 500:
                        span.set_status(trace.StatusCode.ERROR)
                await send(message)

            await self._app({**scope, "headers": _with_parent(scope["headers"])}, receive, watched)


def _with_parent(headers: list[tuple[bytes, bytes]]) -> list[tuple[bytes, bytes]]:
    """Headers in which the current span is the parent."""
    added: dict[str, str] = {}
    _process.propagator.inject(added)
    kept = [(name, value) for name, value in headers if name.decode("latin-1") not in _HEADERS]
    return kept + [(name.encode(), value.encode("latin-1")) for name, value in added.items()]


def record(name: str, stages: list[Stage], attributes: Mapping[str, Any], *, failed: str = "") -> None:
    """A span of the current request that has ended, and one for each of its stages. The first stage is the whole."""
    current = _process.trace.get_current_span()
    if not current.is_recording():
        return
    trace, offset = _process.trace, time.time() - time.monotonic()
    operation = (current.attributes or {}).get("gen_ai.operation.name", "text_completion")

    def span(stage: Stage, title: str, context: Any, about: Mapping[str, Any]) -> Any:
        begun = _process.tracer.start_span(
            title, context, attributes=dict(about), start_time=round((stage.start + offset) * 1e9)
        )
        if failed and stage is stages[0]:
            begun.set_status(trace.StatusCode.ERROR)
            begun.set_attribute("error.type", failed)
        begun.end(round((stage.end + offset) * 1e9))
        return begun

    about = {"gen_ai.operation.name": operation, "gen_ai.provider.name": "lmkit", **attributes}
    whole = span(stages[0], f"{operation} {name}", None, about)
    for stage in stages[1:]:
        span(stage, stage.name, trace.set_span_in_context(whole), {})
