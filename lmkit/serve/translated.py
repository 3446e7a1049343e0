"""What the APIs beside chat completions share: their requests become chat requests, and refusals speak of their fields.

An assistant's turn is one message of a chat. In these APIs it is several items or blocks: reasoning, text, calls.
"""

from __future__ import annotations

import base64
import binascii
import re
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from starlette.requests import Request as HttpRequest

from lmkit.errors import RequestError
from lmkit.hints import ignore
from lmkit.serve.auth import owner
from lmkit.serve.choose import choose
from lmkit.serve.constraint import checks_a_grammar, constraint
from lmkit.serve.images import ImageSources
from lmkit.serve.protocol import ChatCompletionRequest, ChatExtensions
from lmkit.serve.to_request import chat_prompt, prompt_room, sampling_params, with_numbers
from lmkit.strict import validate
from lmkit.turbo.request import check_head
from lmkit.turbo.transport.prompt_images import read_images, with_images


def chat_request(body: ChatExtensions, fields: Mapping[str, Any], names: Mapping[str, str]) -> ChatCompletionRequest:
    """A chat request of these fields, where None is "not given", and of the body's extensions.

    Raises RequestError, which has the names of the body's API for those of the chat.
    """
    with renamed(names):
        chat = validate({name: value for name, value in fields.items() if value is not None}, ChatCompletionRequest)
    extensions = {name: getattr(body, name) for name in ChatExtensions.model_fields}
    return chat.model_copy(update={name: value for name, value in extensions.items() if value is not None})


async def num_prompt_tokens(http: HttpRequest, chat: ChatCompletionRequest, names: Mapping[str, str]) -> int:
    """The length of a chat's prompt. Raises RequestError."""
    server = await choose(http, chat.model)
    check_head(server.info.has_head)
    sources = ImageSources(server.config)
    await sources.fetch(chat.images)

    def counted() -> int:
        with renamed(names):
            numbered = with_numbers(chat, server.config.max_logprobs, server.info.vocab_size)
            sampling_params(numbered, server.info)  # this and the next: as an answer would refuse them
            constraint(numbered, server.tokenizer, server.info.vocab_size)
            images = read_images(chat.images, server.info, sources.load)
            most = prompt_room(chat, server.info, 1)
            is_cut = most is not None
            style = server.style
            prompt = chat_prompt(chat, server.tokenizer, server.info, None, style, images, may_be_long=is_cut)
            number = len(with_images(prompt.ids, images, server.info)[0])
            return number if most is None else min(number, most)

    guided = owner(http).tenant if checks_a_grammar(chat) else None
    return await server.texts.run(http.receive, chat.num_chars, counted, guided=guided)


@contextmanager
def renamed(names: Mapping[str, str]) -> Iterator[None]:
    """Raises the block's RequestError with `names` for the fields that it speaks of; without any, as it is."""
    try:
        yield
    except RequestError as error:
        if not names:
            raise
        words = re.compile(r"(?<![\w'\"])(" + "|".join(names) + r")\b")
        message = words.sub(lambda match: names[match[1]], error.message)
        raise RequestError(error.code, message, names.get(error.param or "", error.param), **error.details) from None


class Turns:
    """The messages of a chat, from the parts of its turns."""

    def __init__(self) -> None:
        self.messages: list[dict[str, Any]] = []

    def add(self, role: str, content: str | list[dict[str, Any]], **fields: Any) -> None:
        """A message that is not the assistant's: a text, or parts of a chat if it has images."""
        self.messages.append({"role": role, "content": content, **fields})

    def reasoning(self, text: str) -> None:
        self._turn("content", "tool_calls").setdefault("reasoning", []).append(text)

    def text(self, text: str) -> None:
        self._turn("tool_calls").setdefault("content", []).append(text)

    def call(self, id: str, name: str, arguments: str) -> None:
        call = {"id": id, "type": "function", "function": {"name": name, "arguments": arguments}}
        self._turn().setdefault("tool_calls", []).append(call)

    def _turn(self, *later: str) -> dict[str, Any]:
        """The assistant's message at the end, or a new one if that has one of the fields that come later in a turn."""
        last = self.messages[-1] if self.messages else {}
        if last.get("role") != "assistant" or any(name in last for name in later):
            self.messages.append({"role": "assistant"})
        return self.messages[-1]

    def finished(self) -> list[dict[str, Any]]:
        for message in self.messages:
            if message["role"] == "assistant":
                message["content"] = joined(message.get("content", ()))
                if "reasoning" in message:
                    message["reasoning"] = "".join(message["reasoning"])
        return self.messages


def joined(texts: Iterable[str]) -> str:
    """The texts of a message's parts, as chat completions join them."""
    return "\n".join(texts)


# Reasoning that a client carries for the server. It is no secret: the client saw it, or may ask to see it.
_MARK = "lmkit-"


def sealed(text: str) -> str:
    """A text as a client that cannot read it hands it back."""
    return _MARK + base64.b64encode(text.encode()).decode()


def opened(seal: str, param: str) -> str:
    """The text of `sealed`; empty for a hint, as what another server wrote, and only that can read, is one. Raises
    RequestError for a damaged text."""
    try:
        if seal and not seal.startswith(_MARK):
            if ignore(param):
                return ""
            raise ValueError
        return base64.b64decode(seal.removeprefix(_MARK), validate=True).decode()
    except (ValueError, binascii.Error):
        message = f"{param}: another server wrote it, and only that can read it; leave it out"
        raise RequestError("invalid_request", message, param) from None
