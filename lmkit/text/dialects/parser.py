"""An answer as events: reasoning, content, and calls of tools. It takes the text in pieces, and works in linear time.

Every character of the text becomes part of an event or belongs to the form of a call that was understood. A call that
breaks its form stays content. White space next to a call or to reasoning is dropped.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Generator, Iterable, Mapping, Sequence
from typing import Any, Literal, NamedTuple

from lmkit.text.dialects.bare import BARE, CLOSED, FENCED, LEFT_OVER, STARTS, Form
from lmkit.text.dialects.gemma import PIECE, GemmaValue, inside
from lmkit.text.dialects.json_end import JsonEnd
from lmkit.text.dialects.schemas import types_by_name, value_of
from lmkit.text.dialects.table import ESCAPE, Dialect, Thought

MAX_PIECE = 4096
MAX_NAME = 128
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


class Parser:
    """Parses one answer: `feed` takes its pieces, `end` its end."""

    def __init__(
        self,
        dialect: Dialect | None,
        thought: Thought | None,
        *,
        is_thinking: bool = False,
        parameters: Mapping[str, Any] | None = None,
    ) -> None:
        """`dialect` is None if no tool may be called, `thought` if the model has no reasoning.

        `is_thinking`: the prompt ends with the mark that begins the reasoning. `parameters` has the JSON schema of each
        tool: a dialect that writes all values as text needs it to tell strings.
        """
        self._dialect, self._thought = dialect, thought
        self._is_thinking, self._schemas = is_thinking, parameters or {}
        self._text, self._is_last = "", False
        self._events: list[Event] = []
        self._space: list[str] = []  # white space that is shown if text of the same kind follows
        self._is_fresh = False  # after something else than text
        self.num_calls = 0
        harmony = (thought and thought.name == "harmony") or (dialect and dialect.syntax == "harmony")
        self._steps = self._harmony() if harmony else self._run()
        next(self._steps)

    def feed(self, piece: str) -> list[Event]:
        events: list[Event] = []
        for start in range(0, len(piece), MAX_PIECE):  # what is held back is copied with each piece
            self._text += piece[start : start + MAX_PIECE]
            events += self._advance()
        return events

    def end(self) -> list[Event]:
        self._is_last = True
        return self._advance()

    def _advance(self) -> list[Event]:
        try:
            self._steps.send(None)
        except StopIteration:
            if not self.num_calls:
                self._add("content", "".join(self._space))
            self._steps = _ended()
            next(self._steps)
        events, self._events = self._events, []
        return events

    # ---- reading

    def _until(self, marks: Sequence[str], emit: Callable[[str], None]) -> Steps:
        """The first of `marks` in the text, None if there is none. Emits what stands before it."""
        pattern = re.compile("|".join(map(re.escape, marks)) or "(?!)")
        while True:
            if found := pattern.search(self._text):
                emit(self._text[: found.start()])
                self._text = self._text[found.end() :]
                return found[0]
            held = 0 if self._is_last else _begun(self._text, marks)
            cut = len(self._text) - held
            emit(self._text[:cut])
            self._text = self._text[cut:]
            if self._is_last:
                return None
            yield

    def _match(self, pattern: str) -> Steps:
        """The match of `pattern` at the front of the text, which is taken away; None if there is none."""
        compiled = re.compile(pattern)
        while True:
            if found := compiled.match(self._text, 0, MAX_FORM):
                self._text = self._text[found.end() :]
                return found
            if self._is_last or len(self._text) >= MAX_FORM:
                return None
            yield

    def _form(self, form: Form) -> Steps:
        """As `_match`, but it ends as soon as the text can no longer become the form."""
        while True:
            if found := form.whole.match(self._text, 0, MAX_FORM):
                self._text = self._text[found.end() :]
                return found
            if self._is_last or len(self._text) >= MAX_FORM or not form.begun.fullmatch(self._text):
                return None
            yield

    def _choose(self, patterns: Sequence[str]) -> Steps:
        """The index of the first pattern that matches at the front of the text, which is taken away; -1 for none."""
        found = yield from self._match("|".join(f"({pattern})" for pattern in patterns))
        return -1 if found is None else found.lastindex - 1

    def _json(self, emit: Callable[[str], None]) -> Steps:
        """Whether a JSON value stands at the front of the text. Emits it."""
        scan = JsonEnd()
        while True:
            end = scan.feed(self._text)
            emit(self._text[:end])
            self._text = self._text[end:]
            if scan.is_done or self._is_last:
                return scan.is_done
            yield

    # ---- events

    def _add(self, kind: Kind, text: str) -> None:
        if text:
            self._events.append(Event(kind, text))

    def _say(self, kind: Kind) -> Callable[[str], None]:
        """Emits text without the white space at its ends."""

        def emit(text: str) -> None:
            body = text.rstrip()
            if self._is_fresh:
                body = body.lstrip()
                text = text.lstrip()
            if body:
                self._add(kind, "".join(self._space) + body)
                self._space.clear()
                self._is_fresh = False
            if not self._is_fresh and (space := text[len(body) :]):
                self._space.append(space)

        return emit

    def _turn(self) -> None:
        """Another kind of text follows."""
        self._space.clear()
        self._is_fresh = True

    # ---- forms

    def _run(self) -> Steps:
        yield
        if self._thought:
            yield from self._reasoning(self._thought)
        if self._dialect and self._dialect.only_first:
            yield from self._first_call(self._dialect)
        around = self._thought.around if self._thought else ()
        marks = [self._dialect.begin, *around] if self._dialect else around
        plain: Callable[[str], None] = self._say("content") if self._dialect or self._thought else self._plain
        if self._dialect and self._dialect.bare:
            marks = [*marks, *STARTS]
            yield from self._bare_calls(BARE, "", plain)
        while mark := (yield from self._until(marks, plain)):
            if mark in around:
                self._turn()
            elif mark in STARTS:
                before = mark.removesuffix("{")
                self._text = mark.removeprefix(before) + self._text
                yield from self._bare_calls(STARTS[mark], before, plain)
            else:
                assert self._dialect is not None
                yield from self._calls(self._dialect, self._dialect.begin, plain)

    def _bare_calls(self, form: Form, mark: str, plain: Callable[[str], None]) -> Steps:
        """Calls of tools that there are, without marks. What is no call is content."""
        while header := (yield from self._form(form)):
            if header["name"] not in self._schemas:
                plain(mark + header[0])
                return
            self._begin(header["name"])
            yield from self._json(lambda text: self._add("arguments", text))
            yield from self._form(CLOSED[form is FENCED])
            yield from self._form(LEFT_OVER)
            form, mark = BARE, ""
        plain(mark)

    def _plain(self, text: str) -> None:
        self._add("content", text)

    def _reasoning(self, thought: Thought) -> Steps:
        if not self._is_thinking:
            begun = yield from self._match(r"\s*" + re.escape(thought.begin))
            if not begun:
                return
        self._is_fresh = True
        yield from self._until([thought.end], self._say("reasoning"))
        self._turn()

    def _first_call(self, dialect: Dialect) -> Steps:
        while len(self._text) < MAX_FORM and not self._text.strip() and not self._is_last:
            yield
        if self._text.lstrip().startswith("{"):
            yield from self._calls(dialect, "", self._say("content"))

    def _calls(self, dialect: Dialect, mark: str, plain: Callable[[str], None]) -> Steps:
        """The calls after a mark. What is no call is content."""
        if dialect.opening.endswith("["):
            opened = yield from self._match(r"\s*\[(?=\s*\{)")
            mark += opened[0] if opened else ""
        while (yield from self._call(dialect, mark, plain)):
            mark = ""
            forms = [dialect.again, dialect.close, r"(?=[^\s,;\]}<])"]
            if dialect.again == "(?!)" or (yield from self._choose(forms)) != 0:
                return

    def _call(self, dialect: Dialect, mark: str, plain: Callable[[str], None]) -> Steps:
        """Whether a call stands here. If not, `mark` and what was read of it are content."""
        header = yield from self._match(dialect.header)
        if header is None:
            whole = dialect.in_object and (yield from self._whole(dialect, mark, plain))
            if not whole and not dialect.in_object:
                plain(mark)
            return whole
        self._begin(header["name"])
        match dialect.syntax:
            case "json":
                yield from self._json(lambda text: self._add("arguments", text))
            case "qwen_xml":
                yield from self._members(
                    header["name"], r"\s*<parameter=(?P<name>[^<>]{1,256})>", "</parameter>", line="\n"
                )
            case "minimax_xml":
                yield from self._members(
                    header["name"], r'\s*<parameter name="(?P<name>[^"<>]{1,256})">', "</parameter>"
                )
            case "gemma":
                if not (yield from self._gemma(header["name"])):
                    return True
            case "glm_xml":
                form = r"\s*<arg_key>(?P<name>[^<>]{1,256})</arg_key>\s*<arg_value>"
                yield from self._members(header["name"], form, "</arg_value>")
        yield from self._tail(dialect)
        return True

    def _tail(self, dialect: Dialect) -> Steps:
        found = yield from self._match(dialect.tail)
        if found is None and self._is_last and not self._text.strip(" \t\r\n}"):
            self._text = ""  # a token that is not shown ended the answer

    def _begin(self, name: str) -> None:
        self._turn()
        self._events.append(Event("call", name))
        self.num_calls += 1

    def _whole(self, dialect: Dialect, mark: str, plain: Callable[[str], None]) -> Steps:
        """A call whose arguments stand before its name."""
        parts: list[str] = []
        yield from self._match(r"\s*(?=\S)")
        yield from self._json(parts.append)
        name, arguments = _named("".join(parts))
        if name is None:
            plain(mark + "".join(parts))
            return False
        self._begin(name)
        self._add("arguments", arguments)
        tail = dialect.tail.removeprefix(r"\s*\}")
        return (yield from self._match(tail)) is not None

    def _members(self, name: str, form: str, end: str, line: str = "") -> Steps:
        """Parameters that are written one by one, as one JSON object. A text that ends early leaves it open.

        `line` stands around each value.
        """
        types = types_by_name(self._schemas.get(name))
        before = "{"
        while found := (yield from self._match(form)):
            parameter = found["name"].strip()
            self._add("arguments", before + json.dumps(parameter, ensure_ascii=False) + ": ")
            before = ", "
            parts: list[str] = []
            closed = yield from self._until([end], parts.append)
            value = "".join(parts)
            self._add("arguments", value_of(value.removeprefix(line).removesuffix(line), types.get(parameter, ())))
            if not closed:
                return
        self._add("arguments", "{}" if before == "{" else "}")

    def _gemma(self, name: str) -> Steps:
        """Whether a call's arguments are whole."""
        types = types_by_name(self._schemas.get(name))
        value = GemmaValue(lambda key, word: value_of(word.strip(), types.get(key, ())))
        while found := (yield from self._match(PIECE)):
            piece = found[0].strip()
            written = value.take(piece)
            if written is None:
                self._turn()
                self._say("content")(found[0])
                return False
            self._add("arguments", written)
            if piece == ESCAPE:
                yield from self._until([ESCAPE], lambda text: self._add("arguments", inside(text)))
                self._add("arguments", '"')
            if value.is_done:
                return True
        return False

    # ---- Harmony

    def _harmony(self) -> Steps:
        """Messages of the form [<|start|>role] <|channel|>NAME [to=RECIPIENT] ... <|message|> TEXT <|end|>."""
        yield
        ends = ["<|start|>", "<|channel|>", "<|end|>", "<|call|>", "<|return|>"]
        mark = yield from self._until(ends, self._say("content"))
        recipient = ""
        while mark:
            if mark in ("<|start|>", "<|channel|>"):
                parts: list[str] = []
                stopped = yield from self._until(["<|message|>", *ends], parts.append)
                header = "".join(parts)
                if to := re.search(r"to=(?:functions\.)?([^\s<]{1,128})", header):
                    recipient = to[1]
                if stopped == "<|message|>":
                    emit = self._channel(header, recipient)
                    recipient = ""
                    mark = yield from self._until(ends, emit)
                    continue
                if mark == "<|channel|>" or not stopped:
                    self._add("content", header)
                mark = stopped
            else:
                mark = yield from self._until(ends, self._say("content"))

    def _channel(self, header: str, recipient: str) -> Callable[[str], None]:
        self._turn()
        if recipient and self._dialect:
            self._begin(recipient)
            return lambda text: self._add("arguments", text)
        if self._thought and not recipient and header.split(" ")[0].strip() == "analysis":
            return self._say("reasoning")
        return self._say("content")


def _begun(text: str, marks: Sequence[str]) -> int:
    """The length of the longest end of `text` that one of `marks` begins with."""
    longest = max(map(len, marks), default=1) - 1
    ends = (text[-size:] for size in range(min(longest, len(text)), 0, -1))
    return next((len(end) for end in ends if any(mark.startswith(end) for mark in marks)), 0)


def _named(text: str) -> tuple[str | None, str]:
    """Name and arguments of a call that is one JSON object; None if it is none."""
    try:
        call = json.loads(text)
    except (ValueError, RecursionError):
        return None, ""
    if not isinstance(call, dict) or not isinstance(call.get("name"), str):
        return None, ""
    if call.keys() - {"name", "arguments", "parameters", "type", "id"}:
        return None, ""
    if len(call["name"]) > MAX_NAME:
        return None, ""
    return call["name"], json.dumps(call.get("arguments", call.get("parameters", {})), ensure_ascii=False)


def _ended() -> Steps:
    while True:
        yield
