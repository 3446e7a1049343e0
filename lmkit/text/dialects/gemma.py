"""Arguments as FunctionGemma writes them, as JSON: {city:<escape>Oslo<escape>,days:3,units:[<escape>m<escape>]}."""

from __future__ import annotations

import json
from collections.abc import Callable

from lmkit.text.dialects.table import ESCAPE

PIECE = rf"\s*(?:{ESCAPE}|[{{}}\[\]:,]|[^\s{{}}\[\]:,<][^{{}}\[\]:,<]*(?=[{{}}\[\]:,<]))"
_CLOSING = {"{": "}", "[": "]"}


class GemmaValue:
    """Takes the pieces of one value. A string is a piece up to its first mark; what it has is written by `inside`."""

    def __init__(self, scalar: Callable[[str, str], str]) -> None:
        """`scalar(key, word)` is the JSON of a word without marks. `key` is "" deeper than the members of the value."""
        self._scalar = scalar
        self._open: list[str] = []  # what closes the objects and lists that are open
        self._next = "value"  # or "key", ":" or "end"; "value?" and "key?" may be a closing bracket instead
        self._key = ""
        self.is_done = False

    def take(self, piece: str) -> str | None:
        """The JSON of a piece; None if it cannot stand here."""
        wanted = self._next.rstrip("?")
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
        if wanted in (":", "end") or piece in ("{", "[", ",", ":"):
            return None
        self._next = ":" if wanted == "key" else "end"
        if piece == ESCAPE:
            return '"'
        if wanted == "key":
            self._key = piece
            return json.dumps(piece, ensure_ascii=False)
        return self._scalar(self._key if self._open == ["}"] else "", piece)

    def _close(self, piece: str) -> str | None:
        if not self._open or self._open[-1] != piece or self._next not in ("end", "key?", "value?"):
            return None
        self._open.pop()
        self._next, self.is_done = "end", not self._open
        return piece


def inside(text: str) -> str:
    """A part of a string, as it stands between quotation marks in JSON."""
    return json.dumps(text, ensure_ascii=False)[1:-1]
