"""Chat templates: Jinja code of a checkpoint, rendered in a process of its own (`template_process`)."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

from lmkit.errors import CheckpointError, ConfigError, RequestError
from lmkit.text.sandbox import Sandbox

MAX_TEMPLATE_CHARS = 1 << 20
CPU_SECONDS = 2.0  # of one rendering
MEMORY = 512 << 20  # of the process, in bytes beyond what it has when it starts
NAMED_TOKENS = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")
# A model whose template has no such switch has one way to answer, and neither value changes it.
THINKING_SWITCHES = frozenset({"enable_thinking", "thinking"})
_GIVEN = frozenset({"messages", "add_generation_prompt", "tools", "documents", *NAMED_TOKENS})


def given_template(given: str) -> str:
    """The text of a template that a user gives: a file, or the text itself. Raises ConfigError."""
    if os.path.exists(given):
        try:
            return Path(given).read_text(encoding="utf-8")
        except (OSError, ValueError) as error:
            raise ConfigError(f"chat_template {given}: cannot read: {error}") from None
    if "{{" in given or "{%" in given:
        return given
    raise ConfigError(f"chat_template {given[:64]!r}: there is no such file, and a template has {{{{ or {{%")


class TemplateProcess(Sandbox):
    """The process that renders, for all templates."""

    def __init__(self, cpu_seconds: float = CPU_SECONDS, memory: int = MEMORY) -> None:
        super().__init__("template_process.py", cpu_seconds, memory)

    def ask(self, source: str, arguments: Mapping[str, Any] | None) -> tuple[str, Any]:  # type: ignore[override]
        """The reply of `template_process.answer`, or that of `Sandbox.ask`.

        Raises RequestError for arguments that JSON cannot hold.
        """
        try:
            return super().ask(source, arguments)
        except (UnicodeEncodeError, TypeError):
            raise RequestError("invalid_request", "the messages are not valid Unicode text", "messages") from None


SHARED = TemplateProcess()


class ChatTemplate:
    """A checkpoint's Jinja chat template."""

    def __init__(
        self, source: str, named_tokens: Mapping[str, str] | None = None, process: TemplateProcess = SHARED
    ) -> None:
        """Raises CheckpointError if `source` is too long. Its errors show when it is first used; see `parameters`."""
        if len(source) > MAX_TEMPLATE_CHARS:
            raise CheckpointError(f"chat template: {len(source)} characters, limit {MAX_TEMPLATE_CHARS}")
        self.source, self._named, self._process = source, dict(named_tokens or {}), process

    @property
    def takes_tools(self) -> bool:
        """Whether the template writes the tools of a request. Raises CheckpointError if it does not compile."""
        return "tools" in self._variables

    @property
    def parameters(self) -> frozenset[str]:
        """The variables that a request may set. Raises CheckpointError if the template does not compile."""
        return self._variables - _GIVEN

    @cached_property
    def _variables(self) -> frozenset[str]:
        kind, value = self._process.ask(self.source, None)
        if kind != "variables":
            raise CheckpointError(f"chat template: does not compile: {value or 'it needs too much time or memory'}")
        return frozenset(value)

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        add_generation_prompt: bool = True,
        variables: Mapping[str, Any] | None = None,
        tools: Sequence[Mapping[str, Any]] = (),
    ) -> str:
        """The conversation as one text. Raises RequestError if the template refuses the messages.

        Arguments of calls in the messages are objects.
        A variable that the template does not have is refused, unless its value asks for nothing.
        """
        variables = self._known(variables) if variables else {}
        given: dict[str, Any] = {"messages": messages, "add_generation_prompt": add_generation_prompt}
        if tools:
            given["tools"] = tools
        kind, value = self._process.ask(self.source, self._named | variables | given)
        has_calls = any(message.get("tool_calls") for message in messages)
        for other in (_with_text_arguments, _with_text) if has_calls else ():
            if kind == "failed":
                given["messages"] = list(map(other, messages))
                kind, value = self._process.ask(self.source, self._named | variables | given)
        if kind != "text":
            raise RequestError("invalid_request", _REFUSALS[kind].format(value), "messages")
        return str(value)

    def _known(self, variables: Mapping[str, Any]) -> dict[str, Any]:
        known = {name: value for name, value in variables.items()
                 if name in self.parameters or not (value is None or name in THINKING_SWITCHES)}  # fmt: skip
        if unknown := sorted(known.keys() - self.parameters):
            names = ", ".join(sorted(self.parameters)) or "none"
            message = f"{unknown[0][:64]!r} is not a variable of this model's chat template (it has: {names})"
            raise RequestError("unknown_parameter", message, "chat_template_kwargs")
        return known


def _with_text(message: Mapping[str, Any]) -> dict[str, Any]:
    """Qwen3's first template takes no null beside calls, which others look for."""
    return {**message, "content": message.get("content") or ""}


def _with_text_arguments(message: Mapping[str, Any]) -> dict[str, Any]:
    """DeepSeek's templates take JSON texts."""
    calls = []
    for call in message.get("tool_calls") or ():
        function = call["function"]
        text = json.dumps(function["arguments"], ensure_ascii=False)
        calls.append(call | {"function": function | {"arguments": text}})
    return {**message, "tool_calls": calls} if calls else dict(message)


_REFUSALS = {  # by the kind of a reply
    "refused": "chat template: {}",
    "failed": "the model's chat template does not accept these messages",
    "limit": "chat template: rendering these messages takes too much time or memory",
    "invalid": "the model's chat template does not compile: {}",
}
