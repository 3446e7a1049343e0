"""Arguments as Gemma writes them: {city:<escape>Oslo<escape>,days:3,units:[<escape>m<escape>]}. The mark differs."""

from __future__ import annotations

import json
import re
from typing import Any

from lmkit.text.dialects.reader import Reader, Steps
from lmkit.text.dialects.rules import Rules
from lmkit.text.dialects.schemas import Schema
from lmkit.text.dialects.syntaxes.nested import Nested, inside


class Gemma(Nested):
    is_sorted = True  # by the chat template

    def __init__(self, mark: str) -> None:
        """`mark` begins and ends a string, which has none."""
        self._mark, self.quotes = mark, (mark,)
        self.piece = rf"\s*(?:{re.escape(mark)}|[{{}}\[\]:,]|[^\s{{}}\[\]:,<][^{{}}\[\]:,<]*(?=[{{}}\[\]:,<]))"

    def read_string(self, reader: Reader, quote: str) -> Steps:
        yield from reader.until([quote], lambda text: reader.argue(inside(text)))

    def string(self, rules: Rules, leaf: Schema, name: str) -> str:
        return f"{rules.literal(self._mark)} {rules.texts([leaf], name, self._mark)}"

    def constant(self, rules: Rules, text: str) -> str:
        return rules.literal(self._mark + text + self._mark)

    def shown(self, value: Any) -> str:
        return f"{self._mark}{value}{self._mark}" if isinstance(value, str) else json.dumps(value)
