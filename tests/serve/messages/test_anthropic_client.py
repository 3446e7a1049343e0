"""The official client against a real server process."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import anthropic
import pytest

from tests.serve.in_process import TOKENIZER
from tests.serve.live import Server
from tests.serve.test_agents import PARAMETERS, TASK, TURNS, agent_server, command
from tests.serve.test_openai_client import text

__all__ = ["agent_server"]  # a fixture
HELLO: list[Any] = [{"role": "user", "content": "Hello"}]


@pytest.fixture(scope="module")
def claude(server: Server) -> Iterator[anthropic.Anthropic]:
    with anthropic.Anthropic(base_url=server.url, api_key="none", max_retries=0, timeout=30) as client:
        yield client


def test_messages(claude: anthropic.Anthropic) -> None:
    answer = claude.messages.create(model="demo", max_tokens=9, messages=HELLO, extra_body={"seed": 0})
    (block,) = answer.content
    assert block.type == "text"
    assert (block.text, answer.stop_reason, answer.usage.output_tokens) == (text(9), "max_tokens", 9)


def test_the_stream_helper(claude: anthropic.Anthropic) -> None:
    with claude.messages.stream(
        model="demo", max_tokens=9, messages=HELLO, extra_body={"seed": 0}, stop_sequences=["fo"]
    ) as stream:
        pieces = list(stream.text_stream)
        final = stream.get_final_message()
    assert "".join(pieces) == text(9).removesuffix("fo")
    assert (final.stop_reason, final.stop_sequence) == ("stop_sequence", "fo")


def test_count_tokens(claude: anthropic.Anthropic) -> None:
    counted = claude.messages.count_tokens(model="demo", messages=HELLO)
    assert counted.input_tokens == len(TOKENIZER.encode_chat(HELLO))


def test_refusals_have_the_client_s_types(claude: anthropic.Anthropic) -> None:
    def refused(kind: type[anthropic.APIStatusError], **fields: Any) -> str:
        with pytest.raises(kind) as error:
            claude.messages.create(**{"model": "demo", "max_tokens": 4, "messages": HELLO, **fields})
        return str(error.value.type)

    assert refused(anthropic.NotFoundError, model="other") == "not_found_error"
    assert refused(anthropic.BadRequestError, max_tokens=0) == "invalid_request_error"
    refuse: list[Any] = [{"role": "user", "content": "REFUSE"}]
    assert refused(anthropic.InternalServerError, messages=refuse) == "overloaded_error"


def test_ten_turns_with_tools(agent_server: Server) -> None:
    """The client's own objects go back as they came."""
    tools: Any = [{"name": "shell", "description": "Run it", "input_schema": PARAMETERS}]
    messages: list[Any] = [{"role": "user", "content": TASK}]
    with anthropic.Anthropic(base_url=agent_server.url, api_key="none", max_retries=0, timeout=30) as client:
        for turn in range(TURNS):
            with client.messages.stream(
                model="demo", max_tokens=500, messages=messages, tools=tools, thinking={"type": "adaptive"}
            ) as stream:
                answer = stream.get_final_message()
            messages.append({"role": "assistant", "content": answer.content})
            calls = [block for block in answer.content if block.type == "tool_use"]
            if turn < TURNS - 1:
                assert answer.stop_reason == "tool_use"
                assert calls[0].input == {"command": command(turn)}
                result = {"type": "tool_result", "tool_use_id": calls[0].id, "content": f"RESULT {turn}"}
                messages.append({"role": "user", "content": [result]})
    assert (answer.stop_reason, calls) == ("end_turn", [])
    assert [block.type for block in answer.content] == ["thinking", "text"]
