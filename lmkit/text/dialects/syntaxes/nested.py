"""Arguments in a notation of its own for nested values, with its own quotation marks. Gemma's and Python's are such."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from typing import Any

from lmkit.text.dialects.reader import Reader, Steps
from lmkit.text.dialects.rules import KEY, MAX_DEPTH, Rules, quoted
from lmkit.text.dialects.schemas import Schema, leaves, types_by_name, value_of
from lmkit.text.dialects.syntaxes.base import Syntax

_CLOSING = {"{": "}", "[": "]"}
_PYTHON = {"True": "true", "False": "false", "None": "null"}


class NestedValue:
    """Takes the pieces of one value: brackets, colons, commas, words, and the mark that begins a string."""

    def __init__(self, scalar: Callable[[str, str], str]) -> None:
        """`scalar(key, word)` is the JSON of a word without marks. `key` is "" deeper than the members of the value."""
        self._scalar = scalar
        self._open: list[str] = []  # what closes the objects and lists that are open
        self._next = "value"  # or "key", ":" or "end"; "value?" and "key?" may be a closing bracket instead
        self._key = ""
        self.is_done = False

    def take(self, piece: str, *, is_string: bool = False) -> str | None:
        """The JSON of a piece; None if it cannot stand here. Of a string it is the first quotation mark."""
        wanted = self._next.rstrip("?")
        if is_string or piece not in "{}[],:":
            if wanted in (":", "end"):
                return None
            self._next = ":" if wanted == "key" else "end"
            if is_string:
                return '"'
            if wanted == "key":
                self._key = piece
                return json.dumps(piece, ensure_ascii=False)
            return self._scalar(self._key if self._open == ["}"] else "", piece)
        if piece in ("}", "]"):
            return self._close(piece)
        if wanted == "value" and piece in _CLOSING:
            self._open.append(_CLOSING[piece])
            self._next = "key?" if piece == "{" else "value?"
            return piece
        if wanted == "end" and piece == "," and self._open:
            self._next = "key" if self._open[-1] == "}" else "value"
            return ", "
        if wanted == ":" and piece == ":":
            self._next = "value"
            return ": "
        return None

    def _close(self, piece: str) -> str | None:
        if not self._open or self._open[-1] != piece or self._next not in ("end", "key?", "value?"):
            return None
        self._open.pop()
        self._next, self.is_done = "end", not self._open
        return piece


def inside(text: str) -> str:
    """A part of a string, as it stands between quotation marks in JSON."""
    return json.dumps(text, ensure_ascii=False)[1:-1]


class Nested(Syntax):
    """What such notations have in common. Each says how it marks strings, keys and the outermost object."""

    piece: str  # a pattern of one piece, after white space
    quotes: tuple[str, ...]  # marks that begin a string
    meanings: Mapping[str, str] = {}  # pieces that are other ones of NestedValue
    outer = ("{", "}")  # around all arguments
    comma = ","  # between members and between items, as it is written
    is_sorted = False  # members by their names

    def read(self, reader: Reader, schema: Any) -> Steps:
        types = types_by_name(schema)
        value = NestedValue(lambda key, word: _PYTHON.get(word) or value_of(word, types.get(key, ())))
        while found := (yield from reader.match(self.piece)):
            piece = found[0].strip()
            is_string = piece in self.quotes
            written = value.take(self.meanings.get(piece, piece), is_string=is_string)
            if written is None:
                reader.turn()
                reader.say("content")(found[0])
                return False
            reader.argue(written)
            if is_string:
                yield from self.read_string(reader, piece)
                reader.argue('"')
            if value.is_done:
                return True
        return False

    def read_string(self, reader: Reader, quote: str) -> Steps:
        """Emit the text of a string whose first mark is read, and read its last."""
        raise NotImplementedError

    # ---- the grammar

    def key(self, rules: Rules, key: str | None, depth: int) -> str:
        """A key and the colon after it; any key for None."""
        return f'{rules.rule("KEY", KEY)} ":"' if key is None else quoted(f"{key}:")

    def string(self, rules: Rules, leaf: Schema, name: str) -> str:
        """A string of a schema, with its marks."""
        raise NotImplementedError

    def word(self, rules: Rules, leaf: Schema) -> str:
        """A number, a boolean or null of a schema."""
        return rules.json(leaf)

    def written_comma(self, rules: Rules) -> str:
        return quoted(self.comma)

    def rules(self, rules: Rules, schema: Schema, name: str) -> str:
        return self._object(rules, schema, schema, name, 0)

    def _object(self, rules: Rules, about: Schema, root: Schema, name: str, depth: int) -> str:
        """Members in their order, with commas between those that are there."""
        properties = about.get("properties") or {}
        if not properties and about.get("additionalProperties", True) is not False:
            self._any(rules)
            return self._bracketed(self._any_members(rules, depth), depth)
        first, later = '""', '""'  # of the members that are left: if none was written, and if one was
        required = about.get("required") or ()
        keys = sorted(properties, key=str.lower) if self.is_sorted else properties
        for idx, key in reversed(list(enumerate(keys))):
            value = self._value(rules, properties[key], root, f"{name}_{idx}", depth + 1)
            member = rules.rule(f"{name}_m{idx}", f"{self.key(rules, key, depth)} {value}")
            skipped = ("", "") if key in required else (f" | {first}", f" | {later}")
            first = rules.rule(f"{name}_f{idx}", f"{member} {later}{skipped[0]}")
            later = rules.rule(f"{name}_l{idx}", f"{self.written_comma(rules)} {member} {later}{skipped[1]}")
        return self._bracketed(first, depth)

    def _bracketed(self, members: str, depth: int) -> str:
        begin, end = ("{", "}") if depth else self.outer
        return f"{quoted(begin)} {members} {quoted(end)}"

    def _value(self, rules: Rules, about: Any, root: Schema, name: str, depth: int) -> str:
        if depth > MAX_DEPTH:
            return self._any(rules)
        options = (
            self._leaf(rules, leaf, root, f"{name}_{idx}", depth) for idx, leaf in enumerate(leaves(about, root))
        )
        return rules.rule(name, " | ".join(options))

    def _leaf(self, rules: Rules, leaf: Schema, root: Schema, name: str, depth: int) -> str:
        if "enum" in leaf:
            return " | ".join(
                self.constant(rules, word) if isinstance(word, str) else self.word(rules, {"const": word})
                for word in leaf["enum"]
            )
        match leaf.get("type"):
            case "string":
                return self.string(rules, leaf, f"{name}_s")
            case "integer" | "number" | "boolean" | "null":
                return self.word(rules, leaf)
            case "object":
                return self._object(rules, leaf, root, f"{name}_o", depth)
            case "array" if "prefixItems" not in leaf:
                item = self._value(rules, leaf.get("items", {}), root, f"{name}_i", depth + 1)
                return self._listed(rules, item, leaf.get("minItems", 0), leaf.get("maxItems"))
        return self._any(rules)

    def constant(self, rules: Rules, text: str) -> str:
        """A certain string, with its marks."""
        raise NotImplementedError

    def _listed(self, rules: Rules, item: str, least: int, most: int | None) -> str:
        """Items of a list in brackets."""
        if most == 0:
            return '"[]"'
        further = f"({self.written_comma(rules)} {item}){{{max(least - 1, 0)},{'' if most is None else most - 1}}}"
        return f'"[" {item} {further} "]"' if least else f'"[" ({item} {further})? "]"'

    def _any(self, rules: Rules) -> str:
        text, word = self.string(rules, {"type": "string"}, "any_text"), {"type": ["number", "boolean", "null"]}
        rules.rule("any_object", self._bracketed(self._any_members(rules, 1), 1))
        options = [text, self.word(rules, word), self._listed(rules, "any_value", 0, None), "any_object"]
        return rules.rule("any_value", " | ".join(options))

    def _any_members(self, rules: Rules, depth: int) -> str:
        member = f"{self.key(rules, None, depth)} any_value"
        return f"({member} ({self.written_comma(rules)} {member})*)?"

    # ---- a text

    def text(self, arguments: Mapping[str, Any]) -> str:
        return self._text(arguments, 0)

    def _text(self, value: Any, depth: int) -> str:
        if isinstance(value, Mapping):
            members = sorted(value.items(), key=lambda item: item[0].lower()) if self.is_sorted else value.items()
            begin, end = ("{", "}") if depth else self.outer
            shown = (self.shown_key(key, depth) + self._text(item, depth + 1) for key, item in members)
            return begin + self.comma.join(shown) + end
        if isinstance(value, list):
            return "[" + self.comma.join(self._text(item, depth + 1) for item in value) + "]"
        return self.shown(value)

    def shown_key(self, key: str, depth: int) -> str:
        return f"{key}:"

    def shown(self, value: Any) -> str:
        """A string, a number, a boolean or None."""
        raise NotImplementedError
