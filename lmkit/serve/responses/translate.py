"""A body of the Responses API -> a chat request."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from lmkit.serve.protocol import ChatCompletionRequest
from lmkit.serve.responses.custom import arguments_of
from lmkit.serve.responses.protocol import (
    NAMES,
    CustomCall,
    CustomCallOutput,
    FunctionCall,
    FunctionCallOutput,
    ImagePart,
    Item,
    Message,
    Prompt,
    ReasoningItem,
    ResponsesRequest,
    TextPart,
)
from lmkit.serve.responses.tool_protocol import AllowedTools, NamedTool
from lmkit.serve.responses.tools import function_of, presented, shown_name
from lmkit.serve.translated import Turns, chat_request, joined, opened


def to_chat(body: Prompt, items: Sequence[Item]) -> ChatCompletionRequest:
    """The chat request for a body whose conversation has these items. Raises RequestError."""
    fields: dict[str, Any] = {
        "model": body.model,
        "messages": _messages(body.instructions, items),
        "tools": list(map(function_of, presented(body.tools))) or None,
        "tool_choice": _tool_choice(body.tool_choice),
        "parallel_tool_calls": body.parallel_tool_calls,
        "response_format": _response_format(body.text.format if body.text else None),
        "reasoning_effort": body.reasoning.effort if body.reasoning else None,
        "verbosity": body.text.verbosity if body.text else None,
    }
    if isinstance(body, ResponsesRequest):
        fields |= {
            "stream": body.stream,
            "max_tokens": body.max_output_tokens,
            "temperature": body.temperature,
            "top_p": body.top_p,
            "logprobs": "message.output_text.logprobs" in (body.include or ()) or None,
            "top_logprobs": body.top_logprobs,
            "user": body.user or body.safety_identifier,
            "timings_per_token": body.timings_per_token,
            "return_progress": body.return_progress,
        }
    return chat_request(body, fields, NAMES)


def _messages(instructions: str | None, items: Iterable[Item]) -> list[dict[str, Any]]:
    turns = Turns()
    if instructions is not None:
        turns.add("system", instructions)
    for item in items:
        _ADD[type(item)](turns, item)
    return turns.finished()


def _message(turns: Turns, item: Message) -> None:
    texts = [part for part in item.content if isinstance(part, TextPart)]
    if item.role == "assistant":
        turns.text(_text(texts))
    elif len(texts) == len(item.content):
        turns.add(item.role, _text(texts))
    else:
        turns.add(item.role, list(map(_part, item.content)))


def _part(part: TextPart | ImagePart) -> dict[str, Any]:
    if isinstance(part, TextPart):
        return {"type": "text", "text": part.text}
    return {"type": "image_url", "image_url": {"url": part.image_url, "detail": part.detail}}


def _call(turns: Turns, item: FunctionCall) -> None:
    turns.call(item.call_id, shown_name(item.name, item.namespace), item.arguments)


def _custom_call(turns: Turns, item: CustomCall) -> None:
    turns.call(item.call_id, item.name, arguments_of(item.input))


def _output(turns: Turns, item: FunctionCallOutput | CustomCallOutput) -> None:
    texts = [part for part in item.output if isinstance(part, TextPart)]
    content = _text(texts) if len(texts) == len(item.output) else list(map(_part, item.output))
    turns.add("tool", content, tool_call_id=item.call_id)


def _reasoning(turns: Turns, item: ReasoningItem) -> None:
    if text := _text(item.content or item.summary) or opened(item.encrypted_content or "", "encrypted_content"):
        turns.reasoning(text)


_ADD: Mapping[type, Callable[[Turns, Any], None]] = {
    Message: _message,
    FunctionCall: _call,
    FunctionCallOutput: _output,
    CustomCall: _custom_call,
    CustomCallOutput: _output,
    ReasoningItem: _reasoning,
}


def _text(parts: Iterable[TextPart]) -> str:
    return joined(part.text for part in parts)


def _tool_choice(choice: str | NamedTool | AllowedTools | None) -> Any:
    if isinstance(choice, NamedTool):
        return _named(choice)
    if isinstance(choice, AllowedTools):
        tools = list(map(_named, choice.tools))
        return {"type": "allowed_tools", "allowed_tools": {"mode": choice.mode, "tools": tools}}
    return choice


def _named(tool: NamedTool) -> dict[str, Any]:
    return {"type": "function", "function": {"name": shown_name(tool.name, tool.namespace)}}


def _response_format(form: dict[str, Any] | None) -> dict[str, Any] | None:
    """In a chat the fields of a schema stand one level deeper."""
    if form is None or form.get("type") != "json_schema":
        return form
    return {"type": "json_schema", "json_schema": {name: value for name, value in form.items() if name != "type"}}
