"""Anthropic's Messages API: whole and streamed answers, and refusals in its own form."""

from __future__ import annotations

import json
from typing import Any

import httpx
import pytest

from lmkit.config import ServerConfig
from tests.serve.in_process import TOKENIZER, App, ScriptedEngine
from tests.serve.live import Server
from tests.serve.test_openai_client import text

PATH = "/v1/messages"
ASKED = [{"role": "user", "content": "Hello"}]
HELLO: dict[str, Any] = {"model": "demo", "max_tokens": 9, "seed": 0, "messages": ASKED}


def ask(server: Server, **fields: Any) -> Any:
    answer = server.post(PATH, HELLO | fields)
    assert answer.status_code == 200, answer.text
    return answer.json()


def events(server: Server, **fields: Any) -> list[tuple[str, dict[str, Any]]]:
    """The names and the data of a stream's events."""
    body = server.post(PATH, HELLO | {"stream": True} | fields).text
    lines = [event.split("\n") for event in body.removesuffix("\n\n").split("\n\n")]
    return [(name.removeprefix("event: "), json.loads(data.removeprefix("data: "))) for name, data in lines]


def prompt_tokens(*messages: tuple[str, str]) -> int:
    return len(TOKENIZER.encode_chat([{"role": role, "content": content} for role, content in messages]))


def test_a_whole_answer(server: Server) -> None:
    answer = ask(server)
    assert answer.pop("id").startswith("msg_")
    assert answer == {
        "type": "message",
        "role": "assistant",
        "model": "demo",
        "content": [{"type": "text", "text": text(9)}],
        "stop_reason": "max_tokens",
        "stop_sequence": None,
        "usage": {
            "input_tokens": prompt_tokens(("user", "Hello")),
            "cache_creation_input_tokens": 0,
            "cache_read_input_tokens": 0,
            "output_tokens": 9,
            "output_tokens_details": {"thinking_tokens": 0},
            "service_tier": "standard",
        },
    }


def test_the_events_of_a_stream(server: Server) -> None:
    streamed = events(server, max_tokens=40)
    assert all(name == data["type"] for name, data in streamed)
    names = [name for name, _ in streamed]
    num_deltas = names.count("content_block_delta")
    assert num_deltas >= 1
    assert names == [
        "message_start", "content_block_start", *["content_block_delta"] * num_deltas, "content_block_stop",
        "message_delta", "message_stop",
    ]  # fmt: skip
    start, end = streamed[0][1]["message"], streamed[-2][1]
    whole = ask(server, max_tokens=40)
    assert start.keys() == whole.keys()
    assert (start["content"], start["stop_reason"]) == ([], None)
    assert start["usage"]["input_tokens"] == whole["usage"]["input_tokens"]
    assert start["usage"]["output_tokens"] == 0
    assert "".join(data["delta"]["text"] for _, data in streamed[2:-3]) == whole["content"][0]["text"] == text(40)
    assert end["delta"] == {"stop_reason": "max_tokens", "stop_sequence": None}
    assert end["usage"] == whole["usage"]


def test_the_reasons_for_an_end(server: Server) -> None:
    asked = {"messages": [{"role": "user", "content": "EOS"}]}
    assert ask(server, **asked)["stop_reason"] == "end_turn"
    stopped = ask(server, stop_sequences=["quick", "fox"])
    assert (stopped["stop_reason"], stopped["stop_sequence"]) == ("stop_sequence", "quick")
    assert stopped["content"] == [{"type": "text", "text": "The "}]
    engine = ScriptedEngine(lambda request: [70] * 8, max_model_len=prompt_tokens(("user", "Hello")) + 8)
    full = App(engine).post(PATH, HELLO | {"max_tokens": 1000, "model": "model"})
    assert full.json()["stop_reason"] == "model_context_window_exceeded"
    exact = App(engine).post(PATH, HELLO | {"max_tokens": 8, "model": "model"})
    assert exact.json()["stop_reason"] == "max_tokens"


def test_an_empty_answer_has_an_empty_text() -> None:
    engine = ScriptedEngine(lambda request: [2], finish_reason="stop")
    answer = App(engine).post(PATH, HELLO | {"model": "model"}).json()
    assert (answer["content"], answer["stop_reason"]) == ([{"type": "text", "text": ""}], "end_turn")


def test_system_and_blocks_are_messages(server: Server) -> None:
    cached = {"cache_control": {"type": "ephemeral", "ttl": "1h"}}
    system = [{"type": "text", "text": "Be brief.", **cached}, {"type": "text", "text": "Be kind."}]
    messages = [
        {"role": "user", "content": [{"type": "text", "text": "One", **cached}, {"type": "text", "text": "Two"}]},
        {"role": "assistant", "content": [{"type": "text", "text": "Three", "citations": None}]},
        {"role": "user", "content": "Four"},
    ]
    plain = [("system", "Be brief.\nBe kind."), ("user", "One\nTwo"), ("assistant", "Three"), ("user", "Four")]
    body = {"model": "demo", "system": system, "messages": messages, **cached}
    counted = server.post(f"{PATH}/count_tokens", body)
    assert counted.json() == {"input_tokens": prompt_tokens(*plain)}
    assert ask(server, **body)["usage"]["input_tokens"] == prompt_tokens(*plain)


def test_the_cache_is_in_the_usage() -> None:
    app = App(ScriptedEngine())
    first, second = (app.post(PATH, HELLO | {"model": "model"}).json()["usage"] for _ in range(2))
    assert first["cache_read_input_tokens"] == 0
    assert second["cache_read_input_tokens"] == first["input_tokens"] - 1
    assert second["input_tokens"] == 1


IMAGE = {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": "AAAA"}}
RESULT = {"type": "tool_result", "tool_use_id": "a", "content": "x"}
CALL = {"type": "tool_use", "id": "a", "name": "f", "input": {}}

FORM = {"type": "json_schema", "schema": {"type": "object", "properties": {"a": {"type": "integer"}}}}


def test_the_schema_s_place_in_a_beta() -> None:
    engine = ScriptedEngine()
    for fields in ({"output_format": FORM}, {"output_config": {"format": FORM}}, {}):
        assert App(engine).post(PATH, HELLO | {"model": "model"} | fields).status_code == 200
    beta, now, free = (request.params.grammar for request in engine.requests)
    assert beta == now != free


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"max_tokens": None}, "max_tokens"),
        ({"messages": []}, "messages"),
        ({"messages": [{"role": "user", "content": [{"type": "text", "text": ""}] * 8192}]}, "at most 8192"),
        ({"messages": [{"role": "user", "content": [{"content": [{}] * 100} for _ in range(100)]}]}, "at most 8192"),
        ({"system": [{"type": "text", "text": ""}] * 8193}, "system: at most 8192"),
        ({"tools": [{"name": "f", "input_schema": {}}] * 1025}, "tools: at most 1024"),
        ({"messages": [{"role": "tool", "content": "x"}]}, "messages[0].role"),
        (
            {"messages": [{"role": "assistant", "content": [RESULT]}]},
            "tool_result do not belong to messages of role ass",
        ),
        ({"messages": [{"role": "user", "content": [CALL]}]}, "tool_use do not belong to messages of role user"),
        ({"messages": [{"role": "system", "content": [RESULT]}]}, "tool_result do not belong to messages of role sys"),
        ({"messages": [{"role": "user", "content": [{"type": "image", "source": {}}]}]}, "source"),
        ({"messages": [{"role": "user", "content": [IMAGE]}]}, "images are not supported: this model reads text alone"),
        (
            {"messages": [{"role": "assistant", "content": [IMAGE]}]},
            "image do not belong to messages of role assistant",
        ),
        ({"messages": [{"role": "user", "content": [RESULT | {"content": [IMAGE]}]}]}, "images are not supported"),
        ({"messages": [{"role": "user", "content": [{"type": "document"}]}]}, "'document' are not supported"),
        ({"tools": [{"type": "bash_20250124", "name": "bash"}]}, "'bash_20250124' are not supported"),
        ({"thinking": {"type": "enabled"}}, "budget_tokens"),
        ({"thinking": {"type": "between_tools"}}, "thinking.type"),
        ({"container": "c"}, "container is not supported"),
        ({"mcp_servers": [{"type": "url"}]}, "mcp_servers is not supported"),
        ({"context_management": {"edits": [{"type": "clear_tool_uses_20250919"}]}}, "context_management"),
        ({"speed": "fast"}, "speed is not supported"),
        ({"thread": {"type": "continue", "previous_message_id": "m"}}, "thread is not supported"),
        ({"stop_sequences": ["x"] * 17}, "stop_sequences"),
        ({"stop_sequences": [""]}, "stop_sequences"),
        ({"output_config": {"format": {"type": "json_schema", "schema": {"not": {}}}}}, "output_config.format: "),
        ({"output_format": {"type": "json_schema", "schema": {"not": {}}}}, "output_config.format: "),
        ({"output_format": FORM, "output_config": {"format": {"type": "text"}}}, "output_format differs"),
        ({"temperature": -1}, "temperature"),
        ({"nonsense": 1}, "unknown parameter 'nonsense'"),
    ],
)
def test_what_cannot_be_honoured_is_refused_where_every_field_counts(fields: dict[str, Any], message: str) -> None:
    engine = ScriptedEngine()
    answer = App(engine, ServerConfig(strict_fields=True)).post(PATH, HELLO | {"model": "model"} | fields)
    error = answer.json()
    assert (answer.status_code, error["type"], error["error"]["type"]) == (400, "error", "invalid_request_error")
    assert message in error["error"]["message"]
    assert not engine.requests


def test_clients_send_the_whole_conversation_where_threads_are_refused() -> None:
    """anthropic 2.14's tool_runner falls back if the error's details have this code."""
    answer = App(ScriptedEngine()).post(PATH, HELLO | {"model": "model", "thread": {"type": "create"}})
    details = {"error_code": "thread_unsupported_request", "unsupported": ["thread"]}
    assert (answer.status_code, answer.json()["error"]["details"]) == (400, details)


def test_fields_that_ask_for_nothing_are_taken() -> None:
    keep = {"edits": [{"type": "clear_thinking_20251015", "keep": "all"}]}
    nothing: dict[str, Any] = {
        "service_tier": "auto",
        "speed": "standard",
        "mcp_servers": [],
        "context_management": keep,
        "thinking": {"type": "enabled", "budget_tokens": 1024},  # the model shows no reasoning
    }
    engine = ScriptedEngine()
    fields = {"model": "model", "metadata": {"user_id": "me"}, "top_k": 5, "priority": 2}
    assert App(engine).post(f"{PATH}?beta=true", HELLO | fields | nothing).status_code == 200
    assert (engine.requests[0].params.top_k, engine.requests[0].priority) == (5, 2)


@pytest.mark.parametrize(("version", "status"), [(None, 200), ("2023-06-01", 200), ("2026-10-21", 200), ("2024", 400)])
def test_the_versions_of_the_api(version: str | None, status: int) -> None:
    headers = {"anthropic-version": version} if version else {}
    for path in (PATH, f"{PATH}/count_tokens"):
        body = HELLO | {"model": "model"}
        if path != PATH:
            del body["max_tokens"]
        answer = App(ScriptedEngine()).request("POST", path, json=body, headers=headers)
        assert answer.status_code == status, answer.text


def test_errors_have_the_api_s_types(server: Server) -> None:
    def error(**fields: Any) -> tuple[int, str]:
        answer = server.post(PATH, HELLO | fields)
        return answer.status_code, answer.json()["error"]["type"]

    assert error(model="other") == (404, "not_found_error")
    assert error(messages=[{"role": "user", "content": "REFUSE"}], stream=True) == (503, "overloaded_error")
    assert error(messages=[{"role": "user", "content": "BROKEN"}]) == (500, "api_error")
    long = server.post(PATH, HELLO | {"messages": [{"role": "user", "content": "word " * 6000}]})
    assert long.json()["error"]["message"].startswith("prompt is too long: ")
    assert server.get(PATH).json()["type"] == "error"
    app = App(ScriptedEngine(), ServerConfig(api_keys=("one",)))
    refused = app.post(PATH, HELLO)
    assert (refused.status_code, refused.json()["error"]["type"]) == (401, "authentication_error")
    for headers in ({"x-api-key": "one"}, {"authorization": "Bearer one"}):
        assert app.request("POST", PATH, json=HELLO | {"model": "model"}, headers=headers).status_code == 200


def test_a_failure_in_the_middle_of_a_stream_is_an_event(server: Server) -> None:
    slow = HELLO | {"messages": [{"role": "user", "content": "SLOW"}], "max_tokens": 4000, "stream": True}
    with httpx.stream("POST", server.url + PATH, json=slow, timeout=30) as stream:
        lines = stream.iter_lines()
        while next(lines) != "event: content_block_delta":
            pass
        assert server.post(PATH, HELLO | {"messages": [{"role": "user", "content": "CRASH"}]}).status_code == 500
        rest = list(lines)
    assert rest[-3] == "event: error"
    assert json.loads(rest[-2].removeprefix("data: "))["error"]["type"] == "api_error"
    assert "secret" not in "".join(rest)


def test_models_have_anthropic_s_form_for_its_clients(server: Server) -> None:
    version = {"anthropic-version": "2023-06-01"}
    page = httpx.get(server.url + "/v1/models", headers=version).json()
    assert (page["first_id"], page["has_more"]) == ("demo", False)
    (card,) = page["data"]
    assert card["type"] == "model"
    assert card["created_at"].endswith("Z")
    assert httpx.get(server.url + "/v1/models/demo", headers=version).json() == card
    assert httpx.get(server.url + "/v1/models").json()["object"] == "list"
