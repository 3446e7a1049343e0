"""Bodies of Ollama's API -> chat and completion requests."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from typing import Any

from lmkit.serve.ollama.protocol import NAMES, ChatBody, GenerateBody, Message, Options
from lmkit.serve.protocol import ChatCompletionRequest, CompletionRequest, Extensions
from lmkit.serve.translated import chat_request, renamed
from lmkit.strict import validate

SAME = ("temperature", "top_k", "top_p", "min_p", "seed", "stop", "presence_penalty", "frequency_penalty")


def chat_of(body: ChatBody) -> ChatCompletionRequest:
    """The chat request for a body. Raises RequestError."""
    return _chat(body, _messages(body.messages), tools=[tool.model_dump() for tool in body.tools or ()] or None)


def chat_of_prompt(body: GenerateBody) -> ChatCompletionRequest:
    """The chat that the model's template makes of a prompt. Raises RequestError."""
    system = [Message(role="system", content=body.system)] if body.system else []
    prompt = Message(role="user", content=body.prompt or "", images=body.images)
    return _chat(body, _messages([*system, prompt]))


def completion_of(body: GenerateBody) -> CompletionRequest:
    """The request for a prompt that no template changes. Raises RequestError."""
    fields = _fields(body) | {
        "prompt": body.prompt or "",
        "suffix": body.suffix,
        "logprobs": (body.top_logprobs or 0) if body.logprobs else None,
        "prompt_start_ids": body.context or None,
    }
    fields.setdefault("max_tokens", -1)
    with renamed(NAMES):
        asked = validate({name: value for name, value in fields.items() if value is not None}, CompletionRequest)
    extensions = {name: getattr(body, name) for name in Extensions.model_fields}
    return asked.model_copy(update={name: value for name, value in extensions.items() if value is not None})


def image_url(data: str) -> str:
    """The data: URL of an image in base64. Its bytes say of which kind it is, whatever the URL says."""
    return data if data.startswith("data:") else f"data:image/png;base64,{data}"


def _chat(body: ChatBody | GenerateBody, messages: list[dict[str, Any]], **fields: Any) -> ChatCompletionRequest:
    thinks = body.think
    fields |= {
        "messages": messages,
        "logprobs": body.logprobs,
        "top_logprobs": body.top_logprobs,
        # a template without such a switch does not think
        "enable_thinking": False if thinks is False else None,
        "reasoning_effort": "medium" if thinks is True else thinks or None,
    }
    return chat_request(body, _fields(body) | fields, NAMES)


def _fields(body: ChatBody | GenerateBody) -> dict[str, Any]:
    options = body.options or Options()
    fields: dict[str, Any] = {name: getattr(options, name) for name in SAME}
    if limits := [limit for limit in (options.num_predict, body.num_predict) if limit is not None]:
        fields["max_tokens"] = min(limits, key=lambda limit: math.inf if limit < 0 else limit)
    if body.format == "json":
        fields["response_format"] = {"type": "json_object"}
    elif body.format:
        fields["response_format"] = {"type": "json_schema", "json_schema": {"name": "format", "schema": body.format}}
    return fields | {
        "model": body.model,
        "stream": body.stream is not False,
        "repetition_penalty": options.repeat_penalty,
    }


def _messages(messages: Sequence[Message]) -> list[dict[str, Any]]:
    """Messages of a chat. Calls and their results have ids there, which belong together by name and order here."""
    found: list[dict[str, Any]] = []
    open_calls: list[tuple[str, str]] = []  # ids and names of calls without a result
    num_calls = 0
    for message in messages:
        told: dict[str, Any] = {"role": message.role, "content": _content(message)}
        if message.thinking and message.role == "assistant":
            told["reasoning"] = message.thinking
        if message.name is not None:
            told["name"] = message.name
        calls = []
        for call in message.tool_calls or ():
            id, num_calls = call.id or f"call{num_calls:05}", num_calls + 1
            open_calls.append((id, call.function.name))
            arguments = json.dumps(call.function.arguments, ensure_ascii=False)
            calls.append({"id": id, "function": {"name": call.function.name, "arguments": arguments}})
        if calls:
            told["tool_calls"] = calls
        if message.role == "tool":
            told |= _answered(message, open_calls)
        found.append(told)
    return found


def _answered(result: Message, open_calls: list[tuple[str, str]]) -> dict[str, Any]:
    """The fields that say which call a result answers, which is open no more."""
    name = result.tool_name or result.name
    ours = [call for call in open_calls if result.tool_call_id in (None, call[0]) and name in (None, call[1])]
    call = (ours or open_calls or [(result.tool_call_id or "", name or "")])[0]
    if call in open_calls:
        open_calls.remove(call)
    fields = {"tool_call_id": result.tool_call_id or call[0], "name": name or call[1]}
    return {key: value for key, value in fields.items() if value}


def _content(message: Message) -> str | list[dict[str, Any]]:
    text = message.content or ""
    if not message.images:
        return text
    images = [{"type": "image_url", "image_url": {"url": image_url(data)}} for data in message.images]
    return [*images, *([{"type": "text", "text": text}] if text else [])]
