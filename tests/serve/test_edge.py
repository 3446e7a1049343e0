"""The application in this process: failures that a healthy server does not show, and how bodies become requests."""

from __future__ import annotations

import asyncio
import json
import logging
import re
from collections.abc import AsyncGenerator
from typing import Any

import pytest

from lmkit.config import EngineConfig, ServerConfig
from lmkit.errors import RequestError
from lmkit.serve import body as body_module
from lmkit.serve.protocol import ChatCompletionRequest, CompletionRequest
from lmkit.serve.to_request import chat_requests, completion_requests
from lmkit.strict import validate
from lmkit.turbo.request import Request, SamplingParams, StepOutput
from lmkit.turbo.transport.async_engine import AsyncEngine
from lmkit.turbo.transport.steps import Rest
from tests.serve.fake_engine import DEMO
from tests.serve.in_process import CHAT, CHAT_PATH, INFO, TEXT, TEXT_PATH, TOKENIZER, ScriptedEngine, StubEngine, send


@pytest.mark.parametrize("at_once", [False, True])
def test_a_defect_is_a_500_without_its_text(at_once: bool) -> None:
    engine = StubEngine(ZeroDivisionError("secret detail at 0x7f00"), at_once=at_once)
    response = send(engine, json=CHAT)
    assert response.status_code == 500
    assert response.json()["error"] == {
        "message": "internal server error", "type": "server_error", "param": None, "code": "internal_error"
    }  # fmt: skip
    streamed = send(engine, json=CHAT | {"stream": True})
    assert streamed.status_code == (500 if at_once else 200)
    assert '"internal_error"' in streamed.text
    assert "[DONE]" not in streamed.text
    assert "secret" not in response.text + streamed.text


def test_a_stream_s_framing() -> None:
    response = send(StubEngine(), json=CHAT | {"stream": True})
    assert response.headers["content-type"].startswith("text/event-stream")
    assert response.headers["cache-control"] == "no-cache"
    assert "content-length" not in response.headers
    events = response.text.split("\n\n")
    assert events.pop() == ""
    assert all(event.startswith("data: ") and "\n" not in event for event in events)
    assert events[-1] == "data: [DONE]"


def test_a_line_break_in_a_text_does_not_break_the_frame() -> None:
    newline = TOKENIZER.encode("\n")[0]

    class Newline(StubEngine):
        async def generate(self, request: Request, rest: Rest = None) -> AsyncGenerator[StepOutput]:
            yield StepOutput(request_id=request.request_id, token_ids=[newline] * 4, finish_reason="stop")

    events = send(Newline(), json=CHAT | {"stream": True}).text.split("\n\n")
    assert all("\n" not in event for event in events)
    assert '"\\n\\n\\n\\n"' in events[1]


def test_an_engine_that_ended_is_503() -> None:
    engine = AsyncEngine(DEMO, EngineConfig())
    engine.state = "dead"
    response = send(engine, json=CHAT)
    assert (response.status_code, response.json()["error"]["code"]) == (503, "engine_unavailable")
    assert response.headers["retry-after"] == "1"


def test_a_body_that_drips_is_408(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(body_module, "BODY_SECONDS", 0.05)

    async def drip() -> AsyncGenerator[bytes]:
        yield b"{"
        await asyncio.sleep(5)

    response = send(StubEngine(), content=drip(), headers={"content-type": "application/json"})
    assert (response.status_code, response.json()["error"]["code"]) == (408, "request_timeout")
    assert response.headers["connection"] == "close"


@pytest.mark.parametrize("sized", [False, True])
def test_the_body_limit_is_exact(sized: bool) -> None:
    raw = b'{"model": "model", "prompt": "Hi"}'

    async def parts() -> AsyncGenerator[bytes]:
        for i in range(0, len(raw), 8):
            yield raw[i : i + 8]

    def status(limit: int) -> int:
        options: Any = {"content": raw if sized else parts(), "headers": {"content-type": "application/json"}}
        return send(
            StubEngine(), path="/v1/completions", config=ServerConfig(max_body_bytes=limit), **options
        ).status_code

    assert status(len(raw)) == 200
    assert status(len(raw) - 1) == 413


def chat(**fields: Any) -> list[Request]:
    return chat_requests(validate(CHAT | fields, ChatCompletionRequest), TOKENIZER, INFO, "id")[0]


def completion(**fields: Any) -> list[Request]:
    return completion_requests(validate(TEXT | fields, CompletionRequest), TOKENIZER, INFO, "id")


def test_openai_s_defaults() -> None:
    (request,) = chat()
    assert request.params.seed is not None
    expected = SamplingParams(temperature=1.0, max_tokens=None, seed=request.params.seed)
    assert request.params == expected
    assert request.prompt_ids == TOKENIZER.encode_chat(CHAT["messages"])
    assert request.request_id == "id-0"
    assert completion()[0].params.max_tokens == 16
    assert chat()[0].params.seed != request.params.seed


def test_every_sampling_field_arrives() -> None:
    fields: dict[str, Any] = {
        "temperature": 0, "top_p": 0.5, "top_k": 7, "min_p": 0.1, "repetition_penalty": 1.2, "presence_penalty": 0.3,
        "frequency_penalty": -0.4, "logit_bias": {"5": -2}, "seed": 9, "stop": "x", "stop_token_ids": [3],
        "min_tokens": 2, "ignore_eos": True, "skip_special_tokens": False, "include_stop_str_in_output": True,
    }  # fmt: skip
    params = chat(**fields, max_completion_tokens=8, logprobs=True, top_logprobs=4)[0].params
    assert params == SamplingParams(
        temperature=0.0, top_p=0.5, top_k=7, min_p=0.1, repetition_penalty=1.2, presence_penalty=0.3,
        frequency_penalty=-0.4, logit_bias={5: -2.0}, seed=9, stop=("x",), stop_token_ids=(3,), min_tokens=2,
        ignore_eos=True, skip_special_tokens=False, include_stop_str_in_output=True, max_tokens=8, logprobs=4,
    )  # fmt: skip
    assert completion(**fields, max_tokens=8, logprobs=4)[0].params == params


def test_choices_are_requests_with_seeds_of_their_own() -> None:
    requests = completion(prompt=["a", "b"], n=2, seed=(1 << 63) - 1)
    assert [request.params.seed for request in requests] == [(1 << 63) - 1, 1 << 63] * 2
    assert [request.prompt_ids for request in requests] == [TOKENIZER.encode(text) for text in "aabb"]
    assert len({request.request_id for request in requests}) == 4


def test_prompt_logprobs_only_where_they_are_shown() -> None:
    assert completion(echo=True, logprobs=0)[0].prompt_logprobs
    assert not completion(echo=True)[0].prompt_logprobs
    assert not completion(logprobs=0)[0].prompt_logprobs


def test_fields_about_the_cache_and_the_schedule_arrive() -> None:
    fields: dict[str, Any] = {"priority": -3, "cache_salt": "s", "session_id": "me", "timeout": 2}
    for request in (chat(**fields)[0], completion(**fields)[0]):
        assert (request.priority, request.cache_salt, request.session_id, request.timeout) == (-3, "s", "me", 2.0)
    plain = chat()[0]
    assert plain == Request(request_id="id-0", prompt_ids=plain.prompt_ids, params=plain.params)


def test_the_context_s_edge() -> None:
    assert completion(prompt=[5] * 60, max_tokens=4)
    assert chat(max_tokens=None)
    for fields in ({"prompt": [5] * 60, "max_tokens": 5}, {"prompt": [5] * 64, "max_tokens": 1}):
        with pytest.raises(RequestError) as error:
            completion(**fields)
        assert (error.value.code, error.value.param) == ("context_length_exceeded", "prompt")
        # Clients look for these words to choose a model with a longer context.
        assert error.value.message.startswith("this model's maximum context length is 64 tokens, but 65 are requested")
    with pytest.raises(RequestError, match="65 are requested: 12 in the messages and 53 to generate"):
        chat(max_tokens=53)


def test_errors_name_the_fields_of_the_api() -> None:
    with pytest.raises(RequestError) as error:
        chat(min_tokens=9, max_tokens=8)
    assert (error.value.param, error.value.message) == ("min_tokens", "min_tokens=9: must be in [0, max_tokens]")
    assert "new_tokens" not in error.value.message


def test_special_tokens_in_a_prompt_are_what_the_tokenizer_makes_of_them() -> None:
    assert completion(prompt="a<|im_end|>")[0].prompt_ids == [*TOKENIZER.encode("a"), 2]


def access_lines(caplog: pytest.LogCaptureFixture, *requests: dict[str, Any]) -> list[str]:
    """The access lines of requests with the id r1, without their times."""
    logger = logging.getLogger("lmkit.web.access_log")
    logger.addHandler(caplog.handler)  # lmkit's loggers may not propagate
    try:
        with caplog.at_level(logging.INFO, logger.name):
            for request in requests:
                send(**{"engine": StubEngine(), "headers": {"x-request-id": "r1"}} | request)
    finally:
        logger.removeHandler(caplog.handler)
    lines = (record.getMessage() for record in caplog.records if record.name == logger.name)
    return [re.sub(r"\d+ ms ", "", line) for line in dict.fromkeys(lines)]


def test_the_access_line_tells_the_id_and_why_a_request_was_refused(caplog: pytest.LogCaptureFixture) -> None:
    lines = access_lines(
        caplog,
        {"json": CHAT},
        {"json": CHAT | {"user": "me"}},
        {"json": CHAT | {"temperature": "secret"}},
        {"json": CHAT | {"messages": [{"role": "user", "content": "secret " * 100}]}},
        {"json": CHAT | {"temperature\n": "secret"}},
        {"json": CHAT | {"model": "secret"}},
        {"path": "/v1/moderations", "json": {"input": "secret"}},
        {"path": "/nowhere?secret=1"},
    )
    refused = "POST /v1/chat/completions 400 from=127.0.0.1 id=r1 code="
    assert lines == [
        "POST /v1/chat/completions 200 from=127.0.0.1 id=r1",
        "POST /v1/chat/completions 200 from=127.0.0.1 id=r1 user='me'",
        refused + "invalid_request param='temperature'",
        refused + "context_length_exceeded param='messages'",
        refused + "unknown_parameter param='temperature\\n'",
        "POST /v1/chat/completions 404 from=127.0.0.1 id=r1 code=model_not_found param='model'",
        "POST /v1/moderations 404 from=127.0.0.1 id=r1 code=not_found",
        "POST /nowhere 404 from=127.0.0.1 id=r1 code=not_found",
    ]


def test_the_access_line_of_a_wrong_key_and_of_a_broken_stream(caplog: pytest.LogCaptureFixture) -> None:
    late = StubEngine(RequestError("deadline_exceeded", "late"))
    lines = access_lines(
        caplog,
        {"json": CHAT, "config": ServerConfig(api_keys=("k",))},
        {"json": CHAT | {"stream": True}, "engine": late},
    )
    assert lines == [
        "POST /v1/chat/completions 401 from=127.0.0.1 id=r1 code=invalid_api_key",
        "POST /v1/chat/completions 200 from=127.0.0.1 id=r1 code=deadline_exceeded",
    ]


def test_usage_in_every_chunk() -> None:
    options = {"include_usage": True, "continuous_usage_stats": True}
    for path, body in ((CHAT_PATH, CHAT), (TEXT_PATH, TEXT)):
        fields = body | {"stream": True, "n": 2}
        engine = ScriptedEngine(lambda request: [70, 71, 72])
        chunks = events(send(engine, path=path, json=fields | {"stream_options": options}).text)
        counts = [chunk["usage"]["completion_tokens"] for chunk in chunks]
        assert counts == sorted(counts)
        assert counts[-1] == 6
        assert {chunk["usage"]["prompt_tokens"] for chunk in chunks} == {chunks[-1]["usage"]["prompt_tokens"]}
        assert chunks[-1]["choices"] == []
        once = events(send(engine, path=path, json=fields | {"stream_options": {"include_usage": True}}).text)
        assert [chunk["usage"] for chunk in once[:-1]] == [None] * (len(once) - 1)
        assert once[-1]["usage"]["completion_tokens"] == 6
        assert all("usage" not in chunk for chunk in events(send(engine, path=path, json=fields).text))
        alone = send(engine, path=path, json=fields | {"stream_options": {"continuous_usage_stats": True}})
        assert all("usage" not in chunk for chunk in events(alone.text))


def events(text: str) -> list[dict[str, Any]]:
    return [json.loads(line.removeprefix("data: ")) for line in text.split("\n\n")[:-2]]


def test_zero_logprobs_still_show_the_chosen_tokens() -> None:
    answer = send(ScriptedEngine(), path=TEXT_PATH, json=TEXT | {"logprobs": 0}).json()
    logprobs = answer["choices"][0]["logprobs"]
    assert logprobs["token_logprobs"] == [-1.0, -1.0]
    assert logprobs["top_logprobs"] == [{token: -1.0} for token in logprobs["tokens"]]
    answer = send(ScriptedEngine(), json=CHAT | {"logprobs": True, "top_logprobs": 0}).json()
    content = answer["choices"][0]["logprobs"]["content"]
    assert [(entry["logprob"], entry["top_logprobs"]) for entry in content] == [(-1.0, [])] * 2


def test_encode_is_lmdeploy_s() -> None:
    def encode(**body: Any) -> Any:
        return send(StubEngine(), path="/v1/encode", json=body).json()

    ids = TOKENIZER.encode("Hello there")
    assert encode(input="Hello there", do_preprocess=False, add_bos=True) == {"input_ids": ids, "length": len(ids)}
    assert encode(input=["Hello there", ""]) == {"input_ids": [ids, []], "length": [len(ids), 0]}
    chat_ids = TOKENIZER.encode_chat([{"role": "user", "content": "Hi"}])
    assert encode(input="Hi", do_preprocess=True)["input_ids"] == chat_ids
    assert encode(input=5)["error"]["param"] == "input"
