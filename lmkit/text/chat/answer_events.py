"""Outputs of one choice -> events: reasoning, content and calls of tools. Every API that answers chats reads these."""

from __future__ import annotations

import random
import secrets
import string
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from lmkit.text.dialects import Event, Parser


class Output(Protocol):
    """What one step of an engine adds to an answer."""

    @property
    def text(self) -> str: ...
    @property
    def token_ids(self) -> Sequence[int]: ...
    @property
    def finish_reason(self) -> str | None: ...


_ALPHABET = string.ascii_letters + string.digits


@dataclass
class Kept:
    """An answer as its client gets it: the events, and the ids of the calls."""

    events: list[Event] = field(default_factory=list)
    ids: list[str] = field(default_factory=list)

    def message(self) -> dict[str, Any]:
        """The assistant's message, as a client sends it back."""
        ids = iter(self.ids)
        return _message(self.events, lambda name: next(ids, ""))


class AnswerEvents:
    """One choice on its way. `take` gets its outputs in order."""

    def __init__(
        self,
        parser: Parser | None,
        *,
        show_reasoning: bool = True,
        show_content: bool = True,
        decode: Callable[[Sequence[int]], str] = str,
        end: str = "",
        num_id_chars: int = 24,
        id_form: str = "",
        num_earlier: int = 0,
    ) -> None:
        """`end` is the mark that ends the reasoning, "" if there is none; `decode` shows it in the text of tokens.

        An answer that must be a call shows no content: what max_tokens left of a call is none.
        `id_form`: see `Dialect`. `num_earlier` calls stand in the conversation before this answer.
        """
        self._parser = parser
        self._hidden = {kind for kind, shown in (("reasoning", show_reasoning), ("content", show_content)) if not shown}
        self._decode, self._end, self._num_id_chars = decode, end, num_id_chars
        self._tail: list[int] = []  # the last tokens: the mark may have begun in them
        self._id_form, self._num_calls = id_form, num_earlier
        self._num_before_end, self._has_ended = 0, not end
        self._has_reasoned = False
        self.random: random.Random = secrets.SystemRandom()  # of ids
        self.kept: Kept | None = None  # what the client gets of it, if somebody wants to know

    def take(self, output: Output) -> list[Event]:
        events = self._taken(output)
        if self.kept is not None:
            self.kept.events += events
        return events

    def _taken(self, output: Output) -> list[Event]:
        if self._parser is None:
            return [Event("content", output.text)] if output.text else []
        events = self._parser.feed(output.text)
        if output.finish_reason is not None:
            events += self._parser.end()
        self._count(output.token_ids, events)
        return [event for event in events if event.kind not in self._hidden]

    @property
    def reasoning_tokens(self) -> int:
        """The number of tokens up to the end of the reasoning."""
        return self._num_before_end if self._has_reasoned else 0

    def _count(self, token_ids: Sequence[int], events: Sequence[Event]) -> None:
        """Count tokens up to the one that completes the mark, however many an output has."""
        self._has_reasoned = self._has_reasoned or any(event.kind == "reasoning" for event in events)
        if self._has_ended:
            return
        first, ids = len(self._tail), [*self._tail, *token_ids]
        self._tail = ids[-len(self._end) :]  # a token has a character or more
        if self._end in self._decode(ids):
            self._has_ended = True
            ids = next(ids[:end] for end in range(first + 1, len(ids) + 1) if self._end in self._decode(ids[:end]))
        self._num_before_end += len(ids) - first

    def finish_reason(self, output: Output) -> str | None:
        """That of the output, with OpenAI's name for an end after calls."""
        called = self._parser is not None and self._parser.num_calls and output.finish_reason == "stop"
        return "tool_calls" if called else output.finish_reason

    def call_id(self, name: str) -> str:
        """A new id for a call of a function."""
        prefix = "call_" if self._num_id_chars > len("call_") + 8 else ""
        made = self._id_form.format(name=name, number=self._num_calls) or prefix + "".join(
            self.random.choice(_ALPHABET) for _ in range(self._num_id_chars)
        )
        self._num_calls += 1
        if self.kept is not None:
            self.kept.ids.append(made)
        return made


class MessageDeltas:
    """Events -> deltas of OpenAI's chunks."""

    def __init__(self, events: AnswerEvents) -> None:
        self._events, self._num_calls = events, 0

    def of(self, event: Event) -> dict[str, Any]:
        match event.kind:
            case "content":
                return {"content": event.text}
            case "reasoning":
                return {"reasoning": event.text, "reasoning_content": event.text}
            case "call":
                self._num_calls += 1
                function = {"name": event.text, "arguments": ""}
                about = {"id": self._events.call_id(event.text), "type": "function", "function": function}
                return {"tool_calls": [{"index": self._num_calls - 1} | about]}
            case "arguments":
                call = {"index": self._num_calls - 1, "function": {"arguments": event.text}}
                return {"tool_calls": [call]}


def message(events: Iterable[Event], answer: AnswerEvents) -> dict[str, Any]:
    """The assistant's message, whole."""
    return _message(events, answer.call_id)


def _message(events: Iterable[Event], call_id: Callable[[str], str]) -> dict[str, Any]:
    texts: dict[str, list[str]] = {"content": [], "reasoning": []}
    calls: list[tuple[str, list[str]]] = []
    for kind, text in events:
        if kind == "call":
            calls.append((text, []))
        else:
            (calls[-1][1] if kind == "arguments" else texts[kind]).append(text)
    content, reasoning = "".join(texts["content"]), "".join(texts["reasoning"])
    whole: dict[str, Any] = {"role": "assistant", "content": content, "refusal": None}
    whole |= dict.fromkeys(("reasoning", "reasoning_content"), reasoning or None)
    if calls:
        whole["content"] = content or None
        whole["tool_calls"] = [
            {"id": call_id(name), "type": "function", "function": {"name": name, "arguments": "".join(parts)}}
            for name, parts in calls
        ]
    return whole
