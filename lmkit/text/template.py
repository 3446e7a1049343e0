"""Chat templates: Jinja code of a checkpoint, rendered in a process of its own (`template_process`)."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from functools import cached_property
from typing import Any

from lmkit.errors import CheckpointError, RequestError
from lmkit.text.sandbox import Sandbox
from lmkit.text.special_tokens import NAMED_TOKENS

MAX_TEMPLATE_CHARS = 1 << 20
CPU_SECONDS = 2.0  # of one rendering
MEMORY = 512 << 20  # of the process, in bytes beyond what it has when it starts
# A model whose template has no such switch has one way to answer, and neither value changes it.
THINKING_SWITCHES = frozenset({"enable_thinking", "thinking"})
_GIVEN = frozenset({"messages", "add_generation_prompt", "tools", "documents", *NAMED_TOKENS})


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
    """A checkpoint's Jinja chat template, perhaps with another one for requests with tools."""

    def __init__(
        self,
        source: str,
        named_tokens: Mapping[str, str] | None = None,
        process: TemplateProcess = SHARED,
        for_tools: str | None = None,
    ) -> None:
        """Raises CheckpointError if a text is too long. Its errors show when it is first used; see `parameters`."""
        for text in (source, for_tools or ""):
            if len(text) > MAX_TEMPLATE_CHARS:
                raise CheckpointError(f"chat template: {len(text)} characters, limit {MAX_TEMPLATE_CHARS}")
        self.source, self._named, self._process = source, dict(named_tokens or {}), process
        self.tool_source = source if for_tools is None else for_tools  # what a request with tools is rendered by

    @property
    def takes_tools(self) -> bool:
        """Whether the template writes the tools of a request. Raises CheckpointError if it does not compile."""
        return "tools" in self._variables[self.tool_source]

    def writes_calls(self, with_tools: bool) -> bool:
        """Whether the template, or that for requests with tools, writes calls in the messages."""
        return "tool_calls" in (self.tool_source if with_tools else self.source)

    def writes_results(self, with_tools: bool) -> bool:
        """Whether it has a place for messages of a tool: it names the role, or takes tools and writes every role."""
        source = self.tool_source if with_tools else self.source
        return re.search(r"""["']tool["']""", source) is not None or "tools" in self._variables[source]

    @property
    def parameters(self) -> frozenset[str]:
        """The variables that a request may set. Raises CheckpointError if a template does not compile."""
        return frozenset().union(*self._variables.values()) - _GIVEN - self._named.keys()

    @cached_property
    def _variables(self) -> dict[str, frozenset[str]]:
        """The variables of each template, by its source."""
        found = {}
        for source in (self.source, self.tool_source):
            kind, value = self._process.ask(source, None)
            if kind != "variables":
                reason = value or "it needs too much time or memory"
                raise CheckpointError(f"chat template: does not compile: {reason}")
            found[source] = frozenset(value)
        return found

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        add_generation_prompt: bool = True,
        variables: Mapping[str, Any] | None = None,
        tools: Sequence[Mapping[str, Any]] = (),
    ) -> str:
        """The conversation as one text. Raises RequestError if the template refuses the messages.

        Arguments of calls in the messages are objects. As in transformers, a field without a value (None) is left out
        of its message, and `tools` and `documents` are None without any.
        A template that does not know the role `developer` reads `system`.
        Where the template refuses messages of the system in the middle, they are texts of the user.
        A variable that the template does not have is refused, unless its value asks for nothing.
        """
        given = self._named | (self._known(variables) if variables else {})
        given |= {"add_generation_prompt": add_generation_prompt, "tools": list(tools) or None, "documents": None}
        source = self.tool_source if tools else self.source
        if "developer" not in source:  # it would be left out, or refused
            messages = [{**one, "role": "system"} if one["role"] == "developer" else one for one in messages]
        kind, value = self._process.ask(source, given | {"messages": list(map(_without_none, messages))})
        reason = value
        for other in _OTHER_FORMS if _is_incomplete(messages) else ():
            if kind != "failed":
                break
            kind, value = self._process.ask(source, given | {"messages": list(map(other, messages))})
        if kind == "refused" and (others := _with_user_notes(messages)) != list(messages):
            return self.render(others, add_generation_prompt=add_generation_prompt, variables=variables, tools=tools)
        if kind != "text":
            raise RequestError(
                "invalid_request", _REFUSALS[kind].format(reason if kind == "failed" else value), "messages"
            )
        return str(value)

    def _known(self, variables: Mapping[str, Any]) -> dict[str, Any]:
        """The variables that the template has. A switch for thinking is set by its other name, too."""
        asked = [value for name, value in variables.items() if name in THINKING_SWITCHES and value is not None]
        known = dict.fromkeys(THINKING_SWITCHES & self.parameters, asked[0]) if asked else {}
        known |= {name: value for name, value in variables.items()
                  if name in self.parameters or not (value is None or name in THINKING_SWITCHES)}  # fmt: skip
        if unknown := sorted(known.keys() - self.parameters):
            names = ", ".join(sorted(self.parameters)) or "none"
            message = f"{unknown[0][:64]!r} is not a variable of this model's chat template (it has: {names})"
            raise RequestError("unknown_parameter", message, "chat_template_kwargs")
        return known


def _without_none(message: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in message.items() if value is not None}


def _is_incomplete(messages: Sequence[Mapping[str, Any]]) -> bool:
    """Whether messages have what templates read in different forms: calls, or no content."""
    return any(message.get("tool_calls") or message.get("content") is None for message in messages)


def _with_user_notes(messages: Sequence[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    """Messages whose later ones of the system are texts of the user. Two of the user in a row become one."""
    others: list[Mapping[str, Any]] = []
    for message in messages:
        if others and message["role"] == "system":
            message = {**message, "role": "user"}
        before = others[-1] if others else {}
        earlier, later = before.get("content"), message.get("content")
        both_users = message["role"] == before.get("role") == "user"
        if both_users and isinstance(earlier, str) and isinstance(later, str):
            others[-1] = {**before, "content": f"{earlier}\n\n{later}"}
        else:
            others.append(message)
    return others


def _with_text(message: Mapping[str, Any]) -> dict[str, Any]:
    """Qwen3's first template takes nothing but a text beside calls."""
    return {**message, "content": message.get("content") or ""}


def _with_text_arguments(message: Mapping[str, Any]) -> dict[str, Any]:
    """DeepSeek's templates take JSON texts, and look for null beside calls."""
    calls = []
    for call in message.get("tool_calls") or ():
        function = call["function"]
        text = json.dumps(function["arguments"], ensure_ascii=False)
        calls.append(call | {"function": function | {"arguments": text}})
    changed = {"tool_calls": calls, "content": message.get("content") or None} if calls else {}
    return _without_none(message) | changed


# Messages for templates that fail on those of transformers, in the order in which they are tried.
_OTHER_FORMS = (_with_text, _with_text_arguments)

_REFUSALS = {  # by the kind of a reply
    "refused": "chat template: {}",
    "failed": "the model's chat template does not accept these messages{}",
    "limit": "chat template: rendering these messages takes too much time or memory",
    "invalid": "the model's chat template does not compile: {}",
}
