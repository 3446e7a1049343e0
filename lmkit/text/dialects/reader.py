"""Reads a text that comes in pieces, and emits what it finds as events. What may stand in it the parser knows."""

from __future__ import annotations

import re
from collections.abc import Callable, Generator, Iterable, Sequence
from typing import Any, Literal, NamedTuple

from lmkit.text.dialects.bare import Form
from lmkit.text.dialects.json_end import JsonEnd

MAX_PIECE = 4096
MAX_FORM = 1024  # characters of a header or tail: a mark that is followed by more is text
Kind = Literal["reasoning", "content", "call", "arguments"]
Steps = Generator[None, None, Any]  # a part of the parser; it yields to ask for more text


class Event(NamedTuple):
    """`text` is a part of the reasoning, the content or the last call's arguments, or the name that a call begins with.

    A call's arguments are JSON.
    """

    kind: Kind
    text: str


def collected(events: Iterable[Event]) -> list[Event]:
    """The events with neighbours of the same kind joined, except that each call is one."""
    joined: list[tuple[Kind, list[str]]] = []
    for kind, text in events:
        if joined and joined[-1][0] == kind != "call":
            joined[-1][1].append(text)
        else:
            joined.append((kind, [text]))
    return [Event(kind, "".join(texts)) for kind, texts in joined]


class Reader:
    """The text that is not read yet, and the events that are not taken yet."""

    def __init__(self) -> None:
        self._text, self.is_last = "", False
        self._events: list[Event] = []
        self._space: list[str] = []  # white space that is shown if text of the same kind follows
        self._is_fresh = False  # after something else than text
        self.num_calls = 0
        self._steps = self.run()
        next(self._steps)

    def run(self) -> Steps:
        """The whole text."""
        raise NotImplementedError

    def feed(self, piece: str) -> list[Event]:
        events: list[Event] = []
        for start in range(0, len(piece), MAX_PIECE):  # what is held back is copied with each piece
            self._text += piece[start : start + MAX_PIECE]
            events += self._advance()
        return events

    def end(self) -> list[Event]:
        self.is_last = True
        return self._advance()

    def _advance(self) -> list[Event]:
        try:
            self._steps.send(None)
        except StopIteration:
            if not self.num_calls:
                self.add("content", "".join(self._space))
            self._steps = _ended()
            next(self._steps)
        events, self._events = self._events, []
        return events

    # ---- reading

    def until(self, marks: Sequence[str], emit: Callable[[str], None]) -> Steps:
        """The first of `marks` in the text, None if there is none. Emits what stands before it."""
        pattern = re.compile("|".join(map(re.escape, marks)) or "(?!)")
        while True:
            if found := pattern.search(self._text):
                emit(self._text[: found.start()])
                self._text = self._text[found.end() :]
                return found[0]
            held = 0 if self.is_last else _begun(self._text, marks)
            cut = len(self._text) - held
            emit(self._text[:cut])
            self._text = self._text[cut:]
            if self.is_last:
                return None
            yield

    def match(self, pattern: str) -> Steps:
        """The match of `pattern` at the front of the text, which is taken away; None if there is none."""
        compiled = re.compile(pattern)
        while True:
            if found := compiled.match(self._text, 0, MAX_FORM):
                self._text = self._text[found.end() :]
                return found
            if self.is_last or len(self._text) >= MAX_FORM:
                return None
            yield

    def form(self, form: Form) -> Steps:
        """As `match`, but it ends as soon as the text can no longer become the form."""
        while True:
            if found := form.whole.match(self._text, 0, MAX_FORM):
                self._text = self._text[found.end() :]
                return found
            if self.is_last or len(self._text) >= MAX_FORM or not form.begun.fullmatch(self._text):
                return None
            yield

    def choose(self, patterns: Sequence[str]) -> Steps:
        """The index of the first pattern that matches at the front of the text, which is taken away; -1 for none."""
        found = yield from self.match("|".join(f"({pattern})" for pattern in patterns))
        return -1 if found is None else found.lastindex - 1

    def json(self, emit: Callable[[str], None]) -> Steps:
        """Whether a JSON value stands at the front of the text. Emits it."""
        scan = JsonEnd()
        while True:
            end = scan.feed(self._text)
            emit(self._text[:end])
            self._text = self._text[end:]
            if scan.is_done or self.is_last:
                return scan.is_done
            yield

    def put_back(self, text: str) -> None:
        """`text` stands before what is not read yet."""
        self._text = text + self._text

    # ---- events

    def add(self, kind: Kind, text: str) -> None:
        if text:
            self._events.append(Event(kind, text))

    def argue(self, text: str) -> None:
        """A part of the arguments of the last call."""
        self.add("arguments", text)

    def begin(self, name: str) -> None:
        """A call of this function begins."""
        self.turn()
        self._events.append(Event("call", name))
        self.num_calls += 1

    def say(self, kind: Kind) -> Callable[[str], None]:
        """Emits text without the white space at its ends."""

        def emit(text: str) -> None:
            body = text.rstrip()
            if self._is_fresh:
                body = body.lstrip()
                text = text.lstrip()
            if body:
                self.add(kind, "".join(self._space) + body)
                self._space.clear()
                self._is_fresh = False
            if not self._is_fresh and (space := text[len(body) :]):
                self._space.append(space)

        return emit

    def turn(self) -> None:
        """Another kind of text follows."""
        self._space.clear()
        self._is_fresh = True


def _begun(text: str, marks: Sequence[str]) -> int:
    """The length of the longest end of `text` that one of `marks` begins with."""
    longest = max(map(len, marks), default=1) - 1
    ends = (text[-size:] for size in range(min(longest, len(text)), 0, -1))
    return next((len(end) for end in ends if any(mark.startswith(end) for mark in marks)), 0)


def _ended() -> Steps:
    while True:
        yield
