"""OpenAI's chat and text completions."""

from __future__ import annotations

import json
from typing import Any

from lmkit.conform.case import MAX_TOKENS, Server, case, need

CHAT, TEXT = "/v1/chat/completions", "/v1/completions"
HI: dict[str, Any] = {"role": "user", "content": "Say hi."}
ASK: dict[str, Any] = {"messages": [HI], "max_tokens": MAX_TOKENS}
SCHEMA: dict[str, Any] = {
    "type": "object", "properties": {"kind": {"type": "string", "enum": ["a", "b"]}}, "required": ["kind"],
    "additionalProperties": False,
}  # fmt: skip
TOOL = {"type": "function", "function": {"name": "choose", "description": "Choose a kind", "parameters": SCHEMA}}
FORCED = {"type": "function", "function": {"name": "choose"}}
CALL = {"id": "call_1", "type": "function", "function": {"name": "choose", "arguments": '{"kind": "a"}'}}
REASONS = ("stop", "length", "tool_calls")


def check_usage(usage: dict[str, Any]) -> None:
    added = usage["prompt_tokens"] + usage["completion_tokens"]
    need(usage["total_tokens"] == added, f"total_tokens is {usage['total_tokens']}, the others add up to {added}")
    need(0 < usage["completion_tokens"] <= MAX_TOKENS, f"{usage['completion_tokens']} tokens with max_tokens 24")


def check_arguments(text: str) -> None:
    arguments = json.loads(text)
    need(arguments in ({"kind": "a"}, {"kind": "b"}), f"arguments that do not fit the schema: {text}")


def context(server: Server) -> int:
    """Tokens of the context, as lists of models tell it; 4096 where the server does not."""
    entries = [entry for entry in server.get("/v1/models")["data"] if entry["id"] == server.model]
    found = entries[0] if entries else {}
    return int(found.get("max_model_len") or (found.get("meta") or {}).get("n_ctx") or 4096)


@case("openai", "models are listed")
def models(server: Server) -> None:
    page = server.get("/v1/models")
    need(page["object"] == "list", "no list")
    need(server.model in [entry["id"] for entry in page["data"]], f"no {server.model} in the list")


@case("openai", "a whole chat")
def chat(server: Server) -> None:
    answer = server.post(CHAT, ASK)
    (choice,) = answer["choices"]
    need(answer["object"] == "chat.completion", f"object is {answer['object']}")
    need(choice["message"]["role"] == "assistant", "the message is not the assistant's")
    need(isinstance(choice["message"]["content"], str), "the content is no text")
    empty = [name for name in ("reasoning_content", "reasoning") if choice["message"].get(name) == ""]
    need(not empty, f"{empty} is an empty text where there is no reasoning")
    need(choice["finish_reason"] in REASONS, f"finish_reason is {choice['finish_reason']}")
    check_usage(answer["usage"])


@case("openai", "a streamed chat")
def streamed(server: Server) -> None:
    events = server.events(CHAT, ASK | {"stream": True, "stream_options": {"include_usage": True}})
    need(events[-1] == "[DONE]", "the stream does not end with [DONE]")
    *chunks, last = events[:-1]
    need(last["choices"] == [], "the chunk with the usage has choices")
    check_usage(last["usage"])
    need(len({chunk["id"] for chunk in chunks}) == 1, "chunks of several ids")
    need(chunks[0]["choices"][0]["delta"].get("role") == "assistant", "the first chunk has no role")
    ends = [choice["finish_reason"] for chunk in chunks for choice in chunk["choices"] if choice["finish_reason"]]
    need(len(ends) == 1 and ends[0] in REASONS, f"finish_reasons are {ends}")


@case("openai", "max_completion_tokens ends an answer")
def limited(server: Server) -> None:
    answer = server.post(CHAT, {"messages": [HI], "max_completion_tokens": 2})
    need(answer["usage"]["completion_tokens"] <= 2, f"{answer['usage']['completion_tokens']} tokens")


@case("openai", "n answers")
def choices(server: Server) -> None:
    answer = server.post(CHAT, ASK | {"n": 2})
    need([choice["index"] for choice in answer["choices"]] == [0, 1], f"{len(answer['choices'])} answers")


@case("openai", "log-probabilities of a chat")
def logprobs(server: Server) -> None:
    answer = server.post(CHAT, ASK | {"logprobs": True, "top_logprobs": 2})
    entries = answer["choices"][0]["logprobs"]["content"]
    need(entries and all(entry["logprob"] <= 0 and len(entry["top_logprobs"]) == 2 for entry in entries), "not 2 each")


@case("openai", "an answer of a JSON schema")
def schema(server: Server) -> None:
    form = {"type": "json_schema", "json_schema": {"name": "kind", "schema": SCHEMA, "strict": True}}
    answer = server.post(CHAT, {"messages": [HI], "max_tokens": 128, "response_format": form})
    check_arguments(answer["choices"][0]["message"]["content"])


@case("openai", "a call that must be made")
def called(server: Server) -> None:
    body = {"messages": [HI], "max_tokens": 128, "tools": [TOOL], "tool_choice": FORCED}
    (call,) = server.post(CHAT, body)["choices"][0]["message"]["tool_calls"]
    need(call["id"] and call["type"] == "function", "a call without id and type")
    need(call["function"]["name"] == "choose", f"a call of {call['function']['name']}")
    check_arguments(call["function"]["arguments"])


@case("openai", "a call, streamed")
def call_streamed(server: Server) -> None:
    body = {"messages": [HI], "max_tokens": 128, "tools": [TOOL], "tool_choice": FORCED, "stream": True}
    deltas = [choice["delta"] for event in server.events(CHAT, body)[:-1] for choice in event["choices"]]
    parts = [part for delta in deltas for part in delta.get("tool_calls") or ()]
    need(parts and parts[0].get("id") and parts[0]["function"].get("name") == "choose", "the first part names no call")
    need(all(part["index"] == 0 for part in parts), "parts of several calls")
    check_arguments("".join(part["function"].get("arguments") or "" for part in parts))


@case("openai", "results of tools, parts, and messages without content")
def history(server: Server) -> None:
    turns = [
        {"role": "system", "content": [{"type": "text", "text": "Be brief."}]}, HI,
        {"role": "assistant", "content": None, "tool_calls": [CALL]},
        {"role": "tool", "tool_call_id": "call_1", "content": [{"type": "text", "text": "done"}]},
        {"role": "assistant", "content": "Hi.", "refusal": None}, HI,
    ]  # fmt: skip
    answer = server.post(CHAT, {"messages": turns, "max_tokens": 4, "tools": [TOOL], "tool_choice": "none"})
    need(not answer["choices"][0]["message"].get("tool_calls"), "a call with tool_choice none")


@case("openai", "errors have OpenAI's form")
def errors(server: Server) -> None:
    for body, statuses in (({"messages": "Hi", "max_tokens": "x"}, (400, 422)), (ASK | {"model": "no-such"}, (404,))):
        error = server.refusal(CHAT, body, *statuses)["error"]
        need(isinstance(error["message"], str) and "type" in error, "no message and type")


@case("openai", "a text completion, whole and streamed")
def text(server: Server) -> None:
    body = {"prompt": "One, two,", "max_tokens": MAX_TOKENS}
    answer = server.post(TEXT, body)
    need(isinstance(answer["choices"][0]["text"], str), "no text")
    check_usage(answer["usage"])
    events = server.events(TEXT, body | {"stream": True})
    need(events[-1] == "[DONE]", "the stream does not end with [DONE]")
    need(all(isinstance(event["choices"][0]["text"], str) for event in events[:-1]), "a chunk without text")
