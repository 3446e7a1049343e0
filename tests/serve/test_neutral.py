"""Values that ask for nothing are accepted, and every other value of the same field is refused by name."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from lmkit import neutral
from lmkit.errors import RequestError
from lmkit.formats.generation_config import SamplingDefaults
from lmkit.serve.protocol import ChatCompletionRequest, CompletionRequest
from lmkit.serve.to_request import chat_requests, completion_requests
from lmkit.strict import validate
from lmkit.text.template import ChatTemplate
from lmkit.turbo.request import Request
from tests.serve.in_process import CHAT, CHAT_PATH, INFO, TEXT, TEXT_PATH, TOKENIZER, App, ScriptedEngine

APP = App(ScriptedEngine(max_model_len=64))
ABSENT = {
    CHAT_PATH: {
        name: values
        for name, values in {**neutral.GENERATION, **neutral.CHAT}.items()
        if name not in ChatCompletionRequest.model_fields  # of tools and reasoning, which other routes lack
    },
    TEXT_PATH: {
        name: values
        for name, values in {**neutral.GENERATION, **neutral.COMPLETION}.items()
        if name not in CompletionRequest.model_fields  # which other routes lack
    },
}
BODIES = {CHAT_PATH: CHAT, TEXT_PATH: TEXT}
# Neutral values of fields that lmkit has.
OURS: dict[str, list[Any]] = {
    "frequency_penalty": [None, 0, 0.0],
    "ignore_eos": [None, False],
    "include_stop_str_in_output": [None, False],
    "logit_bias": [None, {}, []],
    "logprobs": [None, False],
    "max_completion_tokens": [None, -1],
    "max_tokens": [None, -1],
    "min_p": [None, 0],
    "min_tokens": [None, 0],
    "n": [None, 1],
    "n_predict": [None, -1],
    "presence_penalty": [None, 0],
    "priority": [None, 0],
    "prompt_logprobs": [None],
    "repetition_penalty": [None, 1, 1.0],
    "return_token_ids": [None, False],
    "safety_identifier": [None, ""],
    "seed": [None, -1],
    "session_id": [None, -1],
    "skip_special_tokens": [None, True],
    "stop": [None, [], ""],
    "stop_token_ids": [None, []],
    "stream": [None, False],
    "stream_options": [None],
    "temperature": [None, 1],
    "timeout": [None],
    "top_k": [None, -1, 0],
    "top_p": [None, 1, 1.0],
    "user": [None, ""],
}
CHAT_ONLY: dict[str, list[Any]] = {
    "add_generation_prompt": [None, True],
    "chat_template_kwargs": [None, {}, {"enable_thinking": True}, {"enable_thinking": False}, {"anything": None}],
    "enable_thinking": [None, True, False],
    "prompt_cache_key": [None],
    "top_logprobs": [None, 0],
}
COMPLETION_ONLY: dict[str, list[Any]] = {"best_of": [None, 1], "echo": [None, False], "suffix": [None, ""]}
PROBES: list[tuple[str, str, Any]] = [
    (path, name, value)
    for path, fields in (
        *((path, ABSENT[path]) for path in BODIES),
        *((path, OURS) for path in BODIES),
        (CHAT_PATH, CHAT_ONLY),
        (TEXT_PATH, COMPLETION_ONLY),
    )
    for name, values in fields.items()
    for value in values
]


@pytest.mark.parametrize("path", [CHAT_PATH, TEXT_PATH])
def test_values_that_ask_for_nothing_are_accepted(path: str) -> None:
    mine = [(name, value) for where, name, value in PROBES if where == path]
    assert len(mine) > 300
    refused = [
        (name, value, answer.json()["error"])
        for name, value in mine
        if (answer := APP.post(path, BODIES[path] | {name: value})).status_code != 200
    ]
    assert not refused


@pytest.mark.parametrize("path", [CHAT_PATH, TEXT_PATH])
def test_any_other_value_of_a_field_that_lmkit_lacks_is_refused_by_name(path: str) -> None:
    for name in ABSENT[path].keys() - neutral.HINTS:
        answer = APP.post(path, BODIES[path] | {name: "something", "model": "model"})
        error = answer.json()["error"]
        assert (answer.status_code, error["code"], error["param"]) == (400, "unsupported_parameter", name)
        assert error["message"].startswith(f"{name} is not supported by this server")


def test_tokenize_takes_them_too() -> None:
    body = {"messages": CHAT["messages"], "tools": None, "continue_final_message": False, "mm_processor_kwargs": None}
    assert APP.post("/tokenize", body).status_code == 200
    error = APP.post("/tokenize", body | {"mm_processor_kwargs": {"a": 1}}).json()["error"]
    assert (error["code"], error["param"]) == ("unsupported_parameter", "mm_processor_kwargs")


def test_no_field_is_both_ours_and_absent() -> None:
    models = {CHAT_PATH: ChatCompletionRequest, TEXT_PATH: CompletionRequest}
    for path, absent in ABSENT.items():
        assert not absent.keys() & models[path].model_fields.keys()
    assert neutral.UNSET.keys() <= ChatCompletionRequest.model_fields.keys()


@pytest.mark.parametrize("message", [{name: value} for name, values in neutral.MESSAGE.items() for value in values])
def test_an_answer_s_message_comes_back_with_all_its_fields(message: dict[str, Any]) -> None:
    messages = [*CHAT["messages"], {"role": "assistant", "content": "x"} | message, *CHAT["messages"]]
    assert APP.post(CHAT_PATH, CHAT | {"messages": messages}).status_code == 200


def test_a_number_is_no_boolean() -> None:
    assert neutral.is_neutral(1.0, (1,))
    assert not neutral.is_neutral(0, (None, False))
    assert not neutral.is_neutral(True, (None, 1))


@pytest.mark.parametrize(
    ("path", "field", "value", "advice"),
    [
        (CHAT_PATH, "max_new_tokens", 5, ": use max_tokens"),
        (CHAT_PATH, "random_seed", 5, ": use seed"),
        (CHAT_PATH, "stop_words", ["a"], ": use stop"),
        (CHAT_PATH, "prompt", "Hi", ": send it to /v1/completions"),
        (TEXT_PATH, "messages", [], ": send it to /v1/chat/completions"),
        (CHAT_PATH, "do_sample", False, ": temperature=0 is greedy, any other temperature samples"),
        (CHAT_PATH, "temprature", 1, "; did you mean temperature?"),
        (CHAT_PATH, "max_token", 1, "; did you mean max_tokens?"),
        (TEXT_PATH, "top_logprobs", 2, ""),
    ],
)
def test_a_refusal_tells_our_name(path: str, field: str, value: Any, advice: str) -> None:
    error = APP.post(path, BODIES[path] | {field: value}).json()["error"]
    assert error["param"] == field
    subject, _, rest = error["message"].partition(field)
    assert rest.lstrip("'").removeprefix(" is not supported by this server") == advice, subject


def chat(**fields: Any) -> list[Request]:
    return chat_requests(validate(CHAT | fields, ChatCompletionRequest), TOKENIZER, INFO, "id")[0]


def completion(**fields: Any) -> list[Request]:
    return completion_requests(validate(TEXT | fields, CompletionRequest), TOKENIZER, INFO, "id")


def test_no_top_k_is_a_choice_that_a_checkpoint_s_default_does_not_replace() -> None:
    info = msgspec.structs.replace(INFO, sampling=SamplingDefaults(top_k=20, top_p=0.8))
    for top_k, expected in ((None, 20), (-1, 0), (0, 0), (5, 5)):
        body = validate(CHAT | {"top_k": top_k}, ChatCompletionRequest)
        (request,), _ = chat_requests(body, TOKENIZER, info, "id")
        assert (request.params.top_k, request.params.top_p) == (expected, 0.8)


def test_what_minus_one_means() -> None:
    for params in (chat(top_k=-1, seed=-1)[0].params, completion(top_k=-1, seed=-1)[0].params):
        assert params.top_k == 0
        assert params.seed is not None
        assert params.seed >= 0
    assert chat(session_id=-1)[0].session_id is None
    assert chat(max_tokens=-1)[0].params.max_tokens is None
    assert completion(max_tokens=-1)[0].params.max_tokens is None  # no limit, which is not the default
    assert completion(max_completion_tokens=7)[0].params.max_tokens == 7
    assert completion(n_predict=7)[0].params.max_tokens == 7
    assert completion(max_tokens=7, max_completion_tokens=7)[0].params.max_tokens == 7


def test_the_least_of_several_limits_holds() -> None:
    for request in (chat, completion):
        assert request(max_tokens=9, max_completion_tokens=7)[0].params.max_tokens == 7
        assert request(max_tokens=7, n_predict=9, max_completion_tokens=-1)[0].params.max_tokens == 7
        assert request(max_tokens=-1, n_predict=-1)[0].params.max_tokens is None


def test_one_text_is_one_message_of_the_user() -> None:
    assert chat(messages="Hi")[0].prompt_ids == chat(messages=[{"role": "user", "content": "Hi"}])[0].prompt_ids


@pytest.mark.parametrize("switch", ["enable_thinking", "thinking"])
@pytest.mark.parametrize(
    ("asked", "thinks"),
    [
        ({"thinking": {"type": "enabled", "budget_tokens": 99}}, True),
        ({"thinking": {"type": "adaptive"}}, True),
        ({"thinking": {"type": "disabled"}, "enable_thinking": False}, False),
        ({"reasoning": {"effort": "high", "exclude": True, "max_tokens": None}}, True),
        ({"reasoning": {"effort": "none"}}, False),
        ({"reasoning": {"enabled": False}}, False),
        ({"enable_thinking": True}, True),
        ({"chat_template_kwargs": {"thinking": True}}, True),
    ],
)
def test_every_way_to_ask_for_thoughts_sets_the_templates_switch(
    monkeypatch: pytest.MonkeyPatch, switch: str, asked: dict[str, Any], thinks: bool
) -> None:
    source = "{% if " + switch + " is not defined %}-{% elif " + switch + " %}yes{% else %}no{% endif %}"
    monkeypatch.setattr(TOKENIZER, "chat_template", ChatTemplate(source))
    assert chat(**asked)[0].prompt_ids == TOKENIZER.encode("yes" if thinks else "no", False)
    assert chat()[0].prompt_ids == TOKENIZER.encode("-", False)


def test_other_ways_to_ask_for_thoughts_are_read_as_our_own() -> None:
    body = validate(CHAT | {"reasoning": {"max_tokens": 5, "exclude": True}}, ChatCompletionRequest)
    assert (body.thinking_token_budget, body.include_reasoning) == (5, False)
    with pytest.raises(RequestError, match=r"reasoning.effort differs from reasoning_effort"):
        chat(reasoning={"effort": "low"}, reasoning_effort="high")
    with pytest.raises(RequestError, match="unknown field 'mood'"):
        chat(thinking={"type": "enabled", "mood": 1})
    with pytest.raises(RequestError, match="enable_thinking"):
        chat(thinking={"type": "perhaps"})


def test_a_switch_for_thoughts_reaches_a_template_that_has_it(monkeypatch: pytest.MonkeyPatch) -> None:
    assert chat(enable_thinking=True)[0].prompt_ids == chat()[0].prompt_ids  # the demo's template has none
    source = "{% if enable_thinking %}yes{% else %}no{% endif %}"
    monkeypatch.setattr(TOKENIZER, "chat_template", ChatTemplate(source))
    yes, no = TOKENIZER.encode("yes", False), TOKENIZER.encode("no", False)
    assert chat(enable_thinking=True)[0].prompt_ids == yes
    assert chat(enable_thinking=False)[0].prompt_ids == no
    assert chat(chat_template_kwargs={"enable_thinking": True})[0].prompt_ids == yes
    assert chat(chat_template_kwargs={"enable_thinking": True}, enable_thinking=True)[0].prompt_ids == yes
    tokenized = APP.post("/tokenize", {"messages": CHAT["messages"], "chat_template_kwargs": {"enable_thinking": True}})
    assert tokenized.json()["tokens"] == yes
    with pytest.raises(RequestError, match="enable_thinking differs"):
        chat(chat_template_kwargs={"enable_thinking": True}, enable_thinking=False)
    with pytest.raises(RequestError, match="'mood' is not a variable"):
        chat(chat_template_kwargs={"mood": "x"})
