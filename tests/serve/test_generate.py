"""POST /generate, and the token ids and log-probabilities of prompts in the other routes."""

from __future__ import annotations

import json
from typing import Any

import pytest

from lmkit.turbo.request import Request, StepOutput, TokenLogprobs
from lmkit.turbo.transport.steps import Rest
from tests.serve.in_process import CHAT, CHAT_PATH, TEXT, TEXT_PATH, TOKENIZER, App, ScriptedEngine

PROMPT = TOKENIZER.encode("Hi")
ANSWER = [70, 71, 72]


class Scored(ScriptedEngine):
    """Every token has the log-probability -0.5, and tokens 5, 6, 7 ... are the most likely ones."""

    def __init__(self) -> None:
        super().__init__(lambda request: ANSWER)

    async def generate(self, request: Request, rest: Rest = None) -> Any:
        ids = request.params.logprob_token_ids or range(5, 5 + (request.params.logprobs or 0))
        top = [(token, 4.875 - token) for token in ids]
        async for step in super().generate(request):
            scores = [TokenLogprobs(token, -0.5, top) for token in step.token_ids]
            best = [(5 + i, -0.125 - i) for i in range(request.params.prompt_top)]
            prompt = [TokenLogprobs(token, -0.5, best) for token in request.prompt_ids[request.logprobs_start + 1 :]]
            fields = {name: getattr(step, name) for name in StepOutput.__struct_fields__}
            fields["logprobs"] = scores if request.params.logprobs is not None else []
            fields["prompt_logprobs"] = prompt if request.prompt_logprobs and step.token_ids == ANSWER[:1] else []
            yield StepOutput(**fields)


def ask(path: str = "/generate", **fields: Any) -> Any:
    answer = App(Scored()).post(path, fields)
    assert answer.status_code == 200, answer.text
    return answer.json()


def error(**fields: Any) -> tuple[str, str]:
    answer = App(Scored()).post("/generate", fields)
    assert answer.status_code == 400, answer.text
    return answer.json()["error"]["param"], answer.json()["error"]["message"]


def events(path: str, **fields: Any) -> list[Any]:
    lines = App(Scored()).post(path, {**fields, "stream": True}).text.split("\n\n")
    assert lines[-2:] == ["data: [DONE]", ""]
    return [json.loads(line.removeprefix("data: ")) for line in lines[:-2]]


@pytest.mark.parametrize("prompt", [{"text": "Hi"}, {"input_ids": PROMPT}, {"prompt": "Hi"}])
def test_text_or_token_ids_in_and_both_out(prompt: dict[str, Any]) -> None:
    answer = ask(**prompt, sampling_params={"max_new_tokens": 3, "temperature": 0})
    assert answer["output_ids"] == ANSWER
    assert answer["text"] == TOKENIZER.decode(ANSWER)
    about = answer["meta_info"]
    assert about.pop("id").startswith("gen-")
    assert about == {
        "finish_reason": {"type": "length"}, "prompt_tokens": len(PROMPT), "completion_tokens": 3, "cached_tokens": 0,
        "steps": 3,
    }  # fmt: skip


def test_text_goes_on_behind_token_ids() -> None:
    engine = Scored()
    body = {"input_ids": PROMPT, "text": [" and", ""], "return_logprob": True, "logprob_start_len": 1, "max_tokens": 3}
    answers = App(engine).post("/generate", body).json()
    assert [request.prompt_ids for request in engine.requests] == [
        PROMPT + TOKENIZER.encode(" and", add_special_tokens=False), PROMPT
    ]  # fmt: skip
    assert [(request.prompt_logprobs, request.logprobs_start) for request in engine.requests] == [(True, 1)] * 2
    assert [len(answer["meta_info"]["input_token_logprobs"]) for answer in answers] == [
        len(request.prompt_ids) - 1 for request in engine.requests
    ]


def test_names_of_sglang_reach_the_engine() -> None:
    engine = Scored()
    inner = {"max_new_tokens": 3, "min_new_tokens": 1, "stop": "x", "top_k": 5, "n": 1, "no_stop_trim": True}
    App(engine).post("/generate", {"text": "Hi", "sampling_params": inner, "seed": 7})
    params = engine.requests[0].params
    assert (params.max_tokens, params.min_tokens, params.stop, params.top_k, params.seed) == (3, 1, ("x",), 5, 7)
    assert params.include_stop_str_in_output


def test_several_prompts_and_choices_are_a_list() -> None:
    answers = ask(input_ids=[PROMPT, [9, 10, 11]], sampling_params={"n": 2, "max_new_tokens": 3}, return_token_ids=True)
    assert [answer["index"] for answer in answers] == [0, 1, 2, 3]
    assert [answer["prompt_token_ids"] for answer in answers] == [PROMPT, PROMPT, [9, 10, 11], [9, 10, 11]]
    assert [answer["meta_info"]["prompt_tokens"] for answer in answers] == [len(PROMPT)] * 2 + [3] * 2


def test_a_stream_has_what_is_new() -> None:
    parts = events("/generate", text="Hi", max_tokens=3)
    assert [token for part in parts for token in part["output_ids"]] == ANSWER
    assert "".join(part["text"] for part in parts) == TOKENIZER.decode(ANSWER)
    *before, last = [part["meta_info"] for part in parts]
    assert (last["finish_reason"], last["completion_tokens"]) == ({"type": "length"}, 3)
    assert {about["finish_reason"] for about in before} == {None}


def test_a_stop_says_what_matched() -> None:
    text = TOKENIZER.decode(ANSWER[1:2])
    assert ask(text="Hi", stop=text)["meta_info"]["finish_reason"] == {"type": "stop", "matched": text}


@pytest.mark.parametrize(
    "fields",
    [
        {"return_logprob": True, "top_logprobs_num": 2, "logprob_start_len": 0, "return_text_in_logprobs": True},
        {"logprobs": 2, "prompt_logprobs": 2},
    ],
)
def test_logprobs_of_answer_and_prompt(fields: dict[str, Any]) -> None:
    about = ask(input_ids=[9, 10, 11], max_tokens=3, **fields)["meta_info"]
    assert [(entry[0], entry[1]) for entry in about["output_token_logprobs"]] == [(-0.5, token) for token in ANSWER]
    assert about["output_token_logprobs"][0][2] == TOKENIZER.decode([70])
    assert [entry[1] for entry in about["output_top_logprobs"][0]] == [5, 6]
    assert [(entry[0], entry[1]) for entry in about["input_token_logprobs"]] == [(None, 9), (-0.5, 10), (-0.5, 11)]
    assert [len(entry) for entry in about["input_top_logprobs"]] == [0, 2, 2]


def test_log_probabilities_of_certain_tokens() -> None:
    about = ask(text="Hi", max_tokens=3, return_logprob=True, token_ids_logprob=[7, 5])["meta_info"]
    assert [[entry[1] for entry in position] for position in about["output_token_ids_logprobs"]] == [[7, 5]] * 3
    assert "output_top_logprobs" not in about


def test_no_log_probabilities_are_asked_for() -> None:
    """SGLang's clients send the other fields all the same."""
    asked = {"top_logprobs_num": 2, "logprob_start_len": 0, "token_ids_logprob": [5]}
    about = ask(text="Hi", max_tokens=3, return_logprob=False, **asked)["meta_info"]
    assert about.keys() == ask(text="Hi", max_tokens=3)["meta_info"].keys()


def test_logprobs_in_a_stream() -> None:
    parts = events("/generate", text="Hi", max_tokens=3, return_logprob=True)
    assert [entry[1] for part in parts for entry in part["meta_info"]["output_token_logprobs"]] == ANSWER


@pytest.mark.parametrize(
    ("fields", "param", "says"),
    [
        ({}, "text", "send text or input_ids"),
        ({"text": "Hi", "input_ids": [[1]]}, "prompt_start_ids", "integer"),
        ({"text": "Hi", "endings": ["a"], "prompt_logprobs": 0}, "endings", "max_tokens"),
        ({"text": ["Hi", "Ho"], "endings": ["a"], "prompt_logprobs": 0, "max_tokens": 0}, "endings", "one prompt"),
        ({"text": "Hi", "input_ids": [1], "echo": True}, "echo", "does not go with"),
        ({"text": "Hi", "prompt_logprobs": 1, "logprob_start_len": 9}, "return_logprob", "need return_logprob"),
        ({"text": "Hi", "return_logprob": True, "logprob_start_len": 9}, "logprob_start_len", "position"),
        ({"text": "Hi", "max_tokens": 3, "sampling_params": {"max_new_tokens": 4}}, "max_new_tokens", "given twice"),
        ({"text": "Hi", "sampling_params": [{}]}, "sampling_params", "one object"),
        ({"text": "Hi", "sampling_params": {"temprature": 1}}, "temprature", "did you mean"),
        ({"text": "Hi", "image_data": "x"}, "image_data", "not supported"),
        ({"text": "Hi", "lora_path": "a"}, "lora_path", "not supported"),
        ({"inputs": "Hi", "parameters": {}}, "text", "send text"),
        ({"text": "Hi", "top_logprobs_num": 2}, "return_logprob", "need return_logprob"),
        ({"text": "Hi", "token_ids_logprob": [5]}, "return_logprob", "need return_logprob"),
        ({"text": "Hi", "return_logprob": True, "token_ids_logprob": [4096]}, "logprob_token_ids", "out of vocab"),
        ({"text": "Hi", "return_logprob": True, "token_ids_logprob": [[0]]}, "logprob_token_ids", "integer"),
        (
            {"text": "Hi", "return_logprob": True, "token_ids_logprob": [5], "top_logprobs_num": 1},
            "token_ids_logprob",
            "send token_ids_logprob, or",
        ),
        ({"text": "Hi", "video_data": "x"}, "video_data", "not supported"),
        ({"text": "Hi", "no_logs": True}, "no_logs", "not supported"),
        ({"text": "Hi", "return_logprob": True, "logprob_start_len": -2}, "return_logprob", "0, 1"),
        ({"text": "Hi", "return_logprob": True, "logprobs": 3}, "return_logprob", "either"),
        ({"text": "Hi", "return_logprob": True, "logprob_start_len": 0, "stream": True}, "prompt_logprobs", "streamed"),
        ({"text": "Hi", "stream": True, "stream_options": {"include_usage": True}}, "stream_options", "leave it out"),
        ({"input_ids": [999999]}, "prompt", "token id"),
    ],
)
def test_a_field_is_honoured_or_refused(fields: dict[str, Any], param: str, says: str) -> None:
    assert error(**fields)[0] == param
    assert says in error(**fields)[1]


def test_another_model_is_not_found() -> None:
    answer = App(Scored()).post("/generate", {"text": "Hi", "model": "other"})
    assert (answer.status_code, answer.json()["error"]["code"]) == (404, "model_not_found")


# ---- vLLM's fields of the other routes


def test_a_chat_returns_token_ids() -> None:
    answer = ask(CHAT_PATH, **CHAT, return_token_ids=True, n=2)
    assert [choice["token_ids"] for choice in answer["choices"]] == [ANSWER, ANSWER]
    engine = Scored()
    App(engine).post(CHAT_PATH, CHAT)
    assert answer["prompt_token_ids"] == engine.requests[0].prompt_ids
    plain = ask(CHAT_PATH, **CHAT)
    assert plain["prompt_token_ids"] is None
    assert plain["choices"][0]["token_ids"] is None


def test_a_chat_s_stream_has_the_token_ids_once() -> None:
    chunks = events(CHAT_PATH, **CHAT, return_token_ids=True, n=2)
    assert [i for i, chunk in enumerate(chunks) if chunk.get("prompt_token_ids")] == [0]
    for index in range(2):
        mine = [choice for chunk in chunks for choice in chunk["choices"] if choice["index"] == index]
        assert [token for choice in mine for token in choice.get("token_ids") or ()] == ANSWER
    shown = [choice for chunk in chunks for choice in chunk["choices"] if "token_ids" in choice]
    assert all(choice["token_ids"] for choice in shown)
    assert not any("token_ids" in choice for chunk in events(CHAT_PATH, **CHAT) for choice in chunk["choices"])


def test_a_completion_returns_token_ids() -> None:
    body = {**TEXT, "prompt": [PROMPT, [9, 10]]}
    choices = ask(TEXT_PATH, **body, return_token_ids=True, n=2)["choices"]
    assert [choice["token_ids"] for choice in choices] == [ANSWER] * 4
    assert [choice["prompt_token_ids"] for choice in choices] == [PROMPT, PROMPT, [9, 10], [9, 10]]
    chunks = events(TEXT_PATH, **body, return_token_ids=True)
    first = [chunk["choices"][0] for chunk in chunks if chunk["choices"][0]["prompt_token_ids"]]
    assert sorted(choice["prompt_token_ids"] for choice in first) == sorted([PROMPT, [9, 10]])


@pytest.mark.parametrize("path", [CHAT_PATH, TEXT_PATH])
def test_prompt_logprobs(path: str) -> None:
    body = CHAT if path == CHAT_PATH else TEXT
    answer = ask(path, **body, prompt_logprobs=1, return_token_ids=True)
    holder = answer if path == CHAT_PATH else answer["choices"][0]
    first, second, *_ = holder["prompt_logprobs"]
    assert first is None
    assert len(holder["prompt_logprobs"]) == len(holder["prompt_token_ids"])
    token = str(holder["prompt_token_ids"][1])
    assert second == {
        token: {"logprob": -0.5, "rank": None, "decoded_token": TOKENIZER.decode([int(token)], False)},
        "5": {"logprob": -0.125, "rank": 1, "decoded_token": TOKENIZER.token_text(5)},
    }
    assert answer["choices"][0]["logprobs"] is None
    plain = ask(path, **body)
    assert (plain if path == CHAT_PATH else plain["choices"][0])["prompt_logprobs"] is None


def test_prompt_logprobs_do_not_change_how_many_an_answer_shows() -> None:
    chat = ask(CHAT_PATH, **CHAT, prompt_logprobs=4, logprobs=True, top_logprobs=1)
    assert [len(entry["top_logprobs"]) for entry in chat["choices"][0]["logprobs"]["content"]] == [1, 1, 1]
    text = ask(TEXT_PATH, **TEXT, prompt_logprobs=1, logprobs=3)["choices"][0]
    assert [len(top) for top in text["logprobs"]["top_logprobs"]] == [4, 4, 4]  # with the chosen token
    assert len(text["logprobs"]["tokens"]) == 3  # the prompt's are not among them, because echo was not asked for
    assert [len(entry or {}) for entry in text["prompt_logprobs"]] == [0] + [2] * (len(PROMPT) - 1)


@pytest.mark.parametrize("path", [CHAT_PATH, TEXT_PATH])
def test_prompt_logprobs_are_not_streamed(path: str) -> None:
    body = {**(CHAT if path == CHAT_PATH else TEXT), "stream": True, "prompt_logprobs": 1}
    answer = App(Scored()).post(path, body)
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, "prompt_logprobs")
