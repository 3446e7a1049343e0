"""Requests that take too long, and a queue that is full: what the client is told."""

from __future__ import annotations

import time
from collections.abc import AsyncGenerator
from typing import Any

import pytest

from lmkit.errors import RequestError
from lmkit.serve import metrics as metrics_module
from lmkit.serve.metrics import Metrics
from lmkit.turbo.request import EngineStats, Request, StepOutput
from lmkit.turbo.transport.steps import Rest
from tests.serve.in_process import CHAT, CHAT_PATH, TEXT, TEXT_PATH, App, ScriptedEngine, StubEngine, send

MESSAGE = "not done after 2 s"
STREAM = {"stream": True}


class Late(StubEngine):
    """Ends with its deadline, after so many tokens."""

    def __init__(self, num_tokens: int, code: str = "deadline_exceeded") -> None:
        super().__init__()
        self._num_tokens, self._code = num_tokens, code

    async def generate(self, request: Request, rest: Rest = None) -> AsyncGenerator[StepOutput]:
        for _ in range(self._num_tokens):
            yield StepOutput(request_id=request.request_id, token_ids=[70])
        yield StepOutput(
            request_id=request.request_id,
            token_ids=[],
            finish_reason="error",
            error=MESSAGE,
            error_code=self._code,
        )


@pytest.mark.parametrize(("path", "body"), [(CHAT_PATH, CHAT), (TEXT_PATH, TEXT)])
@pytest.mark.parametrize(("num_tokens", "stream"), [(0, {}), (3, {}), (0, STREAM)])
def test_a_deadline_is_a_504(path: str, body: dict[str, Any], num_tokens: int, stream: dict[str, Any]) -> None:
    response = send(Late(num_tokens), path=path, json=body | stream | {"timeout": 2})
    assert response.status_code == 504
    assert response.json()["error"] == {
        "message": MESSAGE, "type": "server_error", "param": None, "code": "deadline_exceeded"
    }  # fmt: skip
    assert "retry-after" not in response.headers


def test_a_deadline_in_a_stream_is_its_last_event() -> None:
    response = send(Late(3), json=CHAT | STREAM)
    assert response.status_code == 200
    last = response.text.split("\n\n")[-2]
    assert "deadline_exceeded" in last
    assert MESSAGE in last
    assert "[DONE]" not in response.text


def test_an_engine_error_says_nothing() -> None:
    response = send(Late(0, "engine_error"), json=CHAT)
    assert response.status_code == 500
    assert MESSAGE not in response.text


def test_deadlines_are_counted() -> None:
    app = App(Late(0))
    app.post(CHAT_PATH, CHAT)
    lines = app.request("GET", "/metrics").text.splitlines()
    assert 'lmkit:requests_total{finish_reason="timeout",model_name="model"} 1.0' in lines
    assert 'lmkit:requests_total{finish_reason="error",model_name="model"} 0.0' in lines


class Time:
    now = 1000.0

    def monotonic(self) -> float:
        return self.now


@pytest.mark.parametrize(
    ("ends", "waiting", "expected"),
    [
        ([], 500, 1),  # nobody knows
        ([-10.0], 0, 1),
        ([-10.0, -8.0, -6.0, -4.0, -2.0], 4, 8),  # one in 2 s
        ([-10.0, -9.0], 1000, 60),
        ([-10.0] * 100, 20, 2),
        ([-3600.0, -3000.0], 100, 1),  # too long ago to tell
    ],
)
def test_retry_after_follows_the_queue(
    monkeypatch: pytest.MonkeyPatch, ends: list[float], waiting: int, expected: int
) -> None:
    clock = Time()
    monkeypatch.setattr(metrics_module, "time", clock)
    engine = ScriptedEngine()
    engine.figures = EngineStats(num_waiting=waiting)
    metrics = Metrics(engine, "model")
    for end in ends:
        clock.now = 1000.0 + end
        with metrics.track() as tracker:
            tracker.reason = "stop"
    with pytest.raises(RequestError), metrics.track():
        raise RequestError("engine_error", "failed")  # says nothing about the pace
    clock.now = 1000.0
    assert metrics.retry_seconds() == expected


def test_a_full_queue_says_when_to_come_back() -> None:
    engine = StubEngine(RequestError("queue_full", "full"), at_once=True)
    engine._stats = EngineStats(num_waiting=50)
    app = App(engine)
    assert app.post(CHAT_PATH, CHAT).headers["retry-after"] == "1"
    app.serving.metrics._finished.append(time.monotonic() - 0.5)
    assert 25 <= int(app.post(CHAT_PATH, CHAT).headers["retry-after"]) <= 60
