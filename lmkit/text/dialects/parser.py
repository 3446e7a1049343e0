"""An answer as events: reasoning, content, and calls of tools. It takes the text in pieces, and works in linear time.

Every character of the text becomes part of an event or belongs to the form of a call that was understood. A call that
breaks its form stays content. White space next to a call or to reasoning is dropped.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping
from typing import Any

from lmkit.text.dialects.bare import BARE, CLOSED, FENCED, LEFT_OVER, STARTS, Form, form, spelled
from lmkit.text.dialects.dialect import NEVER, Dialect
from lmkit.text.dialects.reader import Reader, Steps
from lmkit.text.dialects.thoughts import Thought

MAX_NAME = 128


class Parser(Reader):
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
        super().__init__()

    def run(self) -> Steps:
        names = [part.name for part in (self._dialect, self._thought) if part is not None]
        yield
        yield from self._harmony() if "harmony" in names else self._run()

    # ---- forms

    def _run(self) -> Steps:
        if self._thought:
            yield from self._reasoning(self._thought)
        if self._dialect and self._dialect.starts:
            yield from self._first_call(self._dialect)
        around = self._thought.around if self._thought else ()
        marks = [self._dialect.begin, *around] if self._dialect else around
        plain: Callable[[str], None] = self.say("content") if self._dialect or self._thought else self._plain
        if self._dialect and self._dialect.bare:
            marks = [*marks, *STARTS]
            yield from self._bare_calls(BARE, "", plain)
        while mark := (yield from self.until(marks, plain)):
            if mark in around:
                self.turn()
            elif mark in STARTS:
                before = mark.removesuffix("{")
                self.put_back(mark.removeprefix(before))
                yield from self._bare_calls(STARTS[mark], before, plain)
            else:
                assert self._dialect is not None
                yield from self._calls(self._dialect, self._dialect.begin, plain)

    def _bare_calls(self, form: Form, mark: str, plain: Callable[[str], None]) -> Steps:
        """Calls of tools that there are, without marks. What is no call is content."""
        while header := (yield from self.form(form)):
            if header["name"] not in self._schemas:
                plain(mark + header[0])
                return
            self.begin(header["name"])
            yield from self.json(self.argue)
            yield from self.form(CLOSED[form is FENCED])
            yield from self.form(LEFT_OVER)
            form, mark = BARE, ""
        plain(mark)

    def _plain(self, text: str) -> None:
        self.add("content", text)

    def _reasoning(self, thought: Thought) -> Steps:
        if not self._is_thinking and not (yield from self.form(form([r"\s*", *spelled(thought.begin)]))):
            return
        self._is_fresh = True
        yield from self.until([thought.end], self.say("reasoning"))
        self.turn()

    def _first_call(self, dialect: Dialect) -> Steps:
        whole = rf"\s*(?={''.join(dialect.starts)})"
        if (yield from self.form(form([r"\s*", *dialect.starts], whole=whole))):
            yield from self._calls(dialect, "", self.say("content"))

    def _calls(self, dialect: Dialect, mark: str, plain: Callable[[str], None]) -> Steps:
        """The calls after a mark. What is no call is content."""
        if dialect.open:
            opened = yield from self.match(dialect.open)
            mark += opened[0] if opened else ""
        while (yield from self._call(dialect, mark, plain)):
            mark = ""
            forms = [dialect.again, dialect.close, r"(?=[^\s,;\]}<])"]
            if dialect.again == NEVER or (yield from self.choose(forms)) != 0:
                return

    def _call(self, dialect: Dialect, mark: str, plain: Callable[[str], None]) -> Steps:
        """Whether a call stands here. If not, `mark` and what was read of it are content."""
        header = yield from self.match(dialect.header)
        if header is None:
            whole = dialect.in_object and (yield from self._whole(dialect, mark, plain))
            if not whole and not dialect.in_object:
                plain(mark)
            return whole
        self.begin(header["name"])
        if not (yield from dialect.syntax.read(self, self._schemas.get(header["name"]))):
            return True
        yield from self._tail(dialect)
        return True

    def _tail(self, dialect: Dialect) -> Steps:
        found = yield from self.match(dialect.tail)
        if found is None and self.is_last and not self._text.strip(" \t\r\n}"):
            self._text = ""  # a token that is not shown ended the answer

    def _whole(self, dialect: Dialect, mark: str, plain: Callable[[str], None]) -> Steps:
        """A call whose arguments stand before its name."""
        parts: list[str] = []
        yield from self.match(r"\s*(?=\S)")
        yield from self.json(parts.append)
        name, arguments = _named("".join(parts))
        if name is None:
            plain(mark + "".join(parts))
            return False
        self.begin(name)
        self.add("arguments", arguments)
        tail = dialect.tail.removeprefix(r"\s*\}")
        return (yield from self.match(tail)) is not None

    # ---- Harmony

    def _harmony(self) -> Steps:
        """Messages of the form [<|start|>role] <|channel|>NAME [to=RECIPIENT] ... <|message|> TEXT <|end|>."""
        ends = ["<|start|>", "<|channel|>", "<|end|>", "<|call|>", "<|return|>"]
        mark = yield from self.until(ends, self.say("content"))
        recipient = ""
        while mark:
            if mark in ("<|start|>", "<|channel|>"):
                parts: list[str] = []
                stopped = yield from self.until(["<|message|>", *ends], parts.append)
                header = "".join(parts)
                if to := re.search(r"to=(?:functions\.)?([^\s<]{1,128})", header):
                    recipient = to[1]
                if stopped == "<|message|>":
                    emit = self._channel(header, recipient)
                    recipient = ""
                    mark = yield from self.until(ends, emit)
                    continue
                if mark == "<|channel|>" or not stopped:
                    self.add("content", header)
                mark = stopped
            else:
                mark = yield from self.until(ends, self.say("content"))

    def _channel(self, header: str, recipient: str) -> Callable[[str], None]:
        self.turn()
        if recipient and self._dialect:
            self.begin(recipient)
            return self.argue
        if self._thought and not recipient and header.split(" ")[0].strip() == "analysis":
            return self.say("reasoning")
        return self.say("content")


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
