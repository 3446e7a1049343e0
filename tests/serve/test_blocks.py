"""Reasoning, texts and calls as the Responses and the Messages API write them, from a script of steps."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import openai
import pytest
from openai.lib.streaming.responses._responses import ResponseStreamState
from openai.types.responses import Response, ResponseStreamEvent
from pydantic import TypeAdapter

from lmkit.serve.blocks import BlockBuilder, Step
from lmkit.serve.translated import opened
from lmkit.turbo.transport.output import RequestOutput
from tests.serve.in_process import App, ScriptedEngine

RESPONSES, MESSAGES = "/v1/responses", "/v1/messages"
SCRIPT: list[tuple[str, ...]] = [
    ("reasoning", "Let me"), ("reasoning", " think."), ("text", "I look"), ("text", " it up."),
    ("begin", "call_1", "find"), ("call", '{"a": '), ("call", "[1]}"), ("begin", "call_2", "stop"), ("call", "{}"),
]  # fmt: skip


@pytest.fixture
def script(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, ...]]:
    """The steps of the answer; each output of the engine makes the next one, and the last output all that are left."""
    steps = list(SCRIPT)

    def taken(self: BlockBuilder, output: RequestOutput) -> Iterator[Step]:
        count = len(steps) if output.finish_reason else 1
        for kind, text, *name in steps[:count]:
            yield from self.blocks.call(text, name[0]) if name else self.blocks.grow(kind, text)  # type: ignore[arg-type]
        del steps[:count]

    monkeypatch.setattr(BlockBuilder, "taken", taken)
    return steps


def sent(path: str, finish: Any = "stop", **fields: Any) -> str:
    engine = ScriptedEngine(lambda request: [70] * 6, finish_reason=finish)
    asked: dict[str, Any] = {"input": "Hi"} if path == RESPONSES else {"messages": [{"role": "user", "content": "Hi"}]}
    limit = {} if path == RESPONSES else {"max_tokens": 100}
    answer = App(engine).post(path, {"model": "model", **asked, **limit, **fields})
    assert answer.status_code == 200, answer.text
    return answer.text


def events(text: str) -> list[dict[str, Any]]:
    return [json.loads(event.partition("\ndata: ")[2]) for event in text.removesuffix("\n\n").split("\n\n")]


def test_the_items_of_a_response(script: list[Any]) -> None:
    answer = Response.model_validate(json.loads(sent(RESPONSES)))
    reasoning, message, first, second = answer.output
    assert reasoning.type == "reasoning"
    assert reasoning.content is not None
    assert (reasoning.content[0].text, reasoning.summary, reasoning.status) == ("Let me think.", [], "completed")
    assert message.type == "message"
    assert (answer.output_text, message.status) == ("I look it up.", "completed")
    assert first.type == second.type == "function_call"
    assert (first.call_id, first.name, first.arguments) == ("call_1", "find", '{"a": [1]}')
    assert (second.call_id, second.name, second.arguments, second.status) == ("call_2", "stop", "{}", "completed")


def test_the_events_of_a_response(script: list[Any]) -> None:
    streamed = events(sent(RESPONSES, stream=True))
    assert [event["sequence_number"] for event in streamed] == list(range(len(streamed)))
    call = ["output_item.added", "", "function_call_arguments.done", "output_item.done"]
    expected = ["created", "in_progress"]
    for kind in ("reasoning_text", "output_text"):
        expected += ["output_item.added", "content_part.added", f"{kind}.delta", f"{kind}.done"]
        expected += ["content_part.done", "output_item.done"]
    expected += [name or "function_call_arguments.delta" for name in call * 2] + ["completed"]
    names = [event["type"].removeprefix("response.") for event in streamed]
    assert [name for i, name in enumerate(names) if i == 0 or names[i - 1] != name] == expected
    state: ResponseStreamState[None] = ResponseStreamState(input_tools=openai.omit, text_format=openai.omit)
    for event in streamed:  # the client's own rules about the order and the ids
        state.handle_event(TypeAdapter[Any](ResponseStreamEvent).validate_python(event))
    deltas: dict[int, str] = {}
    for event in streamed:
        if event["type"].endswith(".delta"):
            deltas[event["output_index"]] = deltas.get(event["output_index"], "") + event["delta"]
    assert list(deltas.values()) == ["Let me think.", "I look it up.", '{"a": [1]}', "{}"]
    done = [event["item"] for event in streamed if event["type"] == "response.output_item.done"]
    assert streamed[-1]["response"]["output"] == done


def test_sealed_reasoning_comes_back(script: list[Any]) -> None:
    answer = json.loads(sent(RESPONSES, include=["reasoning.encrypted_content"]))
    assert opened(answer["output"][0]["encrypted_content"], "x") == "Let me think."


def test_a_cut_answer_says_where(script: list[Any]) -> None:
    del script[6:]
    answer = json.loads(sent(RESPONSES, finish="length"))
    assert answer["incomplete_details"] == {"reason": "max_output_tokens"}
    assert [item["status"] for item in answer["output"]] == ["completed", "completed", "incomplete"]


def test_the_blocks_of_a_message(script: list[Any]) -> None:
    answer = json.loads(sent(MESSAGES))
    assert answer["content"] == [
        {"type": "thinking", "thinking": "Let me think.", "signature": "lmkit"},
        {"type": "text", "text": "I look it up."},
        {"type": "tool_use", "id": "call_1", "name": "find", "input": {"a": [1]}},
        {"type": "tool_use", "id": "call_2", "name": "stop", "input": {}},
    ]
    assert answer["stop_reason"] == "tool_use"


def test_the_events_of_a_message(script: list[Any]) -> None:
    streamed = events(sent(MESSAGES, stream=True))
    blocks: list[Any] = []
    for event in streamed[1:-2]:
        match event["type"]:
            case "content_block_start":
                assert event["index"] == len(blocks)
                blocks.append([event["content_block"]])
            case "content_block_delta":
                assert event["index"] == len(blocks) - 1
                blocks[-1].append(event["delta"])
            case "content_block_stop":
                blocks[-1].append("stop")
    assert [block[0]["type"] for block in blocks] == ["thinking", "text", "tool_use", "tool_use"]
    assert all(block.index("stop") == len(block) - 1 for block in blocks)
    assert blocks[0][-2] == {"type": "signature_delta", "signature": "lmkit"}
    assert "".join(delta["thinking"] for delta in blocks[0][1:-2]) == "Let me think."
    assert blocks[2][0] == {"type": "tool_use", "id": "call_1", "name": "find", "input": {}}
    assert "".join(delta["partial_json"] for delta in blocks[2][1:-1]) == '{"a": [1]}'
    assert streamed[-2]["delta"]["stop_reason"] == "tool_use"


def test_thinking_that_is_not_shown_is_in_its_signature(script: list[Any]) -> None:
    hidden = {"type": "adaptive", "display": "omitted"}
    block = json.loads(sent(MESSAGES, thinking=hidden))["content"][0]
    assert (block["thinking"], opened(block["signature"], "x")) == ("", "Let me think.")
    script[:] = SCRIPT
    assert "think." not in sent(MESSAGES, thinking=hidden, stream=True)


def test_a_call_that_a_limit_cut_is_no_call(script: list[Any]) -> None:
    del script[6:]
    answer = json.loads(sent(MESSAGES, finish="length"))
    assert answer["stop_reason"] == "max_tokens"
    assert answer["content"][2] == {"type": "text", "text": 'find {"a": '}
