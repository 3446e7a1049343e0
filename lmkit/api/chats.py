"""Prompts of messages, and the parts of their answers: with the models, grammars and parsers of the server."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cached_property
from typing import Any

import msgspec

from lmkit.api.generation import GenerationConfig
from lmkit.api.response import Response
from lmkit.strict import validate
from lmkit.text import Tokenizer
from lmkit.text.chat.answer_events import AnswerEvents, MessageDeltas
from lmkit.text.chat.conversation import Chat, TemplateVariables, ToolOptions
from lmkit.text.chat.style import Style, called_tools
from lmkit.text.images import ReadImage
from lmkit.text.videos import ReadVideo
from lmkit.turbo.request import Request
from lmkit.turbo.transport.output import RequestOutput


class ChatOptions(ToolOptions):
    """What a call asks of all its conversations. None means the default."""

    separate_reasoning: bool | None = None  # an answer with tools has its reasoning apart in any case
    chat_template_kwargs: TemplateVariables | None = None


class Reader:
    """Reads the parts of one answer."""

    def __init__(self, events: AnswerEvents) -> None:
        self._events, self._deltas = events, MessageDeltas(events)

    def take(self, part: Response, output: RequestOutput) -> Response:
        """`part`, the response to `output`, with reasoning and calls apart from the text."""
        part.text, part.finish_reason = "", self._events.finish_reason(output)
        for event in self._events.take(output):
            delta = self._deltas.of(event)
            part.text += delta.get("content", "")
            part.reasoning += delta.get("reasoning", "")
            part.tool_calls += delta.get("tool_calls", ())
        return part


class Conversation:
    """One prompt of messages. `text` is what the chat template makes of it."""

    def __init__(self, style: Style, chat: Chat, options: ChatOptions) -> None:
        """Raises RequestError for messages that the template refuses."""
        self._style, self._chat = style, chat
        self._has_parts = bool(chat.tools or options.separate_reasoning)
        self.images = chat.images
        self.text = style.render(chat, dict(options.chat_template_kwargs or {}))

    def completed(self, request: Request, config: GenerationConfig, vocab_size: int) -> Request:
        """The request with the grammar of its calls, and with the marks that a parser must see. Raises RequestError."""
        if not self._has_parts:
            return request
        content, shown = request.params.grammar, self._style.special_ids(bool(called_tools(self._chat)))
        grammar = self._style.grammar(self._chat, content, vocab_size, is_thinking=self._is_thinking)
        if grammar:
            config.check_end_is_free()
        end = self._style.reasoning_end(self._chat)
        params = msgspec.structs.replace(request.params, grammar=grammar, shown_special_ids=shown, reasoning_end=end)
        return msgspec.structs.replace(request, params=params)

    def reader(self) -> Reader | None:
        """A reader of the answer; None if it is one text."""
        return Reader(self._style.answer(self._chat, is_thinking=self._is_thinking)) if self._has_parts else None

    @cached_property
    def _is_thinking(self) -> bool:
        return self._style.is_thinking(self.text)


class Chats:
    """The conversations of one model."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._style = Style(tokenizer)

    def options(self, given: Mapping[str, Any]) -> ChatOptions:
        """Raises RequestError for options that cannot be used, whatever the prompt."""
        options = validate(_plain(given), ChatOptions)
        called_tools(options)
        return options

    def open(self, prompt: str | list[Any], options: ChatOptions) -> Conversation:
        """The conversation of a prompt. Raises RequestError for messages that cannot be used."""
        messages = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else _plain(prompt)
        given = {name: getattr(options, name) for name in ToolOptions.model_fields}
        return Conversation(self._style, validate({"messages": messages, **given}, Chat), options)


def _plain(value: Any) -> Any:
    """Objects and lists of any kind as those that JSON has."""
    if isinstance(value, Mapping):
        return {name: _plain(item) for name, item in value.items()}
    is_list = isinstance(value, list | tuple) and not isinstance(value, ReadImage | ReadVideo)
    return list(map(_plain, value)) if is_list else value
