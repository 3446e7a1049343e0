"""Arguments as Python writes them: (city="Oslo", days=3, units=["m"]). Words and strings of JSON are read, too."""

from __future__ import annotations

import json
from typing import Any

from lmkit.text.dialects.reader import Reader, Steps
from lmkit.text.dialects.rules import KEY, Rules, quoted
from lmkit.text.dialects.schemas import Schema, patterns
from lmkit.text.dialects.syntaxes.nested import Nested, inside

_ESCAPED = {"n": "\n", "t": "\t", "r": "\r", "b": "\b", "f": "\f", "a": "\a", "v": "\v", "0": "\0", "\n": ""}
_CODE = r"x[0-9a-fA-F]{2}|u[0-9a-fA-F]{4}|U[0-9a-fA-F]{8}"
_ESCAPE = r'\\(["\'\\\/bfnrt]|u[0-9a-fA-F]{4})'
_STRING = rf'/"([^"\\\n]|{_ESCAPE})*"|\'([^\'\\]|{_ESCAPE})*\'/'
_WORDS = {
    "boolean": ("True", "False", "true", "false"),
    "null": ("None", "null"),
}


class Pythonic(Nested):
    quotes = ('"', "'")
    piece = r"\s*(?:[\"'{}\[\]():=,]|[^\s\"'{}\[\]():=,]+(?=[\s\"'{}\[\]():=,]))"
    meanings = {"(": "{", ")": "}", "=": ":"}
    outer = ("(", ")")
    comma = ", "

    def read_string(self, reader: Reader, quote: str) -> Steps:
        """A quotation mark ends the string where something else can follow. Some templates escape none."""
        plain = rf"[^{quote}\\]+|{quote}(?=\s*[^\s,)\]}}:])"
        escape = rf"(?P<code>{_CODE})|[^xuU]|[xuU](?![0-9a-fA-F]{{0,7}}\Z)"
        pattern = rf"(?s:{plain}|(?P<end>{quote})(?=\s*[,)\]}}:])|\\(?P<escape>{escape}))"
        while found := (yield from reader.match(pattern)):
            if found["end"]:
                return
            if found["escape"] is None:
                reader.argue(inside(found[0]))
            elif found["code"]:
                reader.argue(_char(found["code"]))
            else:
                char = found["escape"]
                reader.argue(inside(_ESCAPED.get(char, char if char in "\"'\\/" else found[0])))

    def key(self, rules: Rules, key: str | None, depth: int) -> str:
        if depth == 0:
            return f'{rules.rule("KEY", KEY)} "="' if key is None else quoted(f"{key}=")
        if key is None:
            return f"{rules.rule('STRING', _STRING)} {rules.rule('COLON', '/: ?/')}"
        return f"({quoted(json.dumps(key, ensure_ascii=False))} | {quoted(repr(key))}) {rules.rule('COLON', '/: ?/')}"

    def string(self, rules: Rules, leaf: Schema, name: str) -> str:
        return rules.json(leaf) if patterns(leaf) else rules.rule("STRING", _STRING)

    def constant(self, rules: Rules, text: str) -> str:
        return f"{quoted(json.dumps(text, ensure_ascii=False))} | {quoted(repr(text))}"

    def word(self, rules: Rules, leaf: Schema) -> str:
        if "const" in leaf:
            return f"({quoted(json.dumps(leaf['const']))} | {quoted(repr(leaf['const']))})"
        kinds = [leaf["type"]] if isinstance(leaf["type"], str) else leaf["type"]
        options = [quoted(word) for kind in kinds for word in _WORDS.get(kind, ())]
        if numbers := [kind for kind in kinds if kind not in _WORDS]:
            options.append(rules.json({**leaf, "type": numbers[0]}))
        return f"({' | '.join(options)})"

    def written_comma(self, rules: Rules) -> str:
        return rules.rule("COMMA", "/, ?/")

    def shown_key(self, key: str, depth: int) -> str:
        return f"{json.dumps(key, ensure_ascii=False)}: " if depth else f"{key}="

    def shown(self, value: Any) -> str:
        return json.dumps(value, ensure_ascii=False) if isinstance(value, str) else repr(value)


def _char(code: str) -> str:
    """The character of an escape, as it stands in JSON: halves of UTF-16 may follow each other."""
    number = int(code[1:], 16)
    if number <= 0xFFFF:
        return f"\\u{number:04x}"
    return inside(chr(number) if number <= 0x10FFFF else "\ufffd")
