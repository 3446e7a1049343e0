"""Fields, paths and routes that clients of vLLM, llama.cpp and SageMaker send."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncGenerator
from typing import Any

import msgspec
import pytest

from lmkit.config import ServerConfig
from lmkit.turbo.request import Request, SamplingParams, StepOutput
from lmkit.turbo.transport.output import OutputProcessor
from lmkit.turbo.transport.steps import Rest
from tests.serve.in_process import CHAT, CHAT_PATH, TEXT, TEXT_PATH, TOKENIZER, App, ScriptedEngine, send

LONG = "one two three four five six seven eight nine ten"
IDS = TOKENIZER.encode(LONG)


def events(text: str) -> list[dict[str, Any]]:
    return [json.loads(line[6:]) for line in text.split("\n\n") if line.startswith("data: {")]


def prompt_of(path: str, **body: Any) -> list[int]:
    """The prompt that the engine got."""
    engine = ScriptedEngine()
    answer = App(engine).post(path, body)
    assert answer.status_code == 200, answer.text
    assert answer.json()["usage"]["prompt_tokens"] == len(engine.requests[0].prompt_ids)
    return engine.requests[0].prompt_ids


@pytest.mark.parametrize(
    ("short", "body"),
    [
        ("/chat/completions", CHAT),
        ("/completions", TEXT),
        ("/responses", {"model": "model", "input": "Hi", "store": False}),
    ],
)
def test_a_path_without_v1_is_the_same_route(short: str, body: dict[str, Any]) -> None:
    one, other = (App(ScriptedEngine()).post(path, body).json() for path in (short, "/v1" + short))
    assert one["usage"] == other["usage"]
    assert one.keys() == other.keys()


def test_a_path_without_v1_needs_the_same_key() -> None:
    app = App(ScriptedEngine(), ServerConfig(api_keys=("k" * 20,), served_model_name=("model",)))
    assert [app.post("/completions", TEXT, key).status_code for key in (None, "k" * 20)] == [401, 200]
    assert app.request("GET", "/models").status_code == 401
    listed = app.request("GET", "/models/model", headers={"authorization": "Bearer " + "k" * 20})
    assert listed.json()["id"] == "model"
    assert app.post("/completionsx", TEXT, "k" * 20).status_code == 404


def test_a_body_without_a_model_is_for_the_only_one() -> None:
    app = App(ScriptedEngine(), ServerConfig(served_model_name=("model", "other")))
    for path, body in ((CHAT_PATH, CHAT), (TEXT_PATH, TEXT), ("/v1/responses", {"input": "Hi", "store": False})):
        answer = app.post(path, {name: value for name, value in body.items() if name != "model"})
        assert (answer.status_code, answer.json()["model"]) == (200, "model")


def test_a_prompt_is_cut() -> None:
    assert prompt_of(TEXT_PATH, model="model", prompt=LONG, truncate_prompt_tokens=4) == IDS[-4:]
    assert prompt_of(TEXT_PATH, model="model", prompt=IDS, truncate_prompt_tokens=4) == IDS[-4:]
    assert prompt_of(TEXT_PATH, model="model", prompt=LONG, truncate_prompt_tokens=100) == IDS
    right = {"truncate_prompt_tokens": 4, "truncation_side": "right"}
    assert prompt_of(TEXT_PATH, model="model", prompt=LONG, **right) == IDS[:4]
    assert send(ScriptedEngine(), json=CHAT | right).status_code == 400  # nothing would say that an answer begins
    whole = prompt_of(CHAT_PATH, **CHAT)
    assert prompt_of(CHAT_PATH, **CHAT, truncate_prompt_tokens=3, truncation_side="left") == whole[-3:]


def test_minus_one_leaves_room_for_the_answer() -> None:
    for path, body in ((CHAT_PATH, CHAT | {"messages": [{"role": "user", "content": LONG * 9}]}), (TEXT_PATH, TEXT)):
        engine = ScriptedEngine(max_model_len=64)
        body = body | {"max_tokens": 10, "truncate_prompt_tokens": -1}
        body |= {"prompt": LONG * 9} if "prompt" in body else {}
        assert send(engine, path=path, json=body).status_code == 200
        assert len(engine.requests[0].prompt_ids) == 54


def test_echo_shows_the_prompt_that_was_computed() -> None:
    body = TEXT | {"prompt": LONG, "truncate_prompt_tokens": 4, "echo": True}
    assert (
        send(ScriptedEngine(), path=TEXT_PATH, json=body)
        .json()["choices"][0]["text"]
        .startswith(TOKENIZER.decode(IDS[-4:]))
    )


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"truncate_prompt_tokens": 0}, "truncate_prompt_tokens"),
        ({"truncate_prompt_tokens": 4097}, "truncate_prompt_tokens"),
        ({"truncate_prompt_tokens": 4, "session_id": "s"}, "truncate_prompt_tokens"),
        ({"truncate_prompt_tokens": 4, "truncation_side": "middle"}, "truncation_side"),
        ({"truncation_side": "left"}, "truncation_side"),
        ({"timings_per_token": True, "n": 2}, "timings_per_token"),
        ({"return_progress": True}, "return_progress"),
        ({"return_progress": True, "stream": True, "n": 2}, "return_progress"),
        ({"seed": 1 << 63}, "seed"),
    ],
)
def test_what_goes_with_nothing_is_refused(fields: dict[str, Any], param: str) -> None:
    for path, body in ((CHAT_PATH, CHAT), (TEXT_PATH, TEXT)):
        answer = send(ScriptedEngine(), path=path, json=body | fields)
        assert (answer.status_code, answer.json()["error"]["param"]) == (400, param)


def test_an_error_of_the_context_has_its_numbers() -> None:
    for path, body in ((TEXT_PATH, TEXT | {"prompt": [5] * 70}), ("/v1/embeddings", {"input": [5] * 70})):
        error = send(ScriptedEngine(max_model_len=64), path=path, json=body).json()["error"]
        assert (error["code"], error["n_prompt_tokens"], error["n_ctx"]) == ("context_length_exceeded", 70, 64)


def test_the_times_of_an_answer() -> None:
    """Its front end reads the clock at the start and at each output."""
    clock = iter([100.0, 103.0, 104.0, 106.0]).__next__
    request = Request(request_id="a", prompt_ids=[5] * 8, params=SamplingParams(max_tokens=5))
    process = OutputProcessor(TOKENIZER, request, clock).process
    first = process(StepOutput(request_id="a", token_ids=[70], queue_seconds=1.0))
    assert (first.prompt_seconds, first.decode_seconds) == (2.0, 0.0)
    process(StepOutput(request_id="a", token_ids=[71, 72]))
    last = process(StepOutput(request_id="a", token_ids=[73], finish_reason="length"))
    assert (last.prompt_seconds, last.decode_seconds) == (2.0, 3.0)


def test_timings_are_shown_on_request() -> None:
    for path, body in ((CHAT_PATH, CHAT), (TEXT_PATH, TEXT)):
        app = App(ScriptedEngine(lambda request: [70, 71, 72]))
        assert "timings" not in app.post(path, body).json()
        whole = app.post(path, body | {"timings_per_token": True}).json()
        shown = whole["timings"]
        usage = whole["usage"]
        cached = usage["prompt_tokens_details"]["cached_tokens"]
        assert (shown["prompt_n"], shown["cache_n"]) == (usage["prompt_tokens"] - cached, cached)
        assert shown["predicted_n"] == 3
        rate = shown["predicted_ms"] / 1000 * shown["predicted_per_second"]
        assert rate == pytest.approx(2)  # the first token belongs to the prompt
        chunks = events(app.post(path, body | {"stream": True, "timings_per_token": True}).text)
        counts = [chunk["timings"]["predicted_n"] for chunk in chunks if "timings" in chunk]
        assert counts == sorted(counts)
        assert counts[0] == 1
        assert counts[-1] == 3
        assert all("timings" in chunk for chunk in chunks[path == CHAT_PATH :])  # the first of a chat is its role
    about = App(ScriptedEngine()).post("/generate", {"text": "Hi", "timings_per_token": True}).json()["meta_info"]
    assert about["timings"]["predicted_n"] == 2


class ChunkingEngine(ScriptedEngine):
    """Computes prompts eight tokens at a time, after four that the cache had."""

    async def generate(self, request: Request, rest: Rest = None) -> AsyncGenerator[StepOutput]:
        for num in range(12, len(request.prompt_ids), 8):
            assert request.progress
            yield StepOutput(request_id=request.request_id, token_ids=[], num_computed=num, cached_tokens=4)
            await asyncio.sleep(0)
        async for step in super().generate(request):
            yield msgspec.structs.replace(step, cached_tokens=4)


def check_way(processed: list[int], total: int) -> None:
    """The cached tokens, then ends of chunks, and the whole prompt. Chunks that come at once are told once."""
    assert processed == sorted(set(processed))
    assert processed[0] == 4
    assert processed[-1] == total
    assert len(processed) > 2
    assert set(processed[1:-1]) <= set(range(12, total, 8))


def test_the_progress_of_a_prompt_is_streamed() -> None:
    chat = CHAT | {"messages": [{"role": "user", "content": LONG * 3}]}
    for path, body in ((CHAT_PATH, chat), (TEXT_PATH, TEXT | {"prompt": LONG * 4, "echo": True})):
        plain = events(App(ScriptedEngine()).post(path, body | {"stream": True, "seed": 1}).text)
        body |= {"stream": True, "seed": 1, "return_progress": True, "stream_options": {"include_usage": True}}
        found = events(App(ChunkingEngine()).post(path, body).text)
        reports = [event["prompt_progress"] for event in found if "prompt_progress" in event]
        total = found[-1]["usage"]["prompt_tokens"]
        check_way([report["processed"] for report in reports], total)
        assert {(report["total"], report["cache"]) for report in reports} == {(total, 4)}
        assert found[-1]["usage"]["prompt_tokens_details"]["cached_tokens"] == 4
        shown = [event["choices"] for event in found if event["choices"] and "prompt_progress" not in event]
        assert shown == [event["choices"] for event in plain]
        once = events(App(ScriptedEngine()).post(path, body).text)
        assert [event["prompt_progress"]["processed"] for event in once if "prompt_progress" in event] == [0, total]
    assert App(ScriptedEngine()).post("/generate", {"text": "Hi", "return_progress": True}).status_code == 400


def test_the_progress_of_a_response_is_streamed() -> None:
    body = {"input": LONG * 3, "stream": True, "return_progress": True, "timings_per_token": True, "store": False}
    text = App(ChunkingEngine()).post("/v1/responses", body).text
    found = [json.loads(line[6:]) for line in text.splitlines() if line.startswith("data: {")]
    reports = [event["prompt_progress"] for event in found if "prompt_progress" in event]
    total = found[-1]["response"]["usage"]["input_tokens"]
    check_way([report["processed"] for report in reports], total)
    assert {event["type"] for event in found if "prompt_progress" in event} == {"response.in_progress"}
    assert [event["sequence_number"] for event in found] == list(range(len(found)))
    timed = [event for event in found if "timings" in event]
    assert {event["type"] for event in timed} == {"response.output_text.delta", found[-1]["type"]}
    assert timed[-1]["timings"]["predicted_n"] == 2


@pytest.mark.parametrize(
    ("body", "path"),
    [
        (CHAT, CHAT_PATH),
        (TEXT, TEXT_PATH),
        (CHAT | {"stream": True}, CHAT_PATH),
    ],
)
def test_invocations_answers_as_the_route_of_the_body(body: dict[str, Any], path: str) -> None:
    app = App(ScriptedEngine())
    one, other = (app.post(each, body | {"seed": 1}) for each in ("/invocations", path))
    assert one.status_code == other.status_code == 200
    if body.get("stream"):
        choices = [[event["choices"] for event in events(each.text)] for each in (one, other)]
        assert choices[0] == choices[1]
    else:
        assert one.json()["choices"] == other.json()["choices"]
    refused = app.post("/invocations", body | {"temprature": 1})
    assert refused.json()["error"] == app.post(path, body | {"temprature": 1}).json()["error"]


def test_invocations_of_no_route() -> None:
    app = App(ScriptedEngine(), ServerConfig(api_keys=("k" * 20,)))
    for body in ({"model": "model"}, [1]):
        answer = app.post("/invocations", body, "k" * 20)
        assert answer.status_code == 400
        assert "messages, prompt, input, query and documents, text_1" in answer.json()["error"]["message"]
    assert app.request("GET", "/ping").status_code == 200  # SageMaker sends no key
    assert app.post("/invocations", TEXT).status_code == 401


def test_an_answer_goes_on_with_the_last_message() -> None:
    said = "An apple a day, keeps "
    messages = [*CHAT["messages"], {"role": "assistant", "content": said}]
    ids = prompt_of(CHAT_PATH, model="model", messages=messages, continue_final_message=True)
    text = TOKENIZER.decode(ids, False)
    assert text.endswith(said.rstrip()) or text.endswith(said)
    whole = TOKENIZER.decode(prompt_of(CHAT_PATH, model="model", messages=messages, add_generation_prompt=False), False)
    assert whole.startswith(text)
    assert len(whole) > len(text)  # the mark that ends a message is left out
    app = App(ScriptedEngine())
    tokens = app.post("/tokenize", {"messages": messages, "continue_final_message": True}).json()["tokens"]
    assert tokens == ids
    for wrong in (
        {"messages": messages, "add_generation_prompt": True},
        {"messages": [*CHAT["messages"], {"role": "assistant", "content": " "}]},
    ):
        for path in (CHAT_PATH, "/tokenize"):
            error = app.post(path, {"model": "model", "continue_final_message": True} | wrong).json()["error"]
            assert error["param"] == "continue_final_message"


def test_an_answer_shows_the_message_that_it_goes_on_with() -> None:
    said = "An apple a day, keeps"
    body = CHAT | {"messages": [*CHAT["messages"], {"role": "assistant", "content": said}], "n": 2, "seed": 1}
    body |= {"continue_final_message": True, "logprobs": True}
    plain, shown = (send(ScriptedEngine(), json=body | {"echo": echo}).json() for echo in (False, True))
    for one, other in zip(plain["choices"], shown["choices"], strict=True):
        assert other["message"]["content"] == said + one["message"]["content"]
        assert other["logprobs"] == one["logprobs"]
    texts = ["", ""]
    for event in events(send(ScriptedEngine(), json=body | {"echo": True, "stream": True}).text):
        for choice in event["choices"]:
            texts[choice["index"]] += choice["delta"].get("content") or ""
    assert texts == [choice["message"]["content"] for choice in shown["choices"]]
    for wrong in ({"continue_final_message": False}, {"messages": CHAT["messages"]}):
        answer = send(ScriptedEngine(), json=body | {"echo": True} | wrong)
        assert (answer.status_code, answer.json()["error"]["param"]) == (400, "echo")


def test_tokens_are_shown_as_ids() -> None:
    asked = {"return_tokens_as_token_ids": True}
    chat = send(ScriptedEngine(), json=CHAT | asked | {"logprobs": True}).json()["choices"][0]
    assert [entry["token"] for entry in chat["logprobs"]["content"]] == ["token_id:70", "token_id:71"]
    for stream in (False, True):
        body = TEXT | asked | {"logprobs": 0, "stream": stream}
        answer = send(ScriptedEngine(), path=TEXT_PATH, json=body)
        found = events(answer.text) if stream else [answer.json()]
        shown = [choice["logprobs"] for event in found for choice in event["choices"]]
        assert [token for entry in shown for token in entry["tokens"]] == ["token_id:70", "token_id:71"]
        assert shown[0]["top_logprobs"][0].keys() == {"token_id:70"}
    assert send(ScriptedEngine(), path="/generate", json={"text": "Hi"} | asked).status_code == 400


def test_the_tokens_of_a_chat_are_counted() -> None:
    path = f"{CHAT_PATH}/input_tokens"
    used = send(ScriptedEngine(), json=CHAT).json()["usage"]["prompt_tokens"]
    assert send(ScriptedEngine(), path=path, json=CHAT).json() == {"input_tokens": used}
    wrong = send(ScriptedEngine(), path=path, json=CHAT | {"top_k": -7})
    assert (wrong.status_code, wrong.json()["error"]["param"]) == (400, "top_k")


def test_log_probabilities_of_certain_tokens() -> None:
    """How many are shown does not depend on the number of most likely tokens. The samplers' tests have the values."""
    engine = ScriptedEngine()
    asked = {"logprob_token_ids": [5, 7]}
    for path, body, logprobs in ((CHAT_PATH, CHAT, True), (TEXT_PATH, TEXT, 0), (TEXT_PATH, TEXT, 3)):
        assert send(engine, path=path, json=body | asked | {"logprobs": logprobs}).status_code == 200
        assert engine.requests[-1].params.logprob_token_ids == (5, 7)
        shown = {"logprobs": logprobs}
        for wrong in ({}, shown | {"prompt_logprobs": 1}, shown | {"logprob_token_ids": [4096]}):
            answer = send(engine, path=path, json=body | asked | wrong)
            assert (answer.status_code, answer.json()["error"]["param"]) == (400, "logprob_token_ids"), wrong


def test_prompts_may_be_texts_and_token_ids() -> None:
    engine = ScriptedEngine()
    assert App(engine).post(TEXT_PATH, {"prompt": [LONG, IDS]}).status_code == 200
    assert [request.prompt_ids for request in engine.requests] == [IDS, IDS]


def test_special_tokens_before_a_written_chat() -> None:
    """This tokenizer adds none, so both are the same. A prompt takes the field as before."""
    app = App(ScriptedEngine())
    messages = {"messages": CHAT["messages"]}
    plain = app.post("/tokenize", messages).json()
    assert plain["token_strs"] is None
    for special in (False, True):
        assert app.post("/tokenize", messages | {"add_special_tokens": special}).json() == plain
