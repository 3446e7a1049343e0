"""Grammars of answers with reasoning and calls of tools, in llguidance's form of Lark.

    start: thought? body            thought: begin text end, or what is left of it
    body:  text | head calls        head: text up to the mark of a call; `text` has no such mark
    calls: call (between call)*

A mark that is a special token is one token, and no text contains it.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from lmkit.text.dialects.schemas import WORDS, is_text, leaves, patterns, types_of
from lmkit.text.dialects.table import DIALECTS, ESCAPE, MARKS, NUMBER, Dialect, Thought
from lmkit.text.grammar import WHITESPACE, lark_grammar
from lmkit.text.tokenizer import Tokenizer

ANY_OBJECT = {"type": "object"}
NO_PARAMETERS = {"type": "object", "properties": {}, "additionalProperties": False}
_ANY = "ANY: /(.|\\n)*/"
_KEY = "/[a-zA-Z_][a-zA-Z0-9_.-]{0,63}/"
MAX_DEPTH = 8  # of objects in each other; what lies deeper may have any form


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
    return lark_grammar("\n".join(_Rules(form, tokenizer).lines()))


class _Rules:
    def __init__(self, form: Form, tokenizer: Tokenizer) -> None:
        self._form, self._tokenizer = form, tokenizer
        self._rules = dict.fromkeys([_ANY])  # in their order
        self._harmony = form.dialect is DIALECTS["harmony"] or (
            form.thought is not None and form.thought.name == "harmony"
        )

    def lines(self) -> list[str]:
        start = "start: " + " ".join(filter(None, [self._thought(), self._body()]))
        return [start, *self._rules]

    def _rule(self, name: str, text: str) -> str:
        self._rules[f"{name}: {text}"] = None
        return name.partition("[")[0]

    def _is_special(self, text: str) -> bool:
        return text in MARKS and self._tokenizer.backend.token_to_id(text) is not None

    def _literal(self, text: str) -> str:
        """A fixed text, in which special tokens are themselves."""
        marks = {*DIALECTS["harmony"].specials} if self._harmony else set(self._marks())
        parts, at = [], 0
        special = sorted((mark for mark in marks if self._is_special(mark)), key=len, reverse=True)
        plain = ""
        while at < len(text):
            if mark := next((mark for mark in special if text.startswith(mark, at)), ""):
                parts += [_quoted(plain)] if plain else []
                parts.append(f"<[{self._tokenizer.backend.token_to_id(mark)}]>")
                plain, at = "", at + len(mark)
            elif text[at] == NUMBER:
                parts += [_quoted(plain), self._rule("NUMBER", "/[0-9]{1,10}/")]
                plain, at = "", at + 1
            else:
                plain, at = plain + text[at], at + 1
        return " ".join([*parts, *([_quoted(plain)] if plain else [])])

    def _marks(self) -> Iterable[str]:
        if self._form.dialect:
            yield from (self._form.dialect.begin, *self._form.dialect.specials)
        if self._form.thought:
            yield from (self._form.thought.begin, self._form.thought.end, *self._form.thought.around)

    def _without(self, name: str, mark: str) -> str:
        """A terminal: any text that does not contain `mark`."""
        if self._is_special(mark):
            return "ANY"
        return self._rule(name, f"/(.|\\n)*/ & ~/(.|\\n)*{_pattern(mark)}(.|\\n)*/")

    def _up_to(self, name: str, mark: str) -> str:
        """Any text up to the first `mark`, and that."""
        if self._is_special(mark):
            return f"ANY {self._literal(mark)}"
        return self._rule(f"{name}[suffix={_quoted(mark)}]", "/(.|\\n)*/")

    # ---- reasoning

    def _thought(self) -> str:
        thought, budget = self._form.thought, self._form.thinking_budget
        if thought is None:
            return ""
        begin, end = thought.begin, thought.end
        if self._harmony:
            begin, end = "<|channel|>analysis<|message|>", "<|end|>"
        if budget is None:
            rest = self._up_to("thinking", end)
        else:
            inside = self._rule(f"thinking[max_tokens={budget}]", self._without("THOUGHTS", end)) if budget else ""
            rest = f"{inside} {self._literal(end)}"
        rest += " " + (self._literal("<|start|>assistant") if self._harmony else "SPACE")
        self._rule("SPACE", "/[ \\t\\r\\n]{0,8}/")
        if self._form.is_thinking:
            return rest
        return self._rule("thought", f"({self._literal(begin)} {rest})?")

    # ---- content and calls

    def _body(self) -> str:
        form = self._form
        if not form.dialect or not form.tools:
            return self._final(self._answer() if form.content else self._no_call())
        if form.must_call:
            return self._calls(form.dialect)
        if form.content or self._harmony:
            text = self._final(self._answer() if form.content else "ANY")
            return self._rule("body", f"{text} | {self._calls(form.dialect)}")
        return self._rule("body", f"{self._final(self._no_call())} | {self._head(form.dialect)}")

    def _final(self, text: str) -> str:
        if self._form.thought and self._form.thought.around:
            begin, end = map(self._literal, self._form.thought.around)
            return f"({begin})? {text} ({end})?"
        return f"{self._literal('<|channel|>final<|message|>')} {text}" if self._harmony else text

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
        if dialect.only_first:
            text = "/[ \\t\\r\\n]*[^ \\t\\r\\n{](.|\\n)*/"
            if (thought := self._form.thought) and not self._form.is_thinking and not self._is_special(thought.begin):
                text += f" & ~/[ \\t\\r\\n]*{_pattern(thought.begin)}(.|\\n)*/"  # that is reasoning
            return f'({self._rule("TEXT", text)} | "")'
        return self._without("TEXT", dialect.begin)

    def _head(self, dialect: Dialect) -> str:
        """Text and calls. The text ends with the mark of the first call."""
        if dialect.only_first:
            return self._calls(dialect)
        first = dialect.opening + dialect.written[0]
        mark = next((special for special in dialect.specials if first.startswith(special)), dialect.begin)
        return f"{self._up_to('head', mark)} {self._calls(dialect, mark, 'more_')}"

    def _calls(self, dialect: Dialect, done: str = "", prefix: str = "") -> str:
        """The calls; of the first one `done` is written."""
        first = (dialect.opening + dialect.written[0]).removeprefix(done)
        start = self._rule(f"{prefix}first", self._alternatives(dialect, first, f"{prefix}f"))
        further = ""
        if dialect.parallel and self._form.parallel:
            again = self._rule(f"{prefix}again", self._alternatives(dialect, dialect.written[0], f"{prefix}a"))
            further = f"({self._literal(dialect.between)} {again})*"
        closing = self._literal(dialect.closing) if dialect.closing else ""
        return " ".join(filter(None, [start, further, closing]))

    def _alternatives(self, dialect: Dialect, before: str, prefix: str) -> str:
        """A call of each tool."""
        write = _ARGUMENTS.get(dialect.syntax, _Rules._object)
        calls = []
        for idx, tool in enumerate(self._form.tools):
            arguments = write(self, tool.schema, f"{prefix}{idx}")
            head = self._literal(before + tool.name + dialect.written[1])
            tail = self._literal(dialect.written[2]) if dialect.written[2] else ""
            calls.append(self._rule(f"{prefix}{idx}", f"{head} {arguments} {tail}"))
        return " | ".join(calls)

    def _object(self, schema: Mapping[str, Any], name: str) -> str:
        return _json(schema)

    def _qwen_xml(self, schema: Mapping[str, Any], name: str) -> str:
        return self._members(schema, name, ("<parameter=", ">\n", "\n</parameter>", "\n"))

    def _glm_xml(self, schema: Mapping[str, Any], name: str) -> str:
        return self._members(schema, name, ("<arg_key>", "</arg_key>\n<arg_value>", "</arg_value>", "\n"))

    def _minimax_xml(self, schema: Mapping[str, Any], name: str) -> str:
        return self._members(schema, name, ('<parameter name="', '">', "</parameter>", "\n"))

    def _members(self, schema: Mapping[str, Any], name: str, form: tuple[str, str, str, str]) -> str:
        """The properties of a schema in their order, each written by itself. If it has none, any members."""
        before, between, after, end = form
        properties = schema.get("properties") or {}
        if not properties and schema.get("additionalProperties", True) is not False:
            key = self._rule("KEY", _KEY)
            value = self._up_to(f"{name}_any", after)
            return f"({self._literal(before)} {key} {self._literal(between)} {value} {_quoted(end)})*"
        required = schema.get("required") or ()
        parts = []
        for idx, (key, about) in enumerate(properties.items()):
            value = self._member(schema, about, f"{name}_v{idx}", after)
            member = self._rule(f"{name}_p{idx}", f"{self._literal(before + key + between)} {value} {_quoted(end)}")
            parts.append(member if key in required else f"{member}?")
        return " ".join(parts)

    def _member(self, schema: Mapping[str, Any], about: Any, name: str, after: str) -> str:
        if is_text(types_of(about, schema)):
            return self._texts(list(leaves(about, schema)), name, after)
        return f"{_json(_with_definitions(about, schema))} {self._literal(after)}"

    def _texts(self, options: Sequence[Mapping[str, Any]], name: str, after: str) -> str:
        """A value that is a text or a word, and the mark after it."""
        if any(leaf.get("type") == "string" and not patterns(leaf) for leaf in options):
            return self._up_to(name, after)  # which includes the words
        found = []
        for idx, leaf in enumerate(options):
            if leaf.get("type") == "string":
                found.append(self._held_text(leaf, f"{name}_{idx}", after))
            else:
                words = leaf["enum"] if "enum" in leaf else WORDS[leaf["type"]]
                shown = (word if isinstance(word, str) else json.dumps(word) for word in words)
                found.append(f"({' | '.join(map(_quoted, shown))}) {self._literal(after)}")
        return self._rule(f"{name}_text", " | ".join(found))

    def _held_text(self, leaf: Mapping[str, Any], name: str, after: str) -> str:
        """A string with a pattern, up to the first mark after it."""
        if self._is_special(after):
            whole = " & ".join(f"/{_delimited(pattern)}/" for pattern in patterns(leaf))
            return f"{self._rule(name.upper(), whole)} {self._literal(after)}"
        mark = _pattern(after)
        parts = [f"/({_delimited(pattern)}){mark}/" for pattern in patterns(leaf)]
        return self._rule(name.upper(), " & ".join([*parts, f"~/(.|\\n)*{mark}(.|\\n)+/"]))

    # ---- FunctionGemma's values

    def _gemma(self, schema: Mapping[str, Any], name: str) -> str:
        return self._gemma_object(schema, schema, name, 0)

    def _gemma_object(self, about: Mapping[str, Any], root: Mapping[str, Any], name: str, depth: int) -> str:
        """Members by their names, as the chat template sorts them, with commas between those that are there."""
        properties = about.get("properties") or {}
        if not properties and about.get("additionalProperties", True) is not False:
            return self._gemma_any() and "any_object"
        first, later = '""', '""'  # of the members that are left: if none was written, and if one was
        required = about.get("required") or ()
        for idx, key in reversed(list(enumerate(sorted(properties, key=str.lower)))):
            value = self._gemma_value(properties[key], root, f"{name}_{idx}", depth + 1)
            member = self._rule(f"{name}_m{idx}", f"{_quoted(key + ':')} {value}")
            skipped = ("", "") if key in required else (f" | {first}", f" | {later}")
            first = self._rule(f"{name}_f{idx}", f"{member} {later}{skipped[0]}")
            later = self._rule(f"{name}_l{idx}", f'"," {member} {later}{skipped[1]}')
        return f'"{{" {first} "}}"'

    def _gemma_value(self, about: Any, root: Mapping[str, Any], name: str, depth: int) -> str:
        if depth > MAX_DEPTH:
            return self._gemma_any()
        options = enumerate(leaves(about, root))
        return self._rule(name, " | ".join(self._gemma_leaf(leaf, root, f"{name}_{i}", depth) for i, leaf in options))

    def _gemma_leaf(self, leaf: Mapping[str, Any], root: Mapping[str, Any], name: str, depth: int) -> str:
        mark = self._literal(ESCAPE)
        if "enum" in leaf:
            texts = [f"{mark} {_quoted(value)} {mark}" for value in leaf["enum"] if isinstance(value, str)]
            words = [_quoted(json.dumps(value)) for value in leaf["enum"] if not isinstance(value, str)]
            return f"({' | '.join(texts + words)})"
        match leaf.get("type"):
            case "string":
                return f"{mark} {self._texts([leaf], f'{name}_s', ESCAPE)}"
            case "integer" | "number" | "boolean" | "null":
                return _json(leaf)
            case "object":
                return self._gemma_object(leaf, root, f"{name}_o", depth)
            case "array" if "prefixItems" not in leaf:
                item = self._gemma_value(leaf.get("items", {}), root, f"{name}_i", depth + 1)
                return _listed(item, leaf.get("minItems", 0), leaf.get("maxItems"))
        return self._gemma_any()

    def _gemma_any(self) -> str:
        mark, key = self._literal(ESCAPE), self._rule("KEY", _KEY)
        member = f'{key} ":" any_value'
        self._rule("any_object", f'"{{" ({member} ("," {member})*)? "}}"')
        text = f"{mark} {self._up_to('any_text', ESCAPE)}"
        word = _json({"type": ["number", "boolean", "null"]})
        return self._rule("any_value", f"{text} | {word} | {_listed('any_value', 0, None)} | any_object")


_ARGUMENTS: Mapping[str, Callable[[_Rules, Mapping[str, Any], str], str]] = {
    "qwen_xml": _Rules._qwen_xml,
    "glm_xml": _Rules._glm_xml,
    "minimax_xml": _Rules._minimax_xml,
    "gemma": _Rules._gemma,
}


def _listed(item: str, least: int, most: int | None) -> str:
    """Items of a list in brackets."""
    if most == 0:
        return '"[]"'
    items = f'{item} ("," {item}){{{max(least - 1, 0)},{"" if most is None else most - 1}}}'
    return f'"[" {items} "]"' if least else f'"[" ({items})? "]"'


def _with_definitions(about: Any, root: Mapping[str, Any]) -> dict[str, Any]:
    """A part of a schema by itself."""
    whole = dict(about) if isinstance(about, Mapping) else {}
    return whole | {key: root[key] for key in ("$defs", "definitions") if key in root}


def _delimited(pattern: str) -> str:
    """A regular expression between slashes."""
    return re.sub(r"(\\.)|/", lambda found: found[1] or "\\/", pattern, flags=re.DOTALL)


def _json(schema: Mapping[str, Any]) -> str:
    return "%json " + json.dumps({**schema, "x-guidance": {"whitespace_pattern": WHITESPACE}})


def _quoted(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)


def _pattern(text: str) -> str:
    """A regular expression for exactly this text."""
    return "".join(char if char.isalnum() else f"\\x{{{ord(char):x}}}" for char in text)
