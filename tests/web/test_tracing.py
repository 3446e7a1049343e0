"""Traces: one for a request's way through the proxy, the server and the engine."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from lmkit.config import ServerConfig
from lmkit.errors import ConfigError
from lmkit.proxy.app import Proxy
from lmkit.proxy.config import NodeConfig, ProxyConfig
from lmkit.proxy.server import http_server as proxy_server
from lmkit.serve.http import http_server as serve_server
from lmkit.web import tracing
from tests.serve.in_process import CHAT, TEXT, TOKENIZER, App, ScriptedEngine, StubEngine, one_model
from tests.web.test_server_and_proxy import running

CLIENT = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"
SECRET = "a-secret-prompt"


@pytest.fixture
def exporter() -> Iterator[Any]:
    pytest.importorskip("opentelemetry.exporter.otlp.proto.http")
    from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

    kept = InMemorySpanExporter()
    tracing.start("test", exporter=kept)
    yield kept
    tracing.stop()


def spans(exporter: Any) -> dict[str, Any]:
    return {span.name: span for span in exporter.get_finished_spans()}


def test_a_request_of_the_server(exporter: Any) -> None:
    body = CHAT | {"messages": [{"role": "user", "content": SECRET}], "max_tokens": 8, "temperature": 0.5}
    app = App(ScriptedEngine())
    assert app.request("POST", "/v1/chat/completions", json=body, headers={"traceparent": CLIENT}).status_code == 200
    found = spans(exporter)
    name = app.serving.model_name
    assert found.keys() == {"POST /v1/chat/completions", f"chat {name}", "queue", "prefill", "decode"}
    request, engine = found["POST /v1/chat/completions"], found[f"chat {name}"]
    assert f"{request.context.trace_id:032x}" == CLIENT.split("-")[1]
    assert f"{request.parent.span_id:016x}" == CLIENT.split("-")[2]
    assert request.attributes["http.response.status_code"] == 200
    assert engine.parent.span_id == request.context.span_id
    expected = {
        "gen_ai.operation.name": "chat", "gen_ai.request.model": name, "gen_ai.request.max_tokens": 8,
        "gen_ai.request.temperature": 0.5, "gen_ai.usage.output_tokens": 2,
        "gen_ai.response.finish_reasons": ("length",),
    }  # fmt: skip
    assert engine.attributes.items() >= expected.items()
    stages = [found[stage] for stage in ("queue", "prefill", "decode")]
    assert all(stage.parent.span_id == engine.context.span_id for stage in stages)
    assert [stage.start_time for stage in stages] == sorted(stage.start_time for stage in stages)
    assert SECRET not in "".join(span.to_json() for span in found.values())


def test_a_request_that_fails_and_one_that_is_refused(exporter: Any) -> None:
    app = App(StubEngine(RuntimeError("no")))
    assert app.post("/v1/completions", TEXT).status_code == 500
    found = spans(exporter)
    assert not found["POST /v1/completions"].status.is_ok
    assert found[f"text_completion {app.serving.model_name}"].attributes["error.type"] == "error"
    exporter.clear()
    assert app.post("/v1/completions", TEXT | {"n": 0}).status_code == 400
    assert app.post("/nowhere", {}).status_code == 404
    assert app.request("GET", "/health").status_code == 200
    assert spans(exporter).keys() == {"POST /v1/completions", "POST other"}


@pytest.mark.anyio
async def test_one_trace_through_the_proxy(exporter: Any) -> None:
    config = ServerConfig()
    models = one_model(ScriptedEngine(), config)
    async with running(lambda ready: serve_server(models, [TOKENIZER], config, ready)) as node:
        proxy_config = ProxyConfig(nodes=(NodeConfig(url=node),), drain_seconds=0)
        async with (
            Proxy(proxy_config) as proxy,
            running(lambda ready: proxy_server(proxy_config, proxy, ready)) as address,
            httpx.AsyncClient(trust_env=False, timeout=30) as client,
        ):
            await proxy.checked.wait()
            headers = {"traceparent": CLIENT, "tracestate": "vendor=value"}
            body = CHAT | {"model": models.models[0].name}
            answer = await client.post(f"{address}/v1/chat/completions", json=body, headers=headers)
            assert answer.status_code == 200
    found = exporter.get_finished_spans()
    assert {f"{span.context.trace_id:032x}" for span in found} == {CLIENT.split("-")[1]}
    server, first = [span for span in found if span.name == "POST /v1/chat/completions"]
    assert server.parent.span_id == first.context.span_id
    assert f"{first.parent.span_id:016x}" == CLIENT.split("-")[2]
    assert server.context.trace_state["vendor"] == "value"


def test_a_trace_that_is_not_sampled_is_not_recorded(exporter: Any) -> None:
    headers = {"traceparent": CLIENT.removesuffix("01") + "00"}
    assert App(ScriptedEngine()).request("POST", "/v1/completions", json=TEXT, headers=headers).status_code == 200
    assert not exporter.get_finished_spans()


def test_without_the_option_nothing_is_imported() -> None:
    code = "import sys, lmkit.serve.http, lmkit.proxy.server; "
    code += "print(*(n for n in sys.modules if 'telemetry.sdk' in n or 'exporter' in n))"
    ended = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=True)
    assert ended.stdout.strip() == ""


def test_an_endpoint_is_a_url() -> None:
    with pytest.raises(ConfigError, match="--otlp-traces-endpoint 'collector:4317': write a URL"):
        tracing.start_if_wanted("test", "collector:4317")
