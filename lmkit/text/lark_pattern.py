"""A grammar in Lark's syntax as one regular expression, where no rule of it leads to itself.

So a text inside of a JSON string can be held to it: a JSON schema has patterns, and no grammars.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator, Mapping

MAX_CHARS = 64 << 10  # of the expression
MAX_DEPTH = 64  # of rules and brackets in each other
# Lark's terminals of `%import common.NAME`
_COMMON: Mapping[str, str] = {
    "CNAME": "[_a-zA-Z][_a-zA-Z0-9]*", "CR": "\\r", "DIGIT": "[0-9]", "ESCAPED_STRING": r'"(?:[^"\\\n]|\\.)*"',
    "HEXDIGIT": "[a-fA-F0-9]", "INT": "[0-9]+", "LCASE_LETTER": "[a-z]", "LETTER": "[a-zA-Z]", "LF": "\\n",
    "NEWLINE": "(?:\\r?\\n)+", "SIGNED_INT": "[+-]?[0-9]+", "UCASE_LETTER": "[A-Z]", "WORD": "[a-zA-Z]+",
    "WS": "[ \\t\\f\\r\\n]+", "WS_INLINE": "[ \\t]+",
}  # fmt: skip
_TOKEN = re.compile(r"""
    (?P<space>\s+|//[^\n]*|\#[^\n]*)
  | (?P<string>"(?:\\.|[^"\\\n])*"i?)
  | (?P<regex>/(?:\\.|[^/\\\n])+/[imsux]*)
  | (?P<head>[!?]*[A-Za-z_]\w*(?:\.-?\d+)?\s*:)
  | (?P<common>%import\s+common\s*(?:\.\s*\w+|\([\w\s,]+\))[ \t]*(?=\n|$))
  | (?P<alias>->\s*\w+)
  | (?P<times>~\s*\d+(?:\s*\.\.\s*\d+)?)
  | (?P<name>[A-Za-z_]\w*)
  | (?P<sign>[|()\[\]?*+])
""", re.VERBOSE)  # fmt: skip

Token = tuple[str, str]  # kind, text


def pattern_of(grammar: str) -> str | None:
    """The expression for the texts of a grammar; None for one that has none, or that is not understood."""
    try:
        pattern = _Rules(grammar).expand("start", 0)
    except (ValueError, SyntaxError):
        return None
    return pattern if len(pattern) <= MAX_CHARS else None


def _tokens(text: str) -> Iterator[Token]:
    at = 0
    while at < len(text):
        found = _TOKEN.match(text, at)
        if found is None:
            raise ValueError("it is not understood")
        if found.lastgroup not in ("space", "alias"):
            yield str(found.lastgroup), found[0]
        at = found.end()


class _Rules:
    def __init__(self, grammar: str) -> None:
        self._bodies: dict[str, list[Token]] = {}
        self._open: set[str] = set()  # rules that are being written
        self._done: dict[str, str] = {}
        self._left = 4 * MAX_CHARS  # characters that may still be put together
        body: list[Token] = []
        for kind, text in _tokens(grammar):
            if kind == "head":
                body = self._bodies.setdefault(re.split(r"[.\s:]", text.lstrip("!?"))[0], [])
                if body:
                    raise ValueError("a rule stands twice")
            elif kind == "common":
                names = re.findall(r"\w+", text)[2:]
                self._done |= {name: f"(?:{_COMMON[name]})" for name in names if name in _COMMON}
            else:
                body.append((kind, text))

    def expand(self, name: str, depth: int) -> str:
        """The expression of a rule. Raises ValueError for one that leads to itself, or is not there."""
        if name in self._done:
            return self._done[name]
        if name not in self._bodies or name in self._open or depth > MAX_DEPTH:
            raise ValueError("no regular expression says it")
        self._open.add(name)
        tokens = self._bodies[name][::-1]
        found = self._alternatives(tokens, depth + 1)
        if tokens:
            raise ValueError("a bracket is not open")
        self._open.remove(name)
        self._done[name] = found
        return found

    def _alternatives(self, tokens: list[Token], depth: int) -> str:
        """All up to the end or to a closing bracket, which stays. The first token is the last of the list."""
        written: list[str] = []
        sequence = ""
        while tokens and tokens[-1][1] not in (")", "]"):
            kind, text = tokens.pop()
            if (kind, text) == ("sign", "|"):
                written.append(sequence)
                sequence = ""
            else:
                part = self._repeated(self._one(kind, text, tokens, depth), tokens)
                self._left -= len(part)
                if self._left < 0:
                    raise ValueError("it is too long")
                sequence += part
        return f"(?:{'|'.join([*written, sequence])})"

    def _one(self, kind: str, text: str, tokens: list[Token], depth: int) -> str:
        if kind == "name":
            return self.expand(text, depth)
        if kind == "string":
            plain = "".join(f"\\x{{{ord(char):x}}}" for char in ast.literal_eval(text.removesuffix("i")))
            return f"(?i:{plain})" if text.endswith("i") else f"(?:{plain})"
        if kind == "regex":
            inside, _, flags = text[1:].rpartition("/")
            return f"(?{flags.replace('u', '')}:{inside})"
        if kind == "sign" and text in "([" and depth < MAX_DEPTH:
            inner = self._alternatives(tokens, depth + 1)
            if not tokens or tokens.pop()[1] != {"(": ")", "[": "]"}[text]:
                raise ValueError("a bracket is not closed")
            return inner if text == "(" else f"{inner}?"
        raise ValueError("it is not understood")

    def _repeated(self, one: str, tokens: list[Token]) -> str:
        while tokens and (tokens[-1][0] == "times" or tokens[-1][1] in ("?", "*", "+")):
            text = tokens.pop()[1]
            times = re.findall(r"\d+", text)
            one = f"(?:{one}{'{' + ','.join(times) + '}' if times else text})"
        return one
