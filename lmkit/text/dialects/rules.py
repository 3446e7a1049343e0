"""Rules of a grammar in llguidance's form of Lark: fixed texts with special tokens, texts up to a mark, JSON values."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from lmkit.text.dialects.schemas import WORDS, patterns
from lmkit.text.held_schema import WHITESPACE

# In a fixed text: any digits, a line break and a space that may be left out, and any id.
NUMBER, LINE, SPACE, ID = "\0", "\1", "\3", "\4"
_PLACES = {LINE: '"\\n"?', SPACE: '" "?', NUMBER: "/[0-9]{1,10}/", ID: "/[a-zA-Z0-9._:-]{1,64}/"}
KEY = "/[a-zA-Z_][a-zA-Z0-9_.-]{0,63}/"
MAX_DEPTH = 8  # of objects in each other; what lies deeper may have any form


class Rules:
    """The rules of one grammar. Those that a method makes are part of it; the method returns what refers to them."""

    def __init__(self, token_id: Callable[[str], int | None], marks: Iterable[str]) -> None:
        """`marks`: those that are one token each if the tokenizer has them as such. No text contains them."""
        ids = {mark: token_id(mark) for mark in marks}
        self._special = {mark: ids[mark] for mark in sorted(ids, key=len, reverse=True) if ids[mark] is not None}
        self.rules = dict.fromkeys(["ANY: /(.|\\n)*/"])  # in their order

    def rule(self, name: str, text: str) -> str:
        self.rules[f"{name}: {text}"] = None
        return name.partition("[")[0]

    def is_special(self, text: str) -> bool:
        return text in self._special

    def literal(self, text: str) -> str:
        """A fixed text, in which special tokens are themselves."""
        parts = []
        for part in re.split(f"({'|'.join(map(re.escape, [*_PLACES, *self._special]))})", text):
            if part in _PLACES:
                parts.append(_PLACES[part])
            elif part in self._special:
                parts.append(f"<[{self._special[part]}]>")
            elif part:
                parts.append(quoted(part))
        return " ".join(parts)

    def _parted(self, text: str) -> tuple[str, str]:
        """A mark before its first special token, and from there on; that is "" if it has none."""
        at = min((text.find(mark) for mark in self._special if mark in text), default=len(text))
        return text[:at], text[at:]

    def without(self, name: str, mark: str) -> str:
        """A terminal: any text that does not contain `mark`."""
        if self._parted(mark)[1]:
            return "ANY"
        return self.rule(name, f"/(.|\\n)*/ & ~/(.|\\n)*{pattern(mark)}(.|\\n)*/")

    def up_to(self, name: str, mark: str) -> str:
        """Any text up to the first `mark`, and that."""
        before, special = self._parted(mark)
        if not special:
            return self.rule(f"{name}[suffix={quoted(mark)}]", "/(.|\\n)*/")
        text = self.rule(f"{name.upper()}_TEXT", f"/(.|\\n)*{pattern(before)}/") if before else "ANY"
        return f"{text} {self.literal(special)}"

    def json(self, schema: Mapping[str, Any]) -> str:
        return "%json " + json.dumps({**schema, "x-guidance": {"whitespace_pattern": WHITESPACE}})

    def texts(self, options: Sequence[Mapping[str, Any]], name: str, after: str) -> str:
        """A value that is a text or a word, and the mark after it."""
        if any(leaf.get("type") == "string" and not patterns(leaf) for leaf in options):
            return self.up_to(name, after)  # which includes the words
        found = []
        for idx, leaf in enumerate(options):
            if leaf.get("type") == "string":
                found.append(self._held_text(leaf, f"{name}_{idx}", after))
            else:
                words = leaf["enum"] if "enum" in leaf else WORDS[leaf["type"]]
                shown = (word if isinstance(word, str) else json.dumps(word) for word in words)
                found.append(f"({' | '.join(map(quoted, shown))}) {self.literal(after)}")
        return self.rule(f"{name}_text", " | ".join(found))

    def _held_text(self, leaf: Mapping[str, Any], name: str, after: str) -> str:
        """A string with a pattern, up to the first mark after it."""
        before, special = self._parted(after)
        mark = pattern(before)
        parts = [f"/({delimited(wanted)}){mark}/" for wanted in patterns(leaf)]
        if special:
            return f"{self.rule(name.upper(), ' & '.join(parts))} {self.literal(special)}"
        return self.rule(name.upper(), " & ".join([*parts, f"~/(.|\\n)*{mark}(.|\\n)+/"]))


def with_definitions(about: Any, root: Mapping[str, Any]) -> dict[str, Any]:
    """A part of a schema by itself."""
    whole = dict(about) if isinstance(about, Mapping) else {}
    return whole | {key: root[key] for key in ("$defs", "definitions") if key in root}


def quoted(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)


def pattern(text: str) -> str:
    """A regular expression for exactly this text."""
    return "".join(char if char.isalnum() else f"\\x{{{ord(char):x}}}" for char in text)


def delimited(text: str) -> str:
    """A regular expression between slashes."""
    return re.sub(r"(\\.)|/", lambda found: found[1] or "\\/", text, flags=re.DOTALL)
