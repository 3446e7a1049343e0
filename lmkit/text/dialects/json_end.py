"""The end of a JSON value in a text that comes in pieces."""

from __future__ import annotations

import re


class JsonEnd:
    """Finds the end of a JSON value in a text that comes in pieces."""

    def __init__(self) -> None:
        self._depth, self._in_string, self._escaped, self._begun = 0, False, False, False
        self.is_done = False

    def feed(self, text: str) -> int:
        """The number of characters of `text` that belong to the value."""
        at = 0
        while at < len(text):
            if self._escaped:
                self._escaped, at = False, at + 1
                continue
            pattern = _IN_STRING if self._in_string else _OUTSIDE if self._depth or not self._begun else _SCALAR
            if self._begun is False and text[at] not in '{["' and not text[at].isspace():
                self._begun = True
                continue
            found = pattern.search(text, at)
            if found is None:
                return len(text)
            at = found.end()
            match found[0]:
                case "\\":
                    self._escaped = True
                case '"':
                    self._in_string, self._begun = not self._in_string, True
                    self.is_done = not self._in_string and not self._depth
                case "{" | "[" if self._depth or not self._begun:
                    self._depth, self._begun = self._depth + 1, True
                case "}" | "]" if self._depth:
                    self._depth -= 1
                    self.is_done = not self._depth
                case _:  # after a number or a word
                    self.is_done = True
                    return at - 1
            if self.is_done:
                return at
        return at


_IN_STRING = re.compile(r'["\\]')
_OUTSIDE = re.compile(r'["{}\[\]]')
_SCALAR = re.compile(r'[\s,{}\[\]<"]')
