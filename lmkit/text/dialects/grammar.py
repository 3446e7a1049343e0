"""Grammars of answers with reasoning and calls of tools, in llguidance's form of Lark.

    start: thought? body            thought: begin text end, or what is left of it
    body:  text | head calls        head: text up to the mark of a call; `text` has no such mark
    calls: call (between call)*

A mark that is a special token is one token, and no text contains it.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from lmkit.text.dialects.dialect import Dialect
from lmkit.text.dialects.rules import LINE, Rules, pattern
from lmkit.text.dialects.table import DIALECTS
from lmkit.text.dialects.thoughts import Thought
from lmkit.text.grammar import lark_grammar
from lmkit.text.tokenizer import Tokenizer

ANY_OBJECT = {"type": "object"}
NO_PARAMETERS = {"type": "object", "properties": {}, "additionalProperties": False}
_HARMONY = DIALECTS["harmony"]


class Called(NamedTuple):
    """A tool that may be called."""

    name: str
    schema: Mapping[str, Any]  # of its arguments


@dataclass(frozen=True)
class Form:
    """What an answer may be."""

    tools: Sequence[Called] = ()
    dialect: Dialect | None = None  # of calls
    must_call: bool = False
    parallel: bool = True
    thought: Thought | None = None
    is_thinking: bool = False  # the prompt begins the reasoning
    thinking_budget: int | None = None  # tokens
    content: str = ""  # the grammar of the content, as text.grammar makes it; "" = any text


def grammar(form: Form, tokenizer: Tokenizer) -> str:
    """The grammar of answers of this form."""
    return lark_grammar("\n".join(_AnswerRules(form, tokenizer).lines()))


class _AnswerRules(Rules):
    def __init__(self, form: Form, tokenizer: Tokenizer) -> None:
        self._form = form
        self._harmony = form.dialect is _HARMONY or (form.thought is not None and form.thought.name == "harmony")
        super().__init__(tokenizer.backend.token_to_id, self._marks())

    def lines(self) -> list[str]:
        start = "start: " + " ".join(filter(None, [self._thought(), self._body()]))
        return [start, *self.rules]

    def _marks(self) -> Iterable[str]:
        if self._form.dialect:
            yield from self._form.dialect.specials
        if self._harmony:
            yield from _HARMONY.specials
        if thought := self._form.thought:
            yield from (thought.begin, thought.end, *thought.around, *thought.specials)

    # ---- reasoning

    def _thought(self) -> str:
        thought, budget = self._form.thought, self._form.thinking_budget
        if thought is None:
            return ""
        begin, end = thought.begin, thought.end
        if self._harmony:
            begin, end = "<|channel|>analysis<|message|>", "<|end|>"
        if budget is None:
            rest = self.up_to("thinking", end)
        else:
            inside = self.rule(f"thinking[max_tokens={budget}]", self.without("THOUGHTS", end)) if budget else ""
            rest = f"{inside} {self.literal(end)}"
        rest += " " + (self.literal("<|start|>assistant") if self._harmony else "SPACE")
        self.rule("SPACE", "/[ \\t\\r\\n]{0,8}/")
        if self._form.is_thinking:
            return rest
        return self.rule("thought", f"({self.literal(LINE + begin)} {rest})?")

    # ---- content and calls

    def _body(self) -> str:
        form = self._form
        if not form.dialect or not form.tools:
            return self._final(self._answer() if form.content else self._no_call())
        calls = f"{self._marks_of(before=True)} {self._calls(form.dialect)} {self._marks_of()}"
        if form.must_call:
            return calls
        if form.content or self._harmony:
            text = self._final(self._answer() if form.content else "ANY")
            return self.rule("body", f"{text} | {calls}")
        return self.rule("body", f"{self._final(self._no_call())} | {self._head(form.dialect)}")

    def _marks_of(self, *, before: bool = False) -> str:
        """Marks that may stand after the answer, or before one without a text."""
        thought = self._form.thought
        marks = () if thought is None else thought.around if before else thought.after
        return " ".join(f"({self.literal(mark)})?" for mark in marks)

    def _final(self, text: str) -> str:
        if self._harmony:
            return f"{self.literal('<|channel|>final<|message|>')} {text}"
        before = self._form.thought.before if self._form.thought else ()
        return " ".join([*(f"({self.literal(mark)})?" for mark in before), text, self._marks_of()])

    def _answer(self) -> str:
        """The grammar of the content as a part of this one."""
        (own,) = json.loads(self._form.content)["grammars"]
        if (schema := own.get("json_schema")) is not None:
            return f"%json {json.dumps(schema)}"
        return f"%lark {{\n{own['lark_grammar']}\n}}"

    def _no_call(self) -> str:
        dialect = self._form.dialect
        if dialect is None:
            return "ANY"
        if dialect.starts:
            text = f"/(.|\\n)*/ & ~/[ \\t\\r\\n]*{''.join(dialect.starts)}(.|\\n)*/"
            if (thought := self._form.thought) and not self._form.is_thinking and not self.is_special(thought.begin):
                text += f" & ~/[ \\t\\r\\n]*{pattern(thought.begin)}(.|\\n)*/"  # that is reasoning
            return self.rule("TEXT", text)
        return self.without("TEXT", dialect.begin)

    def _head(self, dialect: Dialect) -> str:
        """Text and calls. The text ends with the mark of the first call."""
        if dialect.starts:
            return self._calls(dialect)
        calls = f"{self._calls(dialect, dialect.begin, 'more_')} {self._marks_of()}"
        head = self.up_to("head", dialect.begin)
        if head.startswith("ANY "):  # a special token: marks of the answer may stand before it
            head = self._final("ANY") + head.removeprefix("ANY")
        return f"{head} {calls}"

    def _calls(self, dialect: Dialect, done: str = "", prefix: str = "") -> str:
        """The calls; of the first one `done` is written."""
        first = (dialect.opening + dialect.written[0]).removeprefix(done)
        start = self.rule(f"{prefix}first", self._alternatives(dialect, first, f"{prefix}f"))
        further = ""
        if dialect.parallel and self._form.parallel:
            before = dialect.between + dialect.written[0]  # one text: `closing` may begin like it
            further = f"({self.rule(f'{prefix}again', self._alternatives(dialect, before, f'{prefix}a'))})*"
        closing = self.literal(dialect.closing) if dialect.closing else ""
        return " ".join(filter(None, [start, further, closing]))

    def _alternatives(self, dialect: Dialect, before: str, prefix: str) -> str:
        """A call of each tool."""
        calls = []
        for idx, tool in enumerate(self._form.tools):
            name = f"{prefix}{idx}"
            parts = [
                self.literal(before + tool.name + dialect.written[1]),
                dialect.syntax.rules(self, tool.schema, name),
                self.literal(dialect.written[2]),
            ]
            calls.append(self.rule(name, " ".join(filter(None, parts))))
        return " | ".join(calls)
