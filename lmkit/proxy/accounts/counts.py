"""Usage that stands beside an answer's text and not in `usage`: on Ollama's routes and on llama.cpp's own."""

from __future__ import annotations

import re
from contextlib import suppress
from typing import Any

import msgspec

from lmkit.errors import JSON_ERRORS
from lmkit.proxy.accounts.account import Usage
from lmkit.proxy.accounts.extent import Extent
from lmkit.proxy.accounts.usage import BYTES_PER_TOKEN, Reader, length, tokens
from lmkit.web.counts import MARK
from lmkit.web.ollama import PREFIX

NATIVE = ("/completion", "/infill")
UNCOUNTED = ("/api/show", "/api/pull")


class _Told(msgspec.Struct):
    """Numbers of one answer up to here. Ollama has them in the last line alone."""

    prompt_eval_count: Any = None
    eval_count: Any = None
    tokens_evaluated: Any = None
    tokens_predicted: Any = None
    index: int = 0
    done: bool = False
    response: Any = None  # texts of Ollama's parts
    message: Any = None
    thinking: Any = None

    def usage(self) -> Usage:
        prompt = tokens(self.prompt_eval_count) or tokens(self.tokens_evaluated)
        return Usage(prompt, 0, tokens(self.eval_count) or tokens(self.tokens_predicted))

    @property
    def num_bytes(self) -> int:
        """Of its text."""
        return sum(map(length, (self.response, self.thinking, self.message)))

    @property
    def adds_text(self) -> bool:
        """False: a part that only keeps the connection open."""
        said = self.message if isinstance(self.message, dict) else {}
        texts = (self.response, self.thinking, *(said.get(name) for name in ("content", "thinking", "tool_calls")))
        return any(texts)


_USAGE = re.compile(MARK + rb"(\d{1,10}) (\d{1,10}) (\d{1,10})")
_decode = msgspec.json.Decoder(_Told).decode
_decode_all = msgspec.json.Decoder(_Told | list[_Told]).decode


def reader_of(asked: Extent, path: str, most: Usage, bound: Usage, *, continuous: bool) -> Reader:
    """The reader of a route's answers; see `Reader`."""
    kind = Reader
    if path in UNCOUNTED:
        kind = NoReader
    elif path.startswith(PREFIX):
        kind = LineReader
    elif path in NATIVE:
        kind = NativeReader
    return kind(asked, path, most, bound, continuous=continuous)


class NoReader(Reader):
    """Of answers that no model writes."""

    def total(self, *, left: bool = False) -> Usage:
        return Usage()


class LineReader(Reader):
    """Of answers with a JSON object a line, the last of which may end without a break."""

    def whole(self, piece: bytes) -> None:
        self.begun = True
        self._passed += len(piece)
        if len(self._held) + len(piece) > self.MAX_HELD:
            self._held.clear()
            return
        *lines, rest = (bytes(self._held) + piece).split(b"\n")
        self._held = bytearray(rest)
        if self._passed == self.length:
            lines, self._held = [*lines, rest], bytearray()
        for line in lines:
            self._read(line)
        self.done = self._final or self._passed == self.length

    def events(self, piece: bytes) -> bytes:
        """Read whole lines. Returns those for the client: in its stream a node's usage so far is no comment."""
        self.begun = True
        self._passed += len(piece)
        kept = bytearray()
        for line in piece.splitlines(keepends=True):
            if told := _USAGE.fullmatch(line.strip()):
                self._counted(told)
            elif line.strip():
                self._read(line)
                kept += line
        return bytes(kept)

    def _read(self, line: bytes) -> None:
        with suppress(*JSON_ERRORS):
            told = _decode(line)
            self._deltas += told.adds_text
            self._text += told.num_bytes
            if told.done or told.prompt_eval_count:
                self._told, self._final = told.usage()._replace(cached=self._told.cached), True
            self.done = self.done or told.done

    def _total(self, left: bool) -> Usage:
        if self._held:
            self._read(bytes(self._held))
        if self._final:
            return self._told
        seen = max(self._deltas, self._text // BYTES_PER_TOKEN, 0 if self._text else self._passed // BYTES_PER_TOKEN)
        return Usage(self._prompt, 0, min(seen, self._most.output))


class NativeReader(Reader):
    """Of llama.cpp's answers: each event has the numbers of its choice so far."""

    def _line(self, match: re.Match[bytes]) -> bytes:
        self._deltas += 1
        with suppress(*JSON_ERRORS):
            told = _decode(match[1])
            if told.tokens_evaluated:
                self._parts[told.index] = told.usage()
        return match[0]

    def _total(self, left: bool) -> Usage:
        if self._held:
            with suppress(*JSON_ERRORS):
                found = _decode_all(bytes(self._held))
                self._parts |= {told.index: told.usage() for told in (found if isinstance(found, list) else [found])}
        if self._parts:
            return self._native_usage([])
        return Usage(self._prompt, 0, min(self._deltas or self._passed // BYTES_PER_TOKEN, self._most.output))
