"""`repetition_stop`: answers and reasoning that go round in circles."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import msgspec
import pytest

from lmkit.text import Tokenizer
from lmkit.turbo.repetition import REASONING, RepetitionStop
from lmkit.turbo.request import SamplingParams
from lmkit.turbo.runners.guides import RunningGuide
from tests.serve.in_process import App, ScriptedEngine
from tests.serve.test_edge import events
from tests.serve.test_tools import app
from tests.serve.test_tools import thinker as thinker

CHAT_PATH, MESSAGES_PATH, RESPONSES_PATH = "/v1/chat/completions", "/v1/messages", "/v1/responses"
CHAT: dict[str, Any] = {"messages": [{"role": "user", "content": "Hi"}]}
RULE = {"ngram": 2, "count": 3}
LMDEPLOY = {"repetition_ngram_size": 2, "repetition_ngram_threshold": 3}
LOOP = [70, 71] * 20
ROUTES: dict[str, dict[str, Any]] = {
    CHAT_PATH: CHAT,
    "/v1/completions": {"prompt": "Hi", "max_tokens": 30},
    RESPONSES_PATH: {"input": "Hi"},
    MESSAGES_PATH: CHAT | {"model": "model", "max_tokens": 30},
}


def looping() -> ScriptedEngine:
    return ScriptedEngine(lambda request: LOOP[: request.params.max_tokens])


@pytest.mark.parametrize(("path", "body"), ROUTES.items())
@pytest.mark.parametrize(
    "asked", [{"repetition_stop": RULE}, {"repetition_ngram_size": 2, "repetition_ngram_threshold": 3}]
)
def test_every_route_ends_a_loop(path: str, body: dict[str, Any], asked: dict[str, Any]) -> None:
    usage = App(looping()).post(path, body | asked).json()["usage"]
    assert usage.get("completion_tokens", usage.get("output_tokens")) == 6


def test_the_answer_says_why_it_ended() -> None:
    server = App(looping())
    choice = server.post(CHAT_PATH, CHAT | {"repetition_stop": RULE}).json()["choices"][0]
    assert (choice["finish_reason"], choice["stop_reason"]) == ("length", "repetition")
    *_, end = events(server.post(CHAT_PATH, CHAT | {"repetition_stop": RULE, "stream": True}).text)
    assert (end["choices"][0]["finish_reason"], end["choices"][0]["stop_reason"]) == ("length", "repetition")
    body = {
        "text": "Hi",
        "sampling_params": {"max_new_tokens": 30, "repetition_ngram_size": 2, "repetition_ngram_threshold": 3},
    }
    about = server.post("/generate", body).json()["meta_info"]["finish_reason"]
    assert (about["type"], about["matched"]) == ("length", "repetition")
    assert 'finish_reason="repetition",model_name="model"} 3.0' in server.request("GET", "/metrics").text


def test_nothing_ends_a_loop_that_nobody_asked_to_end() -> None:
    server = App(looping())
    for asked in ({}, {"repetition_stop": {"ngram": 0}}, {"repetition_ngram_size": 2, "repetition_ngram_threshold": 0}):
        usage = server.post(CHAT_PATH, CHAT | asked | {"max_tokens": 30}).json()["usage"]
        assert usage["completion_tokens"] == 30


@pytest.mark.parametrize(
    "asked",
    [{"ngram": 600}, {"ngram": 2, "count": 1}, {"size": 2}, 5],
)
def test_a_rule_that_cannot_be_used_is_refused(asked: Any) -> None:
    answer = App(looping()).post(CHAT_PATH, CHAT | {"repetition_stop": asked})
    assert answer.status_code == 400
    assert "repetition_stop" in answer.text


def test_two_rules_are_refused() -> None:
    answer = App(looping()).post(CHAT_PATH, CHAT | {"repetition_stop": RULE, "repetition_ngram_size": 3})
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, "repetition_stop")


def allowed(running: RunningGuide, vocab_size: int) -> list[int]:
    mask = running.allowed()
    return [i for i in range(vocab_size) if mask[i // 32] >> (i % 32) & 1]


@pytest.mark.parametrize("rule", [None, RepetitionStop(ngram=3, count=2)])
def test_a_loop_ends_the_reasoning(thinker: Tokenizer, rule: RepetitionStop | None) -> None:
    server, engine = app("x", tokenizer=thinker)
    body = CHAT | {"enable_thinking": True, "thinking_token_budget": 1000}
    asked = {"repetition_stop": {"ngram": rule.ngram, "count": rule.count}} if rule else {}
    assert server.post(CHAT_PATH, body | asked).status_code == 200
    params = engine.requests[-1].params
    used = rule or REASONING
    end = thinker.backend.token_to_id("</think>")
    assert params.reasoning_end == end
    grammars = thinker.grammars(thinker.vocab_size)
    words = thinker.encode(" a b c", add_special_tokens=False)
    loop = (words * 1000)[: used.ngram + len(words) * (used.count - 1)]

    def guide(known: Sequence[int], params: SamplingParams = params) -> RunningGuide:
        def make() -> Any:
            made = grammars.guide(params.grammar)
            made.advance([*known])
            return made

        return RunningGuide(thread, make, params, known)

    with ThreadPoolExecutor(1) as thread:
        running = guide(())
        for token in loop:
            assert len(allowed(running, thinker.vocab_size)) > 1
            running.advance(token)
        assert allowed(running, thinker.vocab_size) == [end]
        assert allowed(guide(loop), thinker.vocab_size) == [end]  # after a preemption
        running.advance(end)
        for token in loop:
            running.advance(token)
        assert len(allowed(running, thinker.vocab_size)) > 1  # the content may
        free = msgspec.structs.replace(params, repetition_stop=RepetitionStop(ngram=0, count=0))
        assert len(allowed(guide(loop, free), thinker.vocab_size)) > 1
