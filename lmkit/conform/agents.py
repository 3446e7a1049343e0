"""What coding agents send, shortened: hints, tools of their own servers, and history that they hand back."""

from __future__ import annotations

from typing import Any

from lmkit.conform import messages, openai, responses
from lmkit.conform.case import Server, case, need
from lmkit.conform.openai import CALL, HI

FEW = 4  # tokens
CACHED = {"cache_control": {"type": "ephemeral"}}
SPACE = {"type": "namespace", "name": "agents", "description": "Helpers", "tools": [responses.TOOL]}
SEARCH = {"type": "web_search", "external_web_access": False}


@case("agents", "Codex: client_metadata, a namespace, web_search, a developer's message, sealed reasoning")
def codex(server: Server) -> None:
    said = {"type": "input_text", "text": "Say hi."}
    body: dict[str, Any] = {
        "input": [
            {"type": "message", "role": "developer", "content": [said], "id": "msg_1"},
            {"type": "message", "role": "user", "content": [said]},
        ],
        "tools": [responses.TOOL, SPACE, SEARCH], "tool_choice": "auto", "parallel_tool_calls": True,
        "reasoning": {"effort": "medium", "summary": "auto"}, "store": False, "stream": True,
        "include": ["reasoning.encrypted_content"], "prompt_cache_key": "key", "client_metadata": {"turn": "1"},
    }  # fmt: skip
    responses.check_stream(server.events(responses.PATH, body | {"max_output_tokens": FEW}))


@case("agents", "Codex: history of reasoning, calls and a search")
def codex_history(server: Server) -> None:
    items = [
        HI,
        {"type": "reasoning", "summary": [{"type": "summary_text", "text": "Think."}], "encrypted_content": None},
        {"type": "web_search_call", "id": "ws_1", "status": "completed", "action": {"type": "search", "query": "x"}},
        {"type": "function_call", "call_id": "c", "name": "choose", "arguments": '{"kind": "a"}'},
        {"type": "function_call_output", "call_id": "c", "output": [{"type": "input_text", "text": "done"}]},
    ]
    body = {"input": items, "tools": [responses.TOOL], "max_output_tokens": FEW, "store": False}
    need(server.post(responses.PATH, body)["output"], "the response has no item")


@case("agents", "Claude Code: effort, adaptive thinking, context_management, a system's note in the middle")
def claude(server: Server) -> None:
    edits = {"edits": [{"type": "clear_thinking_20251015", "keep": "all"}]}
    body: dict[str, Any] = {
        "system": [{"type": "text", "text": "Be brief.", **CACHED}],
        "messages": [
            {"role": "user", "content": [{"type": "text", "text": "Say hi.", **CACHED}]},
            {"role": "system", "content": "Agents: none."},
        ],
        "tools": [messages.TOOL | CACHED], "metadata": {"user_id": "u"}, "thinking": {"type": "adaptive"},
        "output_config": {"effort": "high"}, "context_management": edits, "stream": True,
    }  # fmt: skip
    messages.built(server.events(messages.PATH, body | {"max_tokens": FEW}))


@case("agents", "Claude Code: history of thinking, calls and results")
def claude_history(server: Server) -> None:
    turn = [
        {"type": "thinking", "thinking": "Think.", "signature": "s"},
        {"type": "text", "text": "I choose."},
        {"type": "tool_use", "id": "toolu_1", "name": "choose", "input": {"kind": "a"}, **CACHED},
    ]
    result = {"type": "tool_result", "tool_use_id": "toolu_1", "content": "done", **CACHED}
    turns = [HI, {"role": "assistant", "content": turn}, {"role": "user", "content": [result]}]
    answer = server.post(messages.PATH, {"messages": turns, "tools": [messages.TOOL], "max_tokens": FEW})
    need(answer["content"], "the message has no block")


@case("agents", "opencode and Qwen Code: history with reasoning, null arguments, and empty contents")
def chats(server: Server) -> None:
    nothing = CALL | {"id": "call_2", "function": {"name": "choose", "arguments": ""}}
    turns = [
        HI,
        {"role": "assistant", "content": "", "reasoning_content": "Think.", "tool_calls": [CALL]},
        {"role": "tool", "tool_call_id": "call_1", "content": ""},
        {"role": "assistant", "content": None, "tool_calls": [nothing], "provider_specific_fields": {"refusal": None}},
        {"role": "tool", "tool_call_id": "call_2", "content": "done", "cache_control": {"type": "ephemeral"}},
    ]
    body = {"messages": turns, "tools": [openai.TOOL], "tool_choice": "auto", "max_tokens": FEW, "stream": True}
    events = server.events(openai.CHAT, body | {"stream_options": {"include_usage": True}})
    need(events[-1] == "[DONE]", "the stream does not end with [DONE]")
    need(any(event["choices"] for event in events[:-1]), "no chunk has a choice")


@case("agents", "a tool's schema with annotations of all kinds")
def annotated(server: Server) -> None:
    options = {"type": "object", "propertyNames": {"type": "string"}, "additionalProperties": {}}
    properties = openai.SCHEMA["properties"] | {
        "path": {"type": "string", "format": "path", "title": "Path", "default": "", "examples": ["a"]},
        "timeout": {"type": "integer", "exclusiveMinimum": 0, "maximum": 9007199254740991},
        "options": options,
    }
    schema = openai.SCHEMA | {"$schema": "https://json-schema.org/draft/2020-12/schema", "properties": properties}
    tool = {"type": "function", "function": {"name": "choose", "parameters": schema}}
    need(server.post(openai.CHAT, {"messages": [HI], "tools": [tool], "max_tokens": FEW})["choices"], "no answer")
