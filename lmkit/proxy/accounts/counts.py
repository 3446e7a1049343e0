"""Usage that stands beside an answer's text and not in `usage`: on Ollama's routes and on llama.cpp's own."""

from __future__ import annotations

import re
from contextlib import suppress
from typing import Any

import msgspec

from lmkit.proxy.accounts.account import Usage
from lmkit.proxy.accounts.usage import BYTES_PER_TOKEN, Extent, Reader
from lmkit.web.ollama import GENERATION, PREFIX
from lmkit.web.receive import decode_json

NATIVE = ("/completion", "/infill")
UNCOUNTED = ("/api/show", "/api/pull")


class _Told(msgspec.Struct):
    """Numbers of one answer up to here. Ollama has them in the last line alone."""

    prompt_eval_count: int = 0
    eval_count: int = 0
    tokens_evaluated: int = 0
    tokens_predicted: int = 0
    index: int = 0
    done: bool = False
    response: Any = None  # texts of Ollama's parts
    message: Any = None
    thinking: Any = None

    def usage(self) -> Usage:
        told = self.prompt_eval_count or self.tokens_evaluated, 0, self.eval_count or self.tokens_predicted
        return Usage(*(max(0, value) for value in told))

    @property
    def adds_text(self) -> bool:
        """False: a part that only keeps the connection open."""
        said = self.message if isinstance(self.message, dict) else {}
        texts = (self.response, self.thinking, *(said.get(name) for name in ("content", "thinking", "tool_calls")))
        return any(texts)


class _Limits(msgspec.Struct):
    """What a body of Ollama's routes says of an answer's length."""

    options: Any = None


_decode = msgspec.json.Decoder(_Told).decode
_decode_all = msgspec.json.Decoder(_Told | list[_Told]).decode


def extent_of(path: str, body: bytes) -> Extent:
    """What a request may use. Fields that the route does not know do not count. Raises RequestError."""
    asked: Extent = decode_json(body, Extent)
    if not path.startswith(PREFIX):
        return asked
    limits: _Limits = decode_json(body, _Limits)
    options = limits.options if isinstance(limits.options, dict) else {}
    return Extent(asked.model, priority=asked.priority, max_tokens=options.get("num_predict"))


def reader_of(asked: Extent, path: str, num_bytes: int, *, continuous: bool) -> Reader:
    """The reader of a route's answers; see `Reader`."""
    if path in UNCOUNTED:
        return NoReader(asked, path, num_bytes, continuous=continuous)
    if path.startswith(PREFIX):
        return LineReader(asked, path, num_bytes, continuous=continuous)
    if path in NATIVE:
        return NativeReader(asked, path, num_bytes, continuous=continuous)
    return Reader(asked, path, num_bytes, continuous=continuous)


class NoReader(Reader):
    """Of answers that no model writes."""

    def total(self) -> Usage:
        return Usage()


class LineReader(Reader):
    """Of answers with a JSON object a line, the last of which may end without a break."""

    def __init__(self, asked: Extent, path: str, num_bytes: int, *, continuous: bool) -> None:
        super().__init__(asked, path, num_bytes, continuous=continuous)
        self._writes = path in GENERATION

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

    def _read(self, line: bytes) -> None:
        with suppress(msgspec.MsgspecError, RecursionError):
            told = _decode(line)
            self._deltas += told.adds_text
            if told.done or told.prompt_eval_count:
                self._told, self._final = told.usage(), True

    def total(self) -> Usage:
        if self._held:
            self._read(bytes(self._held))
        if self._final:
            return self._told
        return Usage(self._prompt, 0, (self._deltas or self._passed // BYTES_PER_TOKEN) if self._writes else 0)


class NativeReader(Reader):
    """Of llama.cpp's answers: each event has the numbers of its choice so far."""

    def _line(self, match: re.Match[bytes]) -> bytes:
        with suppress(msgspec.MsgspecError, RecursionError):
            told = _decode(match[1])
            self._deltas += 1
            if told.tokens_evaluated:
                self._parts[told.index] = told.usage()
        return match[0]

    def total(self) -> Usage:
        if self._held:
            with suppress(msgspec.MsgspecError, RecursionError):
                found = _decode_all(bytes(self._held))
                self._parts |= {told.index: told.usage() for told in (found if isinstance(found, list) else [found])}
        if self._parts:
            return self._native_usage([])
        return Usage(self._prompt, 0, self._deltas or self._passed // BYTES_PER_TOKEN)
