"""A body of the Messages API -> a chat request."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from lmkit.errors import RequestError
from lmkit.serve.messages.protocol import (
    NAMES,
    Image,
    MessagesRequest,
    Prompt,
    RedactedThinking,
    Text,
    Thinking,
    Tool,
    ToolChoice,
    ToolResult,
    ToolUse,
)
from lmkit.serve.protocol import ChatCompletionRequest
from lmkit.serve.translated import Turns, chat_request, joined, opened

ERROR = "Error: "  # before the result of a tool that failed: chats have no field for it


def to_chat(body: Prompt) -> ChatCompletionRequest:
    """The chat request for a body. Raises RequestError."""
    choice = body.tool_choice
    single = choice is not None and choice.disable_parallel_tool_use
    output, thinking = body.output_config, body.thinking
    form = output.format if output and output.format else body.output_format
    if body.output_format not in (None, form):
        raise RequestError(
            "invalid_request", "output_format differs from output_config.format; send one", "output_format"
        )
    fields: dict[str, Any] = {
        "model": body.model,
        "messages": _messages(body),
        "tools": [_tool(tool) for tool in body.tools or ()] or None,
        "tool_choice": _tool_choice(choice) if choice else None,
        "parallel_tool_calls": False if single else None,
        "response_format": _response_format(form) if form else None,
        "reasoning_effort": output.effort if output else None,
        "thinking_token_budget": thinking.budget_tokens if thinking else None,
    }
    if isinstance(body, MessagesRequest):
        fields |= {
            "stream": body.stream,
            "max_tokens": body.max_tokens,
            "temperature": body.temperature,
            "top_p": body.top_p,
            "stop": body.stop_sequences,
            "user": body.metadata.user_id if body.metadata else None,
        }
    if "enable_thinking" not in (body.chat_template_kwargs or ()):  # the API's default is not to think
        fields["enable_thinking"] = thinking is not None and thinking.type != "disabled"
    return chat_request(body, fields, NAMES)


def _messages(body: Prompt) -> list[dict[str, Any]]:
    turns = Turns()
    if body.system is not None:
        turns.add("system", _text(body.system))
    for message in body.messages:
        if message.role == "assistant":
            for block in message.content:
                _ADD[type(block)](turns, block)
        else:
            _said(turns, message.role, message.content)
    return turns.finished()


def _said(turns: Turns, role: str, blocks: Iterable[Any]) -> None:
    """Results of tools are messages of their own; the texts and images between them are one message each."""
    parts: list[dict[str, Any]] = []
    for block in [*blocks, None]:
        if isinstance(block, Text | Image):
            parts.append(_part(block))
            continue
        if parts:
            turns.add(role, parts)
            parts = []
        if isinstance(block, ToolResult):
            turns.add("tool", _result(block), tool_call_id=block.tool_use_id)


def _result(block: ToolResult) -> str | list[dict[str, Any]]:
    error = ERROR if block.is_error else ""
    if not any(isinstance(part, Image) for part in block.content):
        return error + _text(part for part in block.content if isinstance(part, Text))
    marks = [{"type": "text", "text": error}] * bool(error)
    return marks + list(map(_part, block.content))


def _part(block: Text | Image) -> dict[str, Any]:
    if isinstance(block, Text):
        return {"type": "text", "text": block.text}
    return {"type": "image_url", "image_url": {"url": block.url}}


def _redacted(turns: Turns, block: RedactedThinking) -> None:
    if text := opened(block.data, "redacted_thinking"):
        turns.reasoning(text)


def _thinking(turns: Turns, block: Thinking) -> None:
    if text := block.thinking or opened(block.signature, "signature"):
        turns.reasoning(text)


def _tool_use(turns: Turns, block: ToolUse) -> None:
    turns.call(block.id, block.name, json.dumps(block.input, ensure_ascii=False))


_ADD: Mapping[type, Callable[[Turns, Any], None]] = {
    Text: lambda turns, block: turns.text(block.text),
    Thinking: _thinking,
    RedactedThinking: _redacted,
    ToolUse: _tool_use,
}


def _text(blocks: Iterable[Text]) -> str:
    return joined(block.text for block in blocks)


def _tool(tool: Tool) -> dict[str, Any]:
    about = {"description": tool.description, "strict": tool.strict}
    function = {"name": tool.name, "parameters": tool.input_schema}
    return {"type": "function", "function": function | {name: v for name, v in about.items() if v is not None}}


def _tool_choice(choice: ToolChoice) -> Any:
    if choice.type == "tool":
        return {"type": "function", "function": {"name": choice.name}}
    return {"any": "required"}.get(choice.type, choice.type)


def _response_format(form: dict[str, Any]) -> dict[str, Any]:
    """{"type": "json_schema", "schema": ...} -> OpenAI's."""
    if form.get("type") != "json_schema":
        return form
    return {"type": "json_schema", "json_schema": {"name": "answer", **{k: v for k, v in form.items() if k != "type"}}}
