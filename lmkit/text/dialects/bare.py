"""Calls without marks, as Qwen2.5-Coder writes them: {"name": ..., "arguments": {...}}, bare or in a fence."""

from __future__ import annotations

import re
from typing import NamedTuple


class Form(NamedTuple):
    """A text that may stand here. `begun` matches each text that it can begin with."""

    whole: re.Pattern[str]
    begun: re.Pattern[str]


def form(atoms: list[str], word: str = "", whole: str = "") -> Form:
    """Patterns in a row, perhaps after a `word`. `whole`: what is read of them, if that is not all."""
    begun = ""
    for atom in reversed(atoms):
        begun = f"(?:{atom}{begun})?"
    parts = [re.escape(word[:end]) for end in range(1, len(word))]
    optional = f"(?:{word})?"
    return Form(re.compile(whole or optional + "".join(atoms)), re.compile("|".join([*parts, optional + begun])))


def spelled(text: str) -> list[str]:
    return [re.escape(char) for char in text]


_OBJECT = [
    r"\{", r"\s*", *spelled('"name"'), r"\s*", ":", r"\s*", '"', r"(?P<name>[^\"\\]{0,128})", '"', r"\s*", ",", r"\s*",
    '"', r"[a-z]{0,10}", r"(?:(?<=\"arguments)|(?<=\"parameters))", '"', r"\s*", ":", r"\s*", r"(?=\{)",
]  # fmt: skip
BARE = form([r"[\s,;]*", *_OBJECT])
FENCED = form([r"\s*", *_OBJECT], "json")  # after the mark
FENCE = "```"
STARTS = {FENCE: FENCED, "\n{": BARE}  # marks in a text where such a call may stand; the object is read again
CLOSED = {
    fence: form([r"\s*", *spelled("}"), *([r"\s*", *spelled(FENCE)] if fence else [])]) for fence in (True, False)
}
LEFT_OVER = form([r"\s*", *spelled("</tool_call>")])  # the mark that ends a call, without the one that begins it
