"""What a dialect is: how calls of tools are written.

A call consists of

    begin  header  arguments  tail        hermes: <tool_call>\\n{"name": "f", "arguments": {...}}\\n</tool_call>

where `header` has the function's name and `tail` closes the call. `again` stands between calls that share one `begin`,
and `close` after the last of them. Patterns end with a fixed text or with a look-ahead, so a match does not depend on
how the text was cut into pieces.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from lmkit.text.dialects.rules import ID, LINE, NUMBER, SPACE
from lmkit.text.dialects.syntaxes.base import JSON, Syntax

NEVER = r"(?!)"
NAME = r'"(?P<name>[^"\\]{1,128})"'
BARE_NAME = r"(?P<name>[^\s<>{}\[\]\"]{1,128})"
OBJECT = r'\s*\{\s*"name"\s*:\s*' + NAME + r'\s*,\s*"(?:arguments|parameters)"\s*:\s*(?=[^\s])'


@dataclass(frozen=True)
class Dialect:
    """How calls of tools are written. `written` and `between` are what a grammar makes the model write.

    `written` is (text before the name, text before the arguments, text after them), with places as in `rules`. The
    first call has `opening` before it, further calls have `between`, and the last one `closing` after it.
    """

    name: str
    marks: tuple[str, ...]  # in the chat templates of such models; () = no template shows it
    begin: str
    header: str
    tail: str
    written: tuple[str, str, str]
    open: str = ""  # a pattern that may stand after `begin`
    again: str = NEVER
    close: str = NEVER
    opening: str = ""
    between: str = ""
    closing: str = ""
    syntax: Syntax = JSON
    parallel: bool = True  # an answer may have several calls
    in_object: bool = False  # name and arguments are members of one JSON object
    bare: bool = False  # calls of tools that there are may stand in the text without marks (dialects.bare)
    starts: tuple[str, ...] = ()  # patterns in a row: an answer that starts with them starts with a call, without marks
    specials: tuple[str, ...] = ()  # marks that may be special tokens
    num_id_chars: int = 24  # of a call's id
    id_form: str = ""  # a call's id, from the function's `name` and the call's `number` in the conversation

    def text(self, calls: Sequence[tuple[str, Mapping[str, Any]]]) -> str:
        """Calls as the model writes them."""
        before, between, after = self.written
        texts = [
            f"{before}{name}{between}".replace(NUMBER, str(idx)).replace(ID, f"call{idx:05}")
            + self.syntax.text(arguments)
            + after
            for idx, (name, arguments) in enumerate(calls)
        ]
        return (self.opening + self.between.join(texts) + self.closing).replace(LINE, "\n").replace(SPACE, " ")


def listed(name: str, marks: tuple[str, ...], begin: str, end: str = "", **fields: Any) -> Dialect:
    """A dialect whose calls are a JSON list of objects between two marks."""
    own: dict[str, Any] = {
        "open": r"\s*\[(?=\s*\{)",
        "again": r"\s*,(?=\s*\{)",
        "close": r"\s*\]" + (r"\s*" + re.escape(end) if end else ""),
        "opening": f"{begin}[",
        "between": ", ",
        "closing": f"]{end}",
        "in_object": True,
        "written": ('{"name": "', '", "arguments": ', "}"),
        "specials": tuple(mark for mark in (begin, end) if mark),
        "tail": r"\s*\}",
    }
    return Dialect(name, marks, begin, OBJECT, **own | fields)


def single(name: str, marks: tuple[str, ...], begin: str, end: str, **fields: Any) -> Dialect:
    """A dialect whose calls are JSON objects, each between two marks."""
    tail = r"\s*\}\s*" + re.escape(end) if end.strip() else r"\s*\}"
    own: dict[str, Any] = {"specials": tuple(mark for mark in (begin, end) if mark), "in_object": True}
    return Dialect(name, marks, begin, OBJECT, tail, **own | fields)
