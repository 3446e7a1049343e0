"""best_of: so many are generated, the n with the likeliest tokens come back, all are paid for."""

from __future__ import annotations

from typing import Any

import pytest

from lmkit.turbo.request import Request
from tests.serve.in_process import TEXT, TEXT_PATH, TOKENIZER, App, ScriptedEngine

LOGPROBS = {0: -3.0, 1: -1.0, 2: -2.0, 3: -1.5}  # by the request's seed


def answer(request: Request) -> list[int]:
    """The fewer tokens, the likelier the whole of them: only the mean is to count."""
    seed = request.params.seed or 0
    return [100 + seed] * (9 if seed == 1 else 1)


@pytest.fixture
def engine() -> ScriptedEngine:
    return ScriptedEngine(answer, lambda request: LOGPROBS[request.params.seed or 0])


def complete(engine: ScriptedEngine, **fields: Any) -> dict[str, Any]:
    response = App(engine).post(TEXT_PATH, TEXT | {"seed": 0} | fields)
    assert response.status_code == 200, response.text
    body: dict[str, Any] = response.json()
    return body


def texts(engine: ScriptedEngine, seeds: list[int]) -> list[str]:
    return [TOKENIZER.decode(answer(engine.requests[seed])) for seed in seeds]


def test_the_likeliest_are_returned_best_first(engine: ScriptedEngine) -> None:
    body = complete(engine, n=2, best_of=4)
    assert len(engine.requests) == 4
    assert [choice["text"] for choice in body["choices"]] == texts(engine, [1, 3])
    assert [choice["index"] for choice in body["choices"]] == [0, 1]
    assert all(choice["logprobs"] is None for choice in body["choices"])
    assert body["usage"]["completion_tokens"] == 12
    assert body["usage"]["prompt_tokens"] == len(engine.requests[0].prompt_ids)


def test_each_prompt_has_its_own_best(engine: ScriptedEngine) -> None:
    body = complete(engine, prompt=["a", "b"], best_of=3, echo=True)
    (best,) = texts(engine, [1])
    assert [choice["text"] for choice in body["choices"]] == ["a" + best, "b" + best]
    assert [choice["index"] for choice in body["choices"]] == [0, 1]
    assert not any(request.prompt_logprobs for request in engine.requests)


def test_each_prompt_is_sent_once_for_all_its_choices(engine: ScriptedEngine) -> None:
    complete(engine, prompt=["a", "b"], best_of=3)
    assert [siblings.first.prompt_ids for siblings in engine.submitted] == [TOKENIZER.encode(text) for text in "ab"]
    assert [request for siblings in engine.submitted for request in siblings.requests()] == engine.requests
    complete(engine, n=1)
    assert len(engine.submitted) == 2, "a single choice needs no siblings"


def test_log_probabilities_come_where_they_are_asked_for(engine: ScriptedEngine) -> None:
    (choice,) = complete(engine, best_of=2, logprobs=0)["choices"]
    assert choice["logprobs"]["token_logprobs"] == [-1.0] * 9


def test_as_many_as_n_is_plain_n(engine: ScriptedEngine) -> None:
    body = complete(engine, n=2, best_of=2)
    assert [choice["text"] for choice in body["choices"]] == texts(engine, [0, 1])
    assert engine.requests[0].params.logprobs is None
    assert App(engine).post(TEXT_PATH, TEXT | {"best_of": 1, "stream": True, "seed": 0}).status_code == 200
