"""Anthropic's Messages API."""

from __future__ import annotations

import json
from typing import Any

from lmkit.conform.case import Server, case, need
from lmkit.conform.openai import HI, SCHEMA, check_arguments

PATH = "/v1/messages"
ASK: dict[str, Any] = {"messages": [HI], "max_tokens": 24}
TOOL = {"name": "choose", "description": "Choose a kind", "input_schema": SCHEMA}
FORCED = {"tools": [TOOL], "tool_choice": {"type": "tool", "name": "choose"}, "max_tokens": 128}
PARTS = {"text_delta": "text", "thinking_delta": "thinking", "input_json_delta": "partial_json", "signature_delta": ""}


def built(events: list[Any]) -> tuple[list[dict[str, Any]], dict[str, Any]]:
    """(content, last delta) of a stream whose events are in order."""
    events = [event for event in events if event["type"] != "ping"]
    kinds = [event["type"] for event in events]
    need(kinds[0] == "message_start", f"the first event is {kinds[0]}")
    need(kinds[-2:] == ["message_delta", "message_stop"], f"the last events are {kinds[-2:]}")
    content: list[dict[str, Any]] = []
    is_open = False
    for event in events[1:-2]:
        match event["type"]:
            case "content_block_start":
                need(not is_open and event["index"] == len(content), "a block begins before the last one ends")
                content.append(event["content_block"] | {"written": ""})
                is_open = True
            case "content_block_delta":
                need(is_open and event["index"] == len(content) - 1, "a delta outside of its block")
                if part := PARTS[event["delta"]["type"]]:
                    content[-1]["written"] += event["delta"][part]
            case "content_block_stop":
                is_open = False
    need(not is_open, "a block does not end")
    return content, events[-2]


@case("messages", "a whole message")
def whole(server: Server) -> None:
    message = server.post(PATH, ASK | {"system": "Be brief."})
    need((message["type"], message["role"]) == ("message", "assistant"), "no message of the assistant")
    need(any(block["type"] == "text" for block in message["content"]), "no text")
    need(message["stop_reason"] in ("end_turn", "max_tokens"), f"stop_reason is {message['stop_reason']}")
    need(message["usage"]["output_tokens"] > 0 and "input_tokens" in message["usage"], "no usage")


@case("messages", "a streamed message")
def streamed(server: Server) -> None:
    content, last = built(server.events(PATH, ASK | {"stream": True}))
    need(any(block["type"] == "text" for block in content), "no text")
    need(last["delta"]["stop_reason"] and last["usage"]["output_tokens"] > 0, "no stop_reason and usage at the end")


@case("messages", "a call that must be made, and its result")
def called(server: Server) -> None:
    message = server.post(PATH, ASK | FORCED)
    (call,) = (block for block in message["content"] if block["type"] == "tool_use")
    need(message["stop_reason"] == "tool_use", f"stop_reason is {message['stop_reason']}")
    check_arguments(json.dumps(call["input"]))
    image_free = [{"type": "text", "text": "done", "cache_control": {"type": "ephemeral"}}]
    result = {"type": "tool_result", "tool_use_id": call["id"], "content": image_free, "is_error": False}
    turns = [HI, {"role": "assistant", "content": message["content"]}, {"role": "user", "content": [result]}]
    server.post(PATH, {"messages": turns, "tools": [TOOL], "max_tokens": 4})


@case("messages", "a call, streamed")
def call_streamed(server: Server) -> None:
    content, last = built(server.events(PATH, ASK | FORCED | {"stream": True}))
    (call,) = (block for block in content if block["type"] == "tool_use")
    check_arguments(call["written"])
    need(last["delta"]["stop_reason"] == "tool_use", f"stop_reason is {last['delta']['stop_reason']}")


@case("messages", "count_tokens is what an answer counts")
def counted(server: Server) -> None:
    number = server.post(f"{PATH}/count_tokens", {"messages": [HI]})["input_tokens"]
    usage = server.post(PATH, ASK)["usage"]
    used = usage["input_tokens"] + (usage.get("cache_read_input_tokens") or 0)
    need(number == used, f"{number} counted, {used} used")


@case("messages", "models are listed in Anthropic's form")
def models(server: Server) -> None:
    page = server.get("/v1/models", **{"anthropic-version": "2023-06-01"})
    need(page["data"][0]["type"] == "model" and "has_more" in page, "the list has another form")


@case("messages", "errors have Anthropic's form")
def errors(server: Server) -> None:
    answer = server.refusal(PATH, {"messages": [HI]}, 400)
    need(answer["type"] == "error" and isinstance(answer["error"]["message"], str), "no error with a message")
