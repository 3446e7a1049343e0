"""What an answer has used: read from the usage that it tells, on every route and in each of its forms.

A stream of chunks tells its usage only if the request asks for it. The proxy asks with each chunk, so that the tokens
of a client that leaves are known, and takes out what the client did not ask for. If a node puts the usage last in its
chunks, as lmkit and vLLM do, the client gets the bytes that it would have got.
"""

from __future__ import annotations

import re
from contextlib import suppress
from typing import Any

import msgspec

from lmkit.errors import JSON_ERRORS
from lmkit.proxy.accounts.account import Usage
from lmkit.proxy.accounts.extent import MAX_CONTEXT, Extent
from lmkit.web.counts import MARK
from lmkit.whole import whole

CHUNKED = ("/v1/chat/completions", "/v1/completions")  # routes whose streams are chunks
BYTES_PER_TOKEN = 4  # of a usual text, where no better number is known
MAX_TAIL = 4096
_NO_TEXT = {"type", "role", "id", "finish_reason", "logprobs", "token_ids"}
_LINE = re.compile(rb"(?m)^data: ?([^\r\n]+)(?:\r\n|\n|\r){1,2}")
_NUMBERS = re.compile(rb"(\d{1,10}) (\d{1,10}) (\d{1,10})")
_COUNTS = re.compile(rb"(?m)^" + MARK + _NUMBERS.pattern + rb"\n\n")
_LAST = re.compile(rb'"usage":(\{[^{}]*(?:\{[^{}]*\}[^{}]*)*\})')


class _Details(msgspec.Struct):
    cached_tokens: Any = None


class _Told(msgspec.Struct):
    """OpenAI's two forms and Anthropic's. A node may write anything: what is no number of tokens counts as none."""

    prompt_tokens: Any = None
    completion_tokens: Any = None
    input_tokens: Any = None
    output_tokens: Any = None
    prompt_tokens_details: _Details | None = None
    input_tokens_details: _Details | None = None
    cache_read_input_tokens: Any = None  # not part of Anthropic's input_tokens
    cache_creation_input_tokens: Any = None
    cached_tokens: Any = None  # of /generate

    def usage(self) -> Usage:
        details = self.prompt_tokens_details or self.input_tokens_details
        read, made = tokens(self.cache_read_input_tokens), tokens(self.cache_creation_input_tokens)
        told = (tokens(self.prompt_tokens) or tokens(self.input_tokens)) + read + made
        cached = min(told, read + (tokens(details and details.cached_tokens) or tokens(self.cached_tokens)))
        return Usage(told, cached, tokens(self.completion_tokens) or tokens(self.output_tokens))


def tokens(value: Any) -> int:
    """A number of tokens that a node tells; 0 for what is none."""
    return min(max(whole(value) or 0, 0), MAX_CONTEXT)


class _Holder(msgspec.Struct):
    usage: _Told | None = None


class _Part(msgspec.Struct):
    """An answer of /generate, or a part of one. Its numbers are those of its choice up to here."""

    meta_info: _Told
    index: int = 0


class _Event(msgspec.Struct):
    usage: _Told | None = None
    response: _Holder | None = None  # of the Responses API
    message: _Holder | None = None  # of the Messages API
    choices: list[msgspec.Raw] | None = None


class _OnlyUsage(msgspec.Struct, forbid_unknown_fields=True):
    usage: _Told | None


_decode_event = msgspec.json.Decoder(_Event).decode
_decode_part = msgspec.json.Decoder(_Part).decode
_decode_tail = msgspec.json.Decoder(_OnlyUsage).decode
_decode_told = msgspec.json.Decoder(_Told).decode


def _decode_answers(data: bytes | bytearray) -> list[_Part]:
    """The answers of /generate: one, or a list."""
    found = msgspec.json.decode(data, type=_Part | list[_Part])
    return found if isinstance(found, list) else [found]


def _text_bytes(data: bytes) -> int:
    """The length of the new text in an event, of any API."""
    try:
        event = msgspec.json.decode(data, type=dict[str, Any])
        return sum(length(event.get(name)) for name in ("delta", "choices"))
    except JSON_ERRORS:
        return 0


def length(value: Any) -> int:
    """The bytes of all texts in a part of an event."""
    if isinstance(value, str):
        return len(value.encode())
    if isinstance(value, dict):
        value = [item for name, item in value.items() if name not in _NO_TEXT]
    return sum(map(length, value)) if isinstance(value, list) else 0


class Reader:
    """Reads the usage of one answer, and takes out of a stream what its client did not ask for."""

    MAX_HELD = 16 << 20  # bytes of an answer that is no stream; of a longer one, the usage at its end is read

    def __init__(self, asked: Extent, path: str, most: Usage, bound: Usage, *, continuous: bool) -> None:
        """`most` is reserved: no estimate is above it. Nothing that a node tells counts above `bound`. `continuous`:
        nodes are asked for the usage with every chunk."""
        options = asked.stream_options
        self._chunked = bool(asked.stream) and path in CHUNKED
        self._native = path == "/generate"
        self._wanted = options.get("include_usage") is True
        self._wanted_each = self._wanted and options.get("continuous_usage_stats") is True
        self._continuous = continuous
        self._options = options
        self._most, self._bound = most, bound
        prompt = asked.num_bytes // BYTES_PER_TOKEN + asked.audio_tokens
        self._prompt = min(prompt, most.input)  # until the answer tells
        self._told = Usage()
        self._choices = asked.num_choices  # of a prompt
        self._parts = dict[int, Usage]()  # of the choices of /generate
        self._held = bytearray()
        self._tail = b""  # of a long whole answer
        self._passed = 0  # bytes of a whole answer
        self._deltas = self._text = 0  # events with text, and its bytes
        self._final = False  # the usage told is that of the whole answer, or of all so far
        self.length = -1  # of an answer that is no stream, if it is known
        self.done = False  # what comes next ends the answer: a client may take it for whole
        self.begun = False
        self._headed: Usage | None = None

    def asking(self) -> dict[str, Any]:
        """Fields to set in the body that the node gets."""
        if not self._chunked or self._wanted_each or (self._wanted and not self._continuous):
            return {}
        more = {"include_usage": True} | ({"continuous_usage_stats": True} if self._continuous else {})
        return {"stream_options": {**self._options, **more}}

    def told_before(self, value: bytes) -> None:
        """Read a header with the usage of an answer that need not be JSON (web.counts.ANSWER)."""
        if found := _NUMBERS.fullmatch(value):
            self._headed = Usage(*map(int, found.groups()))

    def whole(self, piece: bytes) -> None:
        """Read a piece of an answer that is no stream."""
        self.begun = True
        self._passed += len(piece)
        self.done = self._passed == self.length
        if self._passed <= self.MAX_HELD:
            self._held += piece
        else:
            self._tail = (self._tail + piece)[-MAX_TAIL:]

    def events(self, piece: bytes) -> bytes:
        """Read server-sent events. Returns what the client gets."""
        self.begun = True
        passed = _LINE.sub(self._line, piece)
        return _COUNTS.sub(self._counted, passed) if MARK in passed else passed

    def _counted(self, match: re.Match[bytes]) -> bytes:
        """A comment of a node with the usage so far."""
        self._told, self._final = Usage(*map(max, self._told, map(int, match.groups()))), True
        return b""

    def _line(self, match: re.Match[bytes]) -> bytes:
        line, data = match[0], match[1]
        if self._native:
            with suppress(*JSON_ERRORS):
                self._told, self._final = self._native_usage([_decode_part(data)]), True
        if b'"usage"' not in data:
            self.done = self.done or data == b"[DONE]"
            if not self._final:
                self._deltas += b"delta" in data or b'"text"' in data
                self._text += _text_bytes(data)
            return line
        try:
            event = _decode_event(data)
        except JSON_ERRORS:
            return line
        self._deltas += 1
        told = event.usage or (event.response or event.message or _Holder()).usage
        if told is not None:
            self._told = Usage(*map(max, self._told, told.usage()))
            self._final = event.message is None
            self.done = self.done or (self._final and not self._chunked)
        if not self._chunked or self._wanted_each or event.choices is None:
            return line
        if event.choices == [] and event.usage is not None:  # the last chunk
            return line if self._wanted else b""
        return self._without_usage(line, data)

    def _native_usage(self, parts: list[_Part]) -> Usage:
        """Add up the choices. A prompt with several counts once, with the cached tokens of its first."""
        self._parts |= {part.index: part.meta_info.usage() for part in parts}
        firsts = [usage for index, usage in self._parts.items() if index % self._choices == 0]
        return Usage(
            sum(usage.input for usage in firsts),
            sum(usage.cached for usage in firsts),
            sum(usage.output for usage in self._parts.values()),
        )

    def _without_usage(self, line: bytes, data: bytes) -> bytes:
        """The event with null for its usage, or without the field. The other fields keep their bytes."""
        at = line.rfind(b',"usage":')
        end = line.rstrip()
        try:
            _decode_tail(b"{" + end[at + 1 :])
        except JSON_ERRORS:  # it is not the last field
            fields = msgspec.json.decode(data, type=dict[str, msgspec.Raw])
            if fields.pop("usage", None) is None:
                return line
            rest = fields | ({"usage": msgspec.Raw(b"null")} if self._wanted else {})
            return line.replace(data, msgspec.json.encode(rest))
        return line[:at] + (b',"usage":null}' if self._wanted else b"}") + line[len(end) :]

    def total(self, *, left: bool = False) -> Usage:
        """What was used. An estimate where the answer does not tell: it broke off, or its client has `left`."""
        return Usage(*map(min, self._total(left), self._bound))

    def _total(self, left: bool) -> Usage:
        if self.begun and not self._passed:  # a stream
            if self._final:
                return self._told
            seen = min(max(self._deltas, self._text // BYTES_PER_TOKEN), self._most.output)
            return Usage(self._told.input or self._prompt, self._told.cached, max(self._told.output, seen))
        if self._headed is not None and not left:
            return self._headed
        if self._held and (usage := self._of_whole()) is not None:
            return usage
        # No token is shorter than a byte, and a client that leaves chooses how much it has.
        seen = self._passed if left else self._passed // BYTES_PER_TOKEN
        return Usage(self._prompt, 0, min(seen, self._most.output))

    def _of_whole(self) -> Usage | None:
        """The usage of an answer that is no stream; None if it is not there to its end."""
        if self._tail:
            found = _LAST.findall(self._tail)
            return _decode_told(found[-1]).usage() if found else None
        try:
            if self._native:
                return self._native_usage(_decode_answers(self._held))
            told = msgspec.json.decode(self._held, type=_Holder).usage
        except JSON_ERRORS:
            return None
        return told.usage() if told else Usage()
