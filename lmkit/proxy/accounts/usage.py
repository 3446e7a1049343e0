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

from lmkit.proxy.accounts.account import Amount, Price, Usage

CHUNKED = ("/v1/chat/completions", "/v1/completions")  # routes whose streams are chunks
BYTES_PER_TOKEN = 4  # of a usual text, where no better number is known
UNSTATED_OUTPUT = 1024  # tokens reserved for an answer without a limit of its own
TEMPLATE_TOKENS = 256  # that a chat template may add
_LINE = re.compile(rb"(?m)^data: ?([^\r\n]+)(?:\r\n|\n|\r){1,2}")


class _Details(msgspec.Struct):
    cached_tokens: int | None = None


class _Told(msgspec.Struct):
    """OpenAI's two forms and Anthropic's."""

    prompt_tokens: int | None = None
    completion_tokens: int | None = None
    input_tokens: int | None = None
    output_tokens: int | None = None
    prompt_tokens_details: _Details | None = None
    input_tokens_details: _Details | None = None
    cache_read_input_tokens: int | None = None  # not part of Anthropic's input_tokens
    cache_creation_input_tokens: int | None = None
    cached_tokens: int | None = None  # of /generate

    def usage(self) -> Usage:
        details = self.prompt_tokens_details or self.input_tokens_details
        read, made = self.cache_read_input_tokens or 0, self.cache_creation_input_tokens or 0
        told = (self.prompt_tokens or self.input_tokens or 0) + read + made
        cached = min(told, read + ((details and details.cached_tokens) or self.cached_tokens or 0))
        values = (told, cached, self.completion_tokens or self.output_tokens or 0)
        return Usage(*(max(0, value) for value in values))


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


class Extent(msgspec.Struct):
    """The fields of a request's body that say how much it may use, and how its usage is told."""

    model: str
    stream: Any = None
    stream_options: Any = None
    max_tokens: Any = None
    max_completion_tokens: Any = None
    n_predict: Any = None
    max_output_tokens: Any = None
    n: Any = None
    best_of: Any = None
    priority: Any = None
    max_new_tokens: Any = None
    background: Any = None  # of /v1/responses
    sampling_params: Any = None  # of /generate: fields of the body may stand there

    def __post_init__(self) -> None:
        if isinstance(self.sampling_params, dict):
            for name in ("n", "best_of", "max_tokens", "max_completion_tokens", "n_predict", "max_new_tokens"):
                setattr(self, name, self.sampling_params.get(name, getattr(self, name)))

    def most(self, num_bytes: int, price: Price | None) -> Amount:
        """The most that a request of so many bytes uses: no token is shorter than a byte.

        The answer of a request that states no limit may be longer than what is reserved for it.
        """
        named = (
            self.max_tokens,
            self.max_completion_tokens,
            self.n_predict,
            self.max_output_tokens,
            self.max_new_tokens,
        )
        limits = [n for n in named if _counts(n)]
        answers = max([1, *(n for n in (self.n, self.best_of) if _counts(n))])
        usage = Usage(num_bytes + TEMPLATE_TOKENS, 0, (min(limits) if limits else UNSTATED_OUTPUT) * answers)
        return Amount(1, usage.tokens, price.of(usage) if price else 0)


def _decode_answers(data: bytes | bytearray) -> list[_Part]:
    """The answers of /generate: one, or a list."""
    found = msgspec.json.decode(data, type=_Part | list[_Part])
    return found if isinstance(found, list) else [found]


def _counts(value: Any) -> bool:
    return type(value) is int and 0 < value < 1 << 32


class Reader:
    """Reads the usage of one answer, and takes out of a stream what its client did not ask for."""

    MAX_HELD = 16 << 20  # bytes of an answer that is no stream; a longer one is charged by its length

    def __init__(self, asked: Extent, path: str, num_bytes: int, *, continuous: bool) -> None:
        """`num_bytes`: the length of the request. `continuous`: nodes are asked for the usage with every chunk."""
        options = asked.stream_options if isinstance(asked.stream_options, dict) else {}
        self._chunked = bool(asked.stream) and path in CHUNKED
        self._native = path == "/generate"
        self._wanted = options.get("include_usage") is True
        self._wanted_each = self._wanted and options.get("continuous_usage_stats") is True
        self._continuous = continuous
        self._options = options
        self._prompt = num_bytes // BYTES_PER_TOKEN  # until the answer tells
        self._told = Usage()
        self._choices = asked.n if _counts(asked.n) else 1  # of a prompt
        self._parts = dict[int, Usage]()  # of the choices of /generate
        self._held = bytearray()
        self._passed = 0  # bytes of a whole answer
        self._deltas = 0
        self._final = False  # the usage told is that of the whole answer, or of all so far
        self.length = -1  # of an answer that is no stream, if it is known
        self.done = False  # what comes next ends the answer: a client may take it for whole
        self.begun = False

    def asking(self) -> dict[str, Any]:
        """Fields to set in the body that the node gets."""
        if not self._chunked or self._wanted_each or (self._wanted and not self._continuous):
            return {}
        more = {"include_usage": True} | ({"continuous_usage_stats": True} if self._continuous else {})
        return {"stream_options": {**self._options, **more}}

    def whole(self, piece: bytes) -> None:
        """Read a piece of an answer that is no stream."""
        self.begun = True
        self._passed += len(piece)
        self.done = self._passed == self.length
        if self._passed <= self.MAX_HELD:
            self._held += piece

    def events(self, piece: bytes) -> bytes:
        """Read server-sent events. Returns what the client gets."""
        self.begun = True
        return _LINE.sub(self._line, piece)

    def _line(self, match: re.Match[bytes]) -> bytes:
        line, data = match[0], match[1]
        if self._native:
            with suppress(msgspec.MsgspecError, RecursionError):
                self._told, self._final = self._native_usage([_decode_part(data)]), True
        if b'"usage"' not in data:
            self.done = self.done or data == b"[DONE]"
            self._deltas += b"delta" in data or b'"text"' in data
            return line
        try:
            event = _decode_event(data)
        except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
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
        except (msgspec.MsgspecError, UnicodeDecodeError):  # it is not the last field
            fields = msgspec.json.decode(data, type=dict[str, msgspec.Raw])
            if fields.pop("usage", None) is None:
                return line
            rest = fields | ({"usage": msgspec.Raw(b"null")} if self._wanted else {})
            return line.replace(data, msgspec.json.encode(rest))
        return line[:at] + (b',"usage":null}' if self._wanted else b"}") + line[len(end) :]

    def total(self) -> Usage:
        """What was used. An estimate where the answer does not tell: it broke off, its client left, or it is huge."""
        if self.begun and not self._passed:  # a stream
            if self._final:
                return self._told
            return Usage(self._told.input or self._prompt, self._told.cached, max(self._told.output, self._deltas))
        if self._held:
            try:
                if self._native:
                    return self._native_usage(_decode_answers(self._held))
                told = msgspec.json.decode(self._held, type=_Holder).usage
            except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
                told = None
            else:
                return told.usage() if told else Usage()
        return Usage(self._prompt, 0, self._passed // BYTES_PER_TOKEN)
