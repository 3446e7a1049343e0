"""Ten turns of an agent with tools, as coding agents hold them: stateless and streamed, or continued by the server."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import openai
import pytest

from tests.serve.fake_engine import script
from tests.serve.live import Server

TURNS = 10
PARAMETERS = {"type": "object", "properties": {"command": {"type": "array", "items": {"type": "string"}}}}


def command(turn: int) -> list[str]:
    return ["step", f'{turn} "ü"\n']


def written(turn: int) -> str:
    """What the model writes in a turn: reasoning, a text, and a call in all turns but the last."""
    call = json.dumps({"name": "shell", "arguments": {"command": command(turn)}}, ensure_ascii=False)
    end = f"I run step {turn}.\n<tool_call>\n{call}\n</tool_call>" if turn < TURNS - 1 else "All done."
    return f"<think>\nNow {turn}.\n</think>\n\n{end}"


TASK = f"Do it. {script([written(turn) for turn in range(TURNS)])}"


@pytest.fixture(scope="module")
def agent_server() -> Iterator[Server]:
    with Server("--max-model-len", "16384", "--tool-parser", "hermes", "--reasoning-parser", "think") as running:
        yield running


@pytest.fixture(scope="module")
def agent_client(agent_server: Server) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{agent_server.url}/v1", api_key="none", max_retries=0, timeout=30) as client:
        yield client


SHELL: Any = {"type": "function", "name": "shell", "description": "Run it", "strict": False, "parameters": PARAMETERS}


def check_turn(items: list[Any], turn: int, text: str) -> None:
    kinds = ["reasoning", "message", "function_call"] if turn < TURNS - 1 else ["reasoning", "message"]
    assert [item.type for item in items] == kinds, text
    assert items[0].content[0].text == f"Now {turn}."
    if turn < TURNS - 1:
        assert json.loads(items[2].arguments) == {"command": command(turn)}


def test_an_agent_that_sends_all_items_each_time(agent_client: openai.OpenAI) -> None:
    """As Codex does: nothing is stored, and reasoning comes back without its id."""
    items: list[Any] = [
        {"type": "message", "role": "developer", "content": [{"type": "input_text", "text": "You are an agent."}]},
        {"type": "message", "role": "user", "content": [{"type": "input_text", "text": TASK}]},
    ]
    for turn in range(TURNS):
        stream = agent_client.responses.create(
            model="demo",
            instructions="Use the shell.",
            input=items,
            tools=[SHELL],
            tool_choice="auto",
            parallel_tool_calls=False,
            store=False,
            stream=True,
            include=["reasoning.encrypted_content"],
            prompt_cache_key="a-conversation",
            max_output_tokens=400,
        )
        done = []
        for event in stream:
            if event.type == "response.output_item.done":
                done.append(event.item)
        assert event.type == "response.completed"
        assert event.response.output == done
        check_turn(done, turn, event.response.output_text)
        for item in done:
            sent = item.to_dict()
            del sent["id"]
            if item.type == "reasoning" and turn % 2:
                del sent["content"]  # a client that keeps only the sealed form
            items.append(sent)
            if item.type == "function_call":
                items.append({"type": "function_call_output", "call_id": item.call_id, "output": f"RESULT {turn}"})
    assert event.response.output_text == "All done."
    assert event.response.usage is not None
    assert event.response.usage.output_tokens_details.reasoning_tokens > 0


def test_an_agent_that_continues_the_last_response(agent_client: openai.OpenAI) -> None:
    previous, sent = None, TASK  # type: Any, Any
    for turn in range(TURNS):
        answer = agent_client.responses.create(
            model="demo", input=sent, previous_response_id=previous, tools=[SHELL], max_output_tokens=400
        )
        check_turn(answer.output, turn, answer.output_text)
        previous = answer.id
        if turn < TURNS - 1:
            call_id = answer.output[2].call_id  # type: ignore[union-attr]
            sent = [{"type": "function_call_output", "call_id": call_id, "output": f"RESULT {turn}"}]
    assert answer.output_text == "All done."


def streamed(server: Server, body: dict[str, Any]) -> dict[str, Any]:
    """A message, built up from its events."""
    text = server.post("/v1/messages", body | {"stream": True}).text
    message: dict[str, Any] = {}
    for part in text.removesuffix("\n\n").split("\n\n"):
        event = json.loads(part.partition("\ndata: ")[2])
        match event["type"]:
            case "message_start":
                message = event["message"]
            case "content_block_start":
                message["content"].append(event["content_block"])
            case "content_block_delta":
                block = message["content"][event["index"]]
                kind, delta = event["delta"].pop("type").removesuffix("_delta"), event["delta"]
                for name, piece in delta.items():
                    block[name] = block.get(name, "") + piece
                assert kind in ("text", "thinking", "signature", "input_json")
            case "content_block_stop":
                block = message["content"][event["index"]]
                if "partial_json" in block:
                    block["input"] = json.loads(block.pop("partial_json"))
            case "message_delta":
                message |= event["delta"] | {"usage": event["usage"]}
    return message


def test_an_agent_of_the_messages_api(agent_server: Server) -> None:
    """As Claude Code holds its conversation: system blocks, thinking that is handed back, results with errors."""
    cached = {"cache_control": {"type": "ephemeral"}}
    messages: list[Any] = [{"role": "user", "content": [{"type": "text", "text": TASK, **cached}]}]
    for turn in range(TURNS):
        body = {
            "model": "demo",
            "max_tokens": 32000,
            "system": [{"type": "text", "text": "You are an agent.", **cached}],
            "messages": messages,
            "tools": [{"name": "shell", "description": "Run it", "input_schema": PARAMETERS, **cached}],
            "thinking": {"type": "adaptive"},
            "metadata": {"user_id": "u"},
        }
        answer = streamed(agent_server, body)
        whole = agent_server.post("/v1/messages", body).json()
        thinking, said, *calls = answer["content"]
        assert (thinking["type"], thinking["thinking"]) == ("thinking", f"Now {turn}.")
        assert whole["content"][:2] == [thinking, said]
        messages.append({"role": "assistant", "content": answer["content"]})
        if turn == TURNS - 1:
            assert (said["text"], answer["stop_reason"], calls) == ("All done.", "end_turn", [])
            break
        assert (answer["stop_reason"], whole["stop_reason"]) == ("tool_use", "tool_use")
        (call,) = calls
        assert call["input"] == whole["content"][2]["input"] == {"command": command(turn)}
        result = {"type": "tool_result", "tool_use_id": call["id"], "is_error": turn == 3, **cached}
        result["content"] = [{"type": "text", "text": f"RESULT {turn}"}] if turn % 2 else f"RESULT {turn}"
        messages.append({"role": "user", "content": [result, {"type": "text", "text": "Go on."}]})
    assert answer["usage"] == whole["usage"] | {"cache_read_input_tokens": 0}
    assert answer["usage"]["output_tokens_details"]["thinking_tokens"] > 0


def test_a_call_that_must_be_made(agent_client: openai.OpenAI) -> None:
    """What the choice asks for is held by a grammar, see test_tools; here its forms reach the chat."""
    for choice in ("none", "auto", "required", {"type": "function", "name": "shell"}):
        answer = agent_client.responses.create(
            model="demo",
            input=TASK,
            tools=[SHELL],
            tool_choice=choice,
            max_output_tokens=400,  # type: ignore[arg-type]
        )
        assert answer.tool_choice == choice or answer.tool_choice.to_dict() == choice  # type: ignore[union-attr]
    with pytest.raises(openai.BadRequestError, match="tool_choice"):
        agent_client.responses.create(
            model="demo", input="Hi", tools=[SHELL], tool_choice={"type": "function", "name": "no"}
        )
