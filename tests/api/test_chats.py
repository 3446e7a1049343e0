"""Tools and reasoning in a pipeline: the same answers as the server's, whole and streamed."""

from __future__ import annotations

import asyncio
import json
from collections import deque
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from lmkit import AsyncPipeline, GenerationConfig, Pipeline, RequestError, Response, pipeline
from lmkit.errors import ConfigError
from lmkit.turbo.request import Request, StepOutput
from tests.test_end_to_end import running

PARAMETERS = {"type": "object", "properties": {"a": {"type": "integer"}, "b": {"enum": ["x", "y"]}}, "required": ["a"]}
TOOLS = [
    {"type": "function", "function": {"name": "f", "description": "Does f.", "parameters": PARAMETERS, "strict": True}},
    {"type": "function", "function": {"name": "g"}},
]
HI = [{"role": "user", "content": "Call f."}]
CALL = {"id": "call_1", "type": "function", "function": {"name": "f", "arguments": '{"a": 1}'}}
RESULT = [*HI, {"role": "assistant", "content": None, "tool_calls": [CALL]},
          {"role": "tool", "tool_call_id": "call_1", "content": "42"}]  # fmt: skip


def named(calls: list[dict[str, Any]]) -> list[tuple[str, Any]]:
    assert all(call["type"] == "function" and call["id"].startswith("call_") and len(call) == 3 for call in calls)
    return [(call["function"]["name"], call["function"]["arguments"]) for call in calls]


@pytest.mark.slow
def test_answers_are_those_of_the_server(demo_model: Path) -> None:
    cases: list[dict[str, Any]] = [
        {"tool_choice": "required"},
        {"tool_choice": "required", "parallel_tool_calls": False},
        {"tool_choice": {"type": "function", "function": {"name": "g"}}, "parallel_tool_calls": False},
        {"tool_choice": "auto"},
        {"tool_choice": "none"},
        {"messages": RESULT, "tool_choice": "required", "parallel_tool_calls": False},
        {"messages": RESULT, "tools": None},
    ]
    options = {"max_model_len": 1024, "max_batch_size": 8}

    def arguments(case: dict[str, Any], seed: int) -> tuple[Any, GenerationConfig, dict[str, Any]]:
        asked = {"messages": HI, "tools": TOOLS} | case
        return asked.pop("messages"), GenerationConfig(temperature=1.0, seed=seed, max_new_tokens=150), asked

    async def in_a_process(case: dict[str, Any], seed: int) -> tuple[Response, Response]:
        prompt, config, asked = arguments(case, seed)
        async with AsyncPipeline(str(demo_model), **options) as pipe:  # type: ignore[arg-type]
            streamed = Response()
            async for part in pipe.stream_infer(prompt, config, **asked):
                streamed.extend(part)
            return await pipe(prompt, config, **asked), streamed

    ended = 0
    command = ("serve", str(demo_model), "--port", "0", "--max-model-len", "1024", "--max-batch-size", "8")
    with running(*command) as url, pipeline(str(demo_model), **options) as pipe:  # type: ignore[arg-type]
        for seed, case in enumerate(cases):
            prompt, config, asked = arguments(case, seed)
            body = {"messages": prompt, **asked, "temperature": 1.0, "seed": seed, "max_tokens": 150}
            reply = httpx.post(f"{url}/v1/chat/completions", json=body, timeout=60).json()
            want = reply["choices"][0]
            got = pipe(prompt, config, **asked)
            assert (got.text, got.finish_reason) == (want["message"]["content"] or "", want["finish_reason"])
            assert named(got.tool_calls) == named(want["message"].get("tool_calls", []))
            assert got.input_token_len == reply["usage"]["prompt_tokens"]
            ended += got.finish_reason == "tool_calls"
            for name, arguments_text in named(got.tool_calls) if got.finish_reason == "tool_calls" else ():
                assert name == "g" or json.loads(arguments_text).keys() >= {"a"}
        both = pipe([HI, RESULT], config, tools=TOOLS, tool_choice="required")
        assert [named(answer.tool_calls) for answer in both] == [
            named(pipe(prompt, config, tools=TOOLS, tool_choice="required").tool_calls) for prompt in (HI, RESULT)
        ]
        case = cases[0]
        whole, streamed = asyncio.run(in_a_process(case, 0))
        prompt, config, asked = arguments(case, 0)
        here = pipe(prompt, config, **asked)
        assert named(whole.tool_calls) == named(streamed.tool_calls) == named(here.tool_calls)
    assert ended >= 2, "some of these answers are calls that end by themselves"


def says(pipe: Pipeline, monkeypatch: pytest.MonkeyPatch, text: str) -> list[Request]:
    """Make the model say `text`, a token a step. Returns the requests that it gets."""
    ids, seen = pipe.tokenizer.encode(text, add_special_tokens=False), []

    def steps(waiting: deque[Request]) -> Iterator[StepOutput]:
        for request in waiting:
            seen.append(request)
            for token in ids:
                yield StepOutput(request_id=request.request_id, token_ids=[token])
            eos = pipe.tokenizer.eos_token_ids[0]
            yield StepOutput(request_id=request.request_id, token_ids=[eos], finish_reason="stop", stop_token=eos)

    monkeypatch.setattr(pipe, "steps", steps)
    return seen


SAID = 'I look.\n<tool_call>\n{"name": "f", "arguments": {"a": 1}}\n</tool_call>\n<tool_call>\n{"name": "g", "arguments": {}}\n</tool_call>'  # noqa: E501


def test_calls_are_streamed_as_openai_s_deltas(pipe: Pipeline, monkeypatch: pytest.MonkeyPatch) -> None:
    requests = says(pipe, monkeypatch, SAID)
    parts = list(pipe.stream_infer(HI, tools=TOOLS))
    deltas = [delta for part in parts for delta in part.tool_calls]
    assert [delta["index"] for delta in deltas] == sorted(delta["index"] for delta in deltas)
    assert [delta["function"]["name"] for delta in deltas if "id" in delta] == ["f", "g"]
    assert len(deltas) > 4
    whole = pipe(HI, tools=TOOLS)
    assert (whole.text, whole.finish_reason) == ("I look.", "tool_calls")
    assert named(whole.tool_calls) == [("f", '{"a": 1}'), ("g", "{}")]
    assert "".join(part.text for part in parts) == whole.text
    text = pipe.tokenizer.decode(requests[0].prompt_ids, skip_special_tokens=False)
    assert '"description": "Does f."' in text
    assert requests[0].params.grammar
    goes_on = pipe([*HI, whole.message, {"role": "tool", "tool_call_id": whole.tool_calls[0]["id"], "content": "42"}])
    assert goes_on.text == SAID, "without tools it is one text"
    text = pipe.tokenizer.decode(requests[-1].prompt_ids, skip_special_tokens=False)
    assert '<tool_call>\n{"name": "f", "arguments": {"a": 1}}' in text
    assert "<tool_response>\n42\n</tool_response>" in text
    assert not requests[-1].params.grammar


THINKS = "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}<|im_start|>assistant\n{% if enable_thinking %}<think>\n{% endif %}"  # noqa: E501


def test_reasoning_is_apart(demo_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    template = tmp_path / "template.jinja"
    template.write_text(THINKS + "{# </think> #}")
    with pipeline(str(demo_model), max_model_len=256, max_batch_size=1, chat_template=str(template)) as thinker:
        requests = says(thinker, monkeypatch, "Let me see.\n</think>\n\n42")
        for prompt in (HI, "Call f."):
            answer = thinker(prompt, separate_reasoning=True, chat_template_kwargs={"enable_thinking": True})
            assert (answer.reasoning, answer.text, answer.finish_reason) == ("Let me see.", "42", "stop")
            assert answer.message == {"role": "assistant", "content": "42", "reasoning_content": "Let me see."}
            assert thinker.tokenizer.decode(requests[-1].prompt_ids, skip_special_tokens=False).endswith("<think>\n")
        whole = thinker(HI, chat_template_kwargs={"enable_thinking": True})
        assert (whole.reasoning, whole.text) == ("", "Let me see.\n</think>\n\n42")
        refused = thinker(HI, chat_template_kwargs={"thinks": True})
        assert "'thinks' is not a variable" in (refused.error_message or "")
        config = GenerationConfig(response_format={"type": "json_object"})
        thinker(HI, config, separate_reasoning=True, chat_template_kwargs={"enable_thinking": True})
        plain = thinker.maker.request([5], config).params.grammar
        assert requests[-1].params.grammar != plain, "the grammar begins behind the reasoning"


@pytest.mark.parametrize(
    ("fields", "kind", "message"),
    [
        ({"tools": "f"}, RequestError, "tools: Input should be a valid list"),
        ({"tools": [{"type": "function"}]}, RequestError, "function: Field required"),
        ({"tools": [TOOLS[0], TOOLS[0]]}, RequestError, "two of them have the same name"),
        ({"tool_choice": "required"}, RequestError, "no tools to choose from"),
        ({"tools": TOOLS, "tool_choice": {"type": "function", "function": {"name": "h"}}}, RequestError, "'h' is not"),
        ({"tools": TOOLS, "do_preprocess": False}, ConfigError, "tools needs the chat template"),
        ({"separate_reasoning": 1}, RequestError, "separate_reasoning: Input should be a valid boolean"),
        ({"tool": TOOLS}, ConfigError, "did you mean tools"),
    ],
)
def test_mistakes(pipe: Pipeline, fields: dict[str, Any], kind: type[Exception], message: str) -> None:
    with pytest.raises(kind, match=message):
        pipe(HI, **fields)


def test_a_call_without_room_is_refused_alone(pipe: Pipeline) -> None:
    config = GenerationConfig(ignore_eos=True)
    assert "ignore_eos" in (pipe(HI, config, tools=TOOLS, tool_choice="required").error_message or "")
    strict = [{"type": "function", "function": {"name": "f", "parameters": {"not": {}}, "strict": True}}]
    assert pipe(HI, tools=strict).error_message == "tools: f: the schema's not cannot be held by a grammar"
