"""Tools and reasoning in chat completions: what reaches the engine, and what the client gets, whole and streamed."""

from __future__ import annotations

import json
from typing import Any, get_args

import msgspec
import pytest

from lmkit.config import ServerConfig, ToolParser
from lmkit.serve.protocol import ChatCompletionRequest
from lmkit.text import ChatTemplate, Tokenizer
from lmkit.text.chat.style import Style
from lmkit.text.dialects import DIALECTS
from lmkit.turbo.request import Request, SamplingParams, StepOutput
from lmkit.turbo.transport.output import OutputProcessor
from tests.serve import in_process
from tests.serve.in_process import CHAT_PATH, TOKENIZER, App, ScriptedEngine
from tests.text.dialects.answers import CALLS, with_marks, written

PARAMETERS = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}
TOOLS = [
    {"type": "function", "function": {"name": "f", "description": "Does f.", "parameters": PARAMETERS}},
    {"type": "function", "function": {"name": "g"}},
]
CHAT: dict[str, Any] = {"model": "model", "messages": [{"role": "user", "content": "Hi"}], "tools": TOOLS}
HERMES = DIALECTS["hermes"]
NAMED = {"type": "function", "function": {"name": "g"}}


def app(text: str, config: ServerConfig | None = None, tokenizer: Tokenizer = TOKENIZER) -> tuple[App, ScriptedEngine]:
    """A server whose model answers with `text`."""
    ids = tokenizer.encode(text, add_special_tokens=False)
    engine = ScriptedEngine(lambda request: [*ids, tokenizer.eos_token_ids[0]], finish_reason="stop")
    assert engine.info is not None
    engine.info = msgspec.structs.replace(engine.info, vocab_size=tokenizer.vocab_size)
    return App(engine, config), engine


def streamed(answer: Any) -> list[dict[str, Any]]:
    lines = [line.removeprefix("data: ") for line in answer.text.splitlines() if line.startswith("data: {")]
    return [chunk["choices"][0] for line in lines if (chunk := json.loads(line))["choices"]]


def joined(choices: list[dict[str, Any]]) -> tuple[dict[str, Any], Any]:
    """(the message, finish_reason) of a stream of one choice."""
    message: dict[str, Any] = {"content": "", "reasoning": "", "tool_calls": []}
    for choice in choices:
        delta = choice["delta"]
        for name in ("content", "reasoning"):
            message[name] += delta.get(name) or ""
        for part in delta.get("tool_calls", ()):
            if part["index"] == len(message["tool_calls"]):
                message["tool_calls"].append({"name": part["function"]["name"], "arguments": ""})
            message["tool_calls"][part["index"]]["arguments"] += part["function"]["arguments"]
    return message, choices[-1]["finish_reason"]


def plain(message: dict[str, Any]) -> dict[str, Any]:
    calls = [call["function"] for call in message.get("tool_calls", ())]
    return {"content": message["content"] or "", "reasoning": message["reasoning"] or "", "tool_calls": calls}


def test_calls_whole_and_streamed() -> None:
    server, _ = app("I look.\n" + written(HERMES, CALLS))
    whole = server.post(CHAT_PATH, CHAT).json()["choices"][0]
    assert (whole["finish_reason"], whole["message"]["content"]) == ("tool_calls", "I look.")
    calls = whole["message"]["tool_calls"]
    assert [(call["function"]["name"], json.loads(call["function"]["arguments"])) for call in calls] == CALLS
    assert len({call["id"] for call in calls}) == 2
    assert all(call["type"] == "function" and call["id"].startswith("call_") for call in calls)
    stream = streamed(server.post(CHAT_PATH, CHAT | {"stream": True}))
    assert joined(stream) == (plain(whole["message"]), "tool_calls")
    assert len(stream) > 10


@pytest.mark.parametrize("fence", [("", ""), ("```json\n", "\n```")])
def test_a_call_without_marks_is_a_call_whole_and_streamed(fence: tuple[str, str]) -> None:
    """As Qwen2.5-Coder writes it, bare or in a fence. An object that names no tool is text."""
    call = fence[0] + '{"name": "f", "arguments": {"a": 1}}' + fence[1]
    server, _ = app("I look.\n" + call)
    whole = server.post(CHAT_PATH, CHAT).json()["choices"][0]
    assert (whole["finish_reason"], whole["message"]["content"]) == ("tool_calls", "I look.")
    (made,) = whole["message"]["tool_calls"]
    assert (made["function"]["name"], json.loads(made["function"]["arguments"])) == ("f", {"a": 1})
    assert joined(streamed(server.post(CHAT_PATH, CHAT | {"stream": True}))) == (plain(whole["message"]), "tool_calls")
    text = call.replace('"f"', '"other"')
    choice = app(text)[0].post(CHAT_PATH, CHAT).json()["choices"][0]
    assert (choice["finish_reason"], choice["message"]["content"]) == ("stop", text)
    assert not choice["message"].get("tool_calls")


def test_without_tools_a_call_is_text() -> None:
    text = written(HERMES, CALLS)
    server, _ = app(text)
    for fields in ({"tools": []}, {"tool_choice": "none"}):
        choice = server.post(CHAT_PATH, CHAT | fields).json()["choices"][0]
        assert (choice["message"]["content"], choice["finish_reason"]) == (text, "stop")
        assert "tool_calls" not in choice["message"]


def test_a_template_without_tools_gets_them_as_text() -> None:
    server, engine = app("x")
    call = {"id": "1", "type": "function", "function": {"name": "f", "arguments": '{"a": 1}'}}
    messages = [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "Hi"},
        {"role": "assistant", "content": None, "tool_calls": [call], "refusal": None},
        {"role": "tool", "tool_call_id": "1", "content": "42"},
    ]
    assert server.post(CHAT_PATH, CHAT | {"messages": messages}).status_code == 200
    prompt = TOKENIZER.decode(engine.requests[-1].prompt_ids, skip_special_tokens=False)
    assert "Be brief.\n\nYou may call these functions:" in prompt
    assert '{"name": "f", "description": "Does f.", "parameters"' in prompt
    assert 'assistant\n<tool_call>\n{"name": "f", "arguments": {"a": 1}}\n</tool_call><|im_end|>' in prompt
    assert "user\n<tool_response>\n42\n</tool_response><|im_end|>" in prompt


TEMPLATE = (
    "{% if tools %}<tools>{{ tools | tojson }}</tools>{% endif %}{% for m in messages %}<|im_start|>{{ m.role }}\n"
    "{% if m.reasoning_content %}<think>{{ m.reasoning_content }}</think>{% endif %}{{ m.content or '' }}"
    "{% for c in m.tool_calls or [] %}<tool_call>{{ c.function.arguments.a }}{% endfor %}<|im_end|>\n{% endfor %}"
    "<|im_start|>assistant\n{% if enable_thinking %}<think>\n{% endif %}"
)


@pytest.fixture
def thinker(monkeypatch: pytest.MonkeyPatch) -> Tokenizer:
    """A model that thinks and calls, with special tokens for the marks."""
    tokenizer = with_marks(HERMES)
    tokenizer.chat_template = ChatTemplate(TEMPLATE)
    monkeypatch.setattr(in_process, "TOKENIZER", tokenizer)
    return tokenizer


def test_reasoning_and_calls_in_special_tokens(thinker: Tokenizer) -> None:
    server, engine = app("<think>\nSo.\n</think>\n\n" + written(HERMES, CALLS), tokenizer=thinker)
    body = CHAT | {"stream_options": {"include_usage": True}}
    answer = server.post(CHAT_PATH, CHAT).json()
    message = answer["choices"][0]["message"]
    assert (message["reasoning"], message["reasoning_content"]) == ("So.", "So.")
    assert [call["function"]["name"] for call in message["tool_calls"]] == ["f", "g"]
    thoughts = len(thinker.encode("<think>\nSo.\n</think>", add_special_tokens=False))
    assert answer["usage"]["completion_tokens_details"] == {"reasoning_tokens": thoughts}
    stream = server.post(CHAT_PATH, body | {"stream": True})
    assert joined(streamed(stream)) == (plain(message), "tool_calls")
    assert f'"reasoning_tokens":{thoughts}' in stream.text
    assert all("reasoning_content" in choice["delta"] for choice in streamed(stream))
    hidden = server.post(CHAT_PATH, CHAT | {"include_reasoning": False}).json()["choices"][0]["message"]
    assert hidden["reasoning"] is hidden["reasoning_content"] is None
    for field in ({"separate_reasoning": False}, {"reasoning_format": "none"}):
        kept = server.post(CHAT_PATH, CHAT | field).json()["choices"][0]["message"]
        assert kept["reasoning"] is None
        assert kept["content"].startswith("<think>")
        assert "</think>" in kept["content"]
    for field in ({"separate_reasoning": True}, {"reasoning_format": "deepseek"}):
        assert server.post(CHAT_PATH, CHAT | field).json()["choices"][0]["message"]["reasoning"] == "So."
    assert engine.requests[0].params.shown_special_ids


@pytest.mark.parametrize("marks_are_tokens", [True, False])
@pytest.mark.parametrize("size", [1, 2, 5, 100])
def test_reasoning_tokens_do_not_depend_on_how_outputs_are_cut(
    thinker: Tokenizer, marks_are_tokens: bool, size: int
) -> None:
    """A slow reader gets several tokens in one output."""
    tokenizer = thinker if marks_are_tokens else TOKENIZER
    thoughts = tokenizer.encode("<think>\nSo.\n</think>", add_special_tokens=False)
    ids = [*thoughts, *tokenizer.encode("\n\nYes, it is.", add_special_tokens=False)]
    body = ChatCompletionRequest.model_validate(CHAT)
    answer = Style(tokenizer, "hermes", "think").answer(body, is_thinking=False)
    params = SamplingParams(skip_special_tokens=not marks_are_tokens)
    processor = OutputProcessor(tokenizer, Request(request_id="r", prompt_ids=[1], params=params))
    for first in range(0, len(ids), size):
        answer.take(processor.process(StepOutput(request_id="r", token_ids=ids[first : first + size])))
    assert answer.reasoning_tokens == len(thoughts)


def test_other_special_tokens_stay_hidden(thinker: Tokenizer) -> None:
    server, _ = app("<|pad|><think>a</think>b<|pad|>", tokenizer=thinker)
    message = server.post(CHAT_PATH, CHAT).json()["choices"][0]["message"]
    assert (message["reasoning"], message["content"]) == ("a", "b")


def test_reasoning_that_the_prompt_begins(thinker: Tokenizer) -> None:
    server, engine = app("So.</think>Yes", tokenizer=thinker)
    message = server.post(CHAT_PATH, CHAT | {"enable_thinking": True}).json()["choices"][0]["message"]
    assert (message["reasoning"], message["content"]) == ("So.", "Yes")
    message = server.post(CHAT_PATH, CHAT | {"reasoning_effort": "high"}).json()["choices"][0]["message"]
    assert (message["reasoning"], message["content"]) == ("So.", "Yes")
    server.post(CHAT_PATH, CHAT | {"reasoning_effort": "none"})
    prompts = [thinker.decode(request.prompt_ids, False) for request in engine.requests]
    assert [prompt.endswith("<think>\n") for prompt in prompts] == [True, True, False]


def test_the_history_reaches_the_template(thinker: Tokenizer) -> None:
    server, engine = app("x", tokenizer=thinker)
    call = {"id": "1", "type": "function", "function": {"name": "f", "arguments": '{"a": 17}'}, "index": 0}
    turn = {"role": "assistant", "reasoning": "Hm.", "tool_calls": [call]}
    result = {"role": "tool", "tool_call_id": "1", "content": "42"}
    assert server.post(CHAT_PATH, CHAT | {"messages": [*CHAT["messages"], turn, result]}).status_code == 200
    prompt = thinker.decode(engine.requests[-1].prompt_ids, False)
    assert "<think>Hm.</think><tool_call>17" in prompt
    assert "tool\n42<|im_end|>" in prompt
    assert prompt.startswith('<tools>[{"type": "function", "function": {"name": "f"')


def allows(request: Request, text: str, tokenizer: Tokenizer = TOKENIZER) -> bool:
    guide = tokenizer.grammars(tokenizer.vocab_size).guide(request.params.grammar)
    for token in tokenizer.encode(text, add_special_tokens=False):
        if not guide.allowed[token // 32] >> (token % 32) & 1:
            return False
        guide.advance([token])
    return any(guide.allowed[end // 32] >> (end % 32) & 1 for end in tokenizer.eos_token_ids)


def only(mode: str, *tools: Any) -> dict[str, Any]:
    return {"type": "allowed_tools", "allowed_tools": {"mode": mode, "tools": list(tools)}}


@pytest.mark.parametrize(
    ("fields", "allowed"),
    [
        ({}, "text f g both twice"),
        ({"tool_choice": "auto"}, "text f g both twice"),
        ({"tool_choice": "required"}, "f g both twice"),
        ({"tool_choice": "required", "parallel_tool_calls": False}, "f g"),
        ({"tool_choice": "required", "response_format": {"type": "json_object"}}, "f g both twice"),
        ({"tool_choice": NAMED}, "g"),
        ({"tool_choice": NAMED, "parallel_tool_calls": True}, "g twice"),
        ({"tool_choice": only("required", NAMED)}, "g"),
        ({"tool_choice": only("required", NAMED), "parallel_tool_calls": True}, "g twice"),
        ({"tool_choice": only("auto", NAMED)}, "text g twice"),
    ],
)
def test_the_choice_is_a_grammar(fields: dict[str, Any], allowed: str) -> None:
    server, engine = app("x")
    assert server.post(CHAT_PATH, CHAT | fields).status_code == 200
    request = engine.requests[-1]
    f, g = ("f", {"a": 3}), ("g", {})
    calls = {"f": [f], "g": [g], "both": [f, g], "twice": [g, g], "wrong": [("f", {})]}
    answers = {"text": "Hello"} | {name: written(HERMES, these) for name, these in calls.items()}
    assert [name for name, answer in answers.items() if allows(request, answer)] == allowed.split()


@pytest.mark.parametrize(
    ("held", "named"), [({"not": {}}, "not"), ({"pattern": "^(a{1000}){1000}$", "type": "string"}, "too much time")]
)
def test_a_schema_that_cannot_be_held(held: dict[str, Any], named: str) -> None:
    schema = {"type": "object", "properties": {"a": held}, "required": ["a"] if "pattern" in held else []}
    tool: dict[str, Any] = {"type": "function", "function": {"name": "f", "parameters": schema}}
    server, engine = app("x")
    assert server.post(CHAT_PATH, CHAT | {"tools": [tool], "tool_choice": "required"}).status_code == 200
    assert allows(engine.requests[-1], written(HERMES, [("f", {"any": 1})]))
    tool["function"]["strict"] = True
    error = server.post(CHAT_PATH, CHAT | {"tools": [tool]}).json()["error"]
    assert error["param"] == "tools"
    assert named in error["message"]


PAST = {"id": "1", "type": "function", "function": {"name": "f", "arguments": "{}"}}


@pytest.mark.parametrize(
    ("fields", "param", "named"),
    [
        ({"tools": None, "tool_choice": "required"}, "tool_choice", "no tools"),
        ({"tool_choice": {"type": "function", "function": {"name": "h"}}}, "tool_choice", "'h' is not in tools"),
        ({"tools": [*TOOLS, TOOLS[0]]}, "tools", "same name"),
        ({"tools": [{"type": "function", "function": {"name": "a b"}}]}, "tools", "pattern"),
        ({"tools": [{"type": "custom", "custom": {"name": "f"}}]}, "tools", "function"),
        ({"tools": [TOOLS[0]] * 1025}, "tools", "1024"),
        ({"separate_reasoning": True, "reasoning_format": "none"}, "reasoning_format", "differ"),
        ({"separate_reasoning": False, "include_reasoning": False}, "include_reasoning", "differ"),
        ({"messages": [{"role": "user", "content": "x", "tool_calls": [PAST]}]}, "messages", "assistant's messages"),
    ],
)
def test_mistakes_are_named(fields: dict[str, Any], param: str, named: str) -> None:
    server, engine = app("x")
    answer = server.post(CHAT_PATH, CHAT | fields)
    error = answer.json()["error"]
    assert (answer.status_code, error["param"]) == (400, param)
    assert named in error["message"]
    assert not engine.requests


def test_a_model_without_reasoning_keeps_every_thinking_budget() -> None:
    server, engine = app("x")
    assert server.post(CHAT_PATH, CHAT | {"tools": None, "thinking_token_budget": 5}).status_code == 200
    assert engine.requests[0].params.grammar == ""


def test_a_thinking_budget_is_a_grammar(thinker: Tokenizer) -> None:
    server, engine = app("x", tokenizer=thinker)
    body = CHAT | {"tools": None, "enable_thinking": True, "thinking_token_budget": 3}
    assert server.post(CHAT_PATH, body).status_code == 200
    guide = thinker.grammars(thinker.vocab_size).guide(engine.requests[-1].params.grammar)
    end = thinker.backend.token_to_id("</think>")
    for token in thinker.encode(" a b c", add_special_tokens=False):
        guide.advance([token])
    allowed = [i for i in range(thinker.vocab_size) if guide.allowed[i // 32] >> (i % 32) & 1]
    assert allowed == [end]


def test_a_schema_holds_behind_the_reasoning(thinker: Tokenizer) -> None:
    server, engine = app("<think>a</think>{}", tokenizer=thinker)
    answer = server.post(CHAT_PATH, CHAT | {"tools": None, "response_format": {"type": "json_object"}}).json()
    assert answer["choices"][0]["message"]["content"] == "{}"
    assert allows(engine.requests[-1], "<think>a</think>{}", thinker)
    assert not allows(engine.requests[-1], "<think>a</think>a", thinker)


def test_parsers_by_name() -> None:
    assert {*get_args(ToolParser)} == {*DIALECTS, "none"}
    text = '[TOOL_CALLS]f[ARGS]{"a": 1}'
    server, _ = app(text, ServerConfig(tool_parser="mistral"))
    call = server.post(CHAT_PATH, CHAT).json()["choices"][0]["message"]["tool_calls"][0]
    assert (call["function"]["name"], len(call["id"])) == ("f", 9)
    server, _ = app("<think>a</think>b", ServerConfig(reasoning_parser="think"))
    assert server.post(CHAT_PATH, CHAT).json()["choices"][0]["message"]["reasoning"] == "a"
    server, _ = app("x", ServerConfig(tool_parser="none"))
    error = server.post(CHAT_PATH, CHAT).json()["error"]
    assert (error["param"], error["code"]) == ("tools", "unsupported_parameter")


def test_two_choices_with_logprobs() -> None:
    text = written(HERMES, CALLS)
    server, _ = app(text)
    body = CHAT | {"n": 2, "logprobs": True}
    choices = server.post(CHAT_PATH, body).json()["choices"]
    assert [len(choice["message"]["tool_calls"]) for choice in choices] == [2, 2]
    stream = streamed(server.post(CHAT_PATH, body | {"stream": True}))
    for idx in range(2):
        own = [choice for choice in stream if choice["index"] == idx]
        assert joined(own) == (plain(choices[idx]["message"]), "tool_calls")
        shown = [entry["token"] for choice in own for entry in (choice["logprobs"] or {"content": []})["content"]]
        assert shown == [entry["token"] for entry in choices[idx]["logprobs"]["content"]]


def test_a_call_that_a_limit_cuts() -> None:
    ids = TOKENIZER.encode('<tool_call>\n{"name": "f", "arguments": {"a": ', add_special_tokens=False)
    server = App(ScriptedEngine(lambda request: ids, finish_reason="length"))
    choice = server.post(CHAT_PATH, CHAT).json()["choices"][0]
    assert choice["finish_reason"] == "length"
    assert choice["message"]["tool_calls"][0]["function"] == {"name": "f", "arguments": '{"a": '}


def test_what_a_limit_leaves_of_a_mark_is_content_unless_it_must_be_a_call() -> None:
    ids = TOKENIZER.encode("<tool_", add_special_tokens=False)
    for choice, content in (("auto", "<tool_"), ("required", "")):
        server = App(ScriptedEngine(lambda request: ids, finish_reason="length"))
        body = CHAT | {"tool_choice": choice}
        answer = server.post(CHAT_PATH, body).json()["choices"][0]
        assert (answer["message"]["content"], answer["finish_reason"]) == (content, "length")
        assert "tool_calls" not in answer["message"]
        assert joined(streamed(server.post(CHAT_PATH, body | {"stream": True})))[0]["content"] == content


def test_every_model_of_the_tests_has_a_style() -> None:
    style = Style(TOKENIZER)
    assert (style.dialect, style.thought) == (HERMES, None)


def conversations() -> list[dict[str, Any]]:
    """A question with tools, and one whose history has a call and its result."""
    call = {"id": "c1", "type": "function", "function": {"name": "f", "arguments": '{"a": 1}'}}
    turns = [{"role": "assistant", "content": None, "tool_calls": [call]}]
    turns += [{"role": "tool", "tool_call_id": "c1", "content": "42"}]
    return [CHAT, CHAT | {"messages": [*CHAT["messages"], *turns]}]


@pytest.mark.parametrize("body", conversations())
def test_tokenize_and_apply_template_write_tools_as_a_chat_does(body: dict[str, Any]) -> None:
    server, engine = app("x")
    assert server.post(CHAT_PATH, body).status_code == 200
    prompt = engine.requests[0].prompt_ids
    assert server.post("/tokenize", body).json()["tokens"] == prompt
    text = server.post("/apply-template", body).json()["prompt"]
    assert '"description": "Does f."' in text
    assert TOKENIZER.encode(text, add_special_tokens=False) == prompt


def test_tools_beside_a_prompt_and_a_template_without_messages_are_refused() -> None:
    server, _ = app("x")
    bodies = {"/tokenize": {"prompt": "Hi", "tools": TOOLS}, "/apply-template": {"tools": TOOLS}}
    params = {path: server.post(path, body).json()["error"]["param"] for path, body in bodies.items()}
    assert params == {"/tokenize": "tools", "/apply-template": "messages"}
