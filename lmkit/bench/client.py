"""A client of OpenAI's streaming endpoints that records the time of each chunk and does as little else as possible.

One thread must keep up with every stream. The client is the one that the proxy has for its nodes, which does less for
each chunk than httpx. Only the necessary fields are decoded.
"""

from __future__ import annotations

import asyncio
import json
import ssl
import time
import uuid
from contextlib import closing
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import urlsplit

import msgspec

from lmkit.bench.config import Endpoint
from lmkit.bench.counting import Chunk
from lmkit.bench.workload import Dialogue
from lmkit.errors import JSON_ERRORS, ConfigError, LMKitError
from lmkit.web.listen import ADDRESS
from lmkit.web.sse import EventData
from lmkit.web.upstream import UnreachableError, Upstream, UpstreamError, client_tls

_PATHS: dict[Endpoint, str] = {"chat": "/v1/chat/completions", "completions": "/v1/completions"}
# Optional fields that make a measurement more exact. They are tried one by one, and refused fields are left out.
_WANTED: dict[str, dict[str, Any]] = {
    "usage": {"stream_options": {"include_usage": True}},
    "continuous usage": {"stream_options": {"include_usage": True, "continuous_usage_stats": True}},
    "token ids": {"return_token_ids": True},
    "cache salt": {"cache_salt": "probe"},
}
MAX_MESSAGE = 200


class _Details(msgspec.Struct):
    cached_tokens: int | None = None


class _Usage(msgspec.Struct):
    prompt_tokens: int = 0
    completion_tokens: int = 0
    prompt_tokens_details: _Details | None = None


class _Function(msgspec.Struct):
    name: str | None = None
    arguments: str | None = None


class _Call(msgspec.Struct):
    index: int = 0
    id: str | None = None
    function: _Function | None = None


class _Delta(msgspec.Struct):
    tool_calls: list[_Call] | None = None
    content: str | None = None
    reasoning_content: str | None = None
    reasoning: str | None = None


class _Logprobs(msgspec.Struct):
    content: list[msgspec.Raw] | None = None  # of chat
    tokens: list[msgspec.Raw] | None = None  # of completions


class _Choice(msgspec.Struct):
    text: str | None = None
    delta: _Delta | None = None
    finish_reason: str | None = None
    token_ids: list[int] | None = None
    logprobs: _Logprobs | None = None


class _Event(msgspec.Struct):
    choices: list[_Choice] = []
    usage: _Usage | None = None
    error: Any = None


@dataclass
class StreamedResponse:
    """One request's stream. `error` is None if it came whole, else the kind of failure."""

    start: float
    end: float = 0.0
    chunks: list[Chunk] = field(default_factory=list)
    prompt_tokens: int | None = None  # the server's count
    output_tokens: int | None = None
    cached_tokens: int | None = None  # of the prompt, as the server says
    content: str = ""  # the text without reasoning
    calls: dict[int, dict[str, Any]] = field(default_factory=dict)  # of tools, by index, as a client sends them back
    finish_reason: str | None = None
    error: str | None = None
    message: str | None = None

    @property
    def text(self) -> str:
        return "".join(chunk.text for chunk in self.chunks)

    def fail(self, kind: str, message: str) -> None:
        self.error, self.message = kind, printable(message)[:MAX_MESSAGE]


class _StreamError(Exception):
    """A stream that breaks the protocol."""

    def __init__(self, kind: str, message: str) -> None:
        super().__init__(message)
        self.kind = kind


class Client:
    """Sends one model's requests to one server."""

    def __init__(self, url: str, endpoint: Endpoint, *, api_key: str | None = None, timeout: float = 600.0) -> None:
        """Needs a running event loop.

        `timeout`: seconds for a whole answer. Raises ConfigError if `url` is not a URL.
        """
        self.base = _checked(url).rstrip("/").removesuffix("/v1")
        self._url = self.base + _PATHS[endpoint]
        self.chat = endpoint == "chat"
        self._timeout = timeout
        self._headers = [(b"accept-encoding", b"identity"), (b"content-type", b"application/json")]
        if api_key:
            self._headers.append((b"authorization", b"Bearer " + api_key.strip().encode()))
        # a silent server is found by the time for the whole answer
        self._http = Upstream(client_tls(), connect_timeout=min(timeout, 30.0), read_timeout=2 * timeout)
        self._decoder = msgspec.json.Decoder(_Event)
        self.body: dict[str, Any] = {"stream": True}
        self.features: list[str] = []

    async def close(self) -> None:
        await self._http.close()

    async def choose_model(self, model: str | None) -> str:
        """The model to ask. `model` may be None if the server has exactly one. Raises LMKitError."""
        name = model or await self._only_model()
        self.body["model"] = name
        return name

    async def probe(self, options: dict[str, Any], wanted: dict[str, dict[str, Any]] | None = None) -> None:
        """Find out which optional fields the server takes, by requests for one token each.

        `options` are sent with every request, and the server must take them; `wanted` are further fields to try. Raises
        LMKitError.
        """
        self.body |= options
        dialogue = Dialogue(True, [{"role": "user", "content": "Hello"}])
        first = await self.send(dialogue, 1)
        if first.error not in (None, "empty"):
            raise LMKitError(f"{self.base}: the first request failed: {first.message}")
        for name, fields in (_WANTED | (wanted or {})).items():
            if fields.keys() & options.keys():
                continue
            accepted = self.body
            self.body = accepted | fields
            if (await self.send(dialogue, 1)).error in (None, "empty"):
                self.features.append(name)
            else:
                self.body = accepted

    def renew_cache(self) -> bool:
        """Answers from now on take nothing from a prefix cache that was put there before.

        False if the server has no `cache_salt` (lmkit and vLLM have).
        """
        if "cache salt" in self.features:
            self.body["cache_salt"] = uuid.uuid4().hex
        return "cache salt" in self.features

    def payload(self, dialogue: Dialogue, max_tokens: int) -> bytes:
        prompt = {"messages": dialogue.messages} if self.chat else {"prompt": dialogue.text}
        return msgspec.json.encode(self.body | prompt | {"max_tokens": max_tokens})

    async def send(self, dialogue: Dialogue, max_tokens: int) -> StreamedResponse:
        """One request to its end. Never raises for what the server or the network does: `error` tells."""
        content = self.payload(dialogue, max_tokens)
        answer = StreamedResponse(time.perf_counter())
        try:
            async with asyncio.timeout(self._timeout):
                await self._stream(content, answer)
        except UnreachableError as error:
            answer.fail("connect", f"no connection: {_reason(error)}")
        except TimeoutError:
            answer.fail("timeout", f"no whole answer within {self._timeout:g} s")
        except _StreamError as error:
            answer.fail(error.kind, str(error))
        except UpstreamError as error:
            answer.fail("broken_stream" if answer.chunks else "no_answer", str(error))
        answer.end = answer.end or time.perf_counter()
        return answer

    async def _stream(self, content: bytes, answer: StreamedResponse) -> None:
        with closing(await self._http.send("POST", self._url, self._headers, content)) as response:
            if response.status >= 400:
                raise _StreamError(
                    f"http_{response.status}", _error_text(response.status, await response.body() or b"")
                )
            events = EventData()
            while piece := await response.piece():  # to its end, so that the connection can be reused
                now = time.perf_counter()
                for data in events.feed(piece):
                    if data == b"[DONE]":
                        answer.end = now
                    elif not answer.end:
                        self._take(data, now, answer)
        if not answer.end and answer.finish_reason is None:
            raise _StreamError("broken_stream", "the stream ended before the answer did")
        if not answer.text and not answer.output_tokens:
            raise _StreamError("empty", "the answer has no token")

    def _take(self, data: bytes, now: float, answer: StreamedResponse) -> None:
        try:
            event = self._decoder.decode(data)
        except JSON_ERRORS as error:
            raise _StreamError("bad_chunk", f"not a completion chunk: {error}") from None
        if event.error is not None:
            raise _StreamError("error_event", _message(event.error))
        if event.usage is not None:
            answer.prompt_tokens, answer.output_tokens = event.usage.prompt_tokens, event.usage.completion_tokens
            if event.usage.prompt_tokens_details is not None:
                answer.cached_tokens = event.usage.prompt_tokens_details.cached_tokens
        for choice in event.choices[:1]:
            answer.finish_reason = choice.finish_reason or answer.finish_reason
            ids, logprobs = choice.token_ids, choice.logprobs
            listed = (logprobs.content or logprobs.tokens) if logprobs else None
            text = _text(choice)
            if choice.delta is not None:
                _add(choice.delta, answer)
            if text or ids or listed or choice.finish_reason:
                answer.chunks.append(
                    Chunk(
                        now,
                        text,
                        num_ids=None if ids is None else len(ids),
                        usage=event.usage.completion_tokens if event.usage else None,
                        num_logprobs=None if listed is None else len(listed),
                        is_last=choice.finish_reason is not None,
                    )
                )

    async def _only_model(self) -> str:
        try:
            async with asyncio.timeout(15):
                with closing(await self._http.send("GET", self.base + "/v1/models", self._headers)) as response:
                    body = await response.body() or b""
        except (UpstreamError, TimeoutError) as error:
            raise LMKitError(f"no server answers at {self.base}: {_reason(error)}") from None
        if response.status >= 400:
            raise LMKitError(f"{self.base}: {_error_text(response.status, body)}")
        try:
            names = [str(entry["id"]) for entry in json.loads(body)["data"]]
        except (ValueError, KeyError, TypeError):
            raise LMKitError(f"{self.base} does not list models as an OpenAI server does") from None
        if len(names) != 1:
            listed = printable(", ".join(names)) or "no model"
            raise ConfigError(f"{self.base} serves {listed}; choose one with --model")
        return names[0]


def _add(delta: _Delta, answer: StreamedResponse) -> None:
    """The parts of an assistant's message."""
    answer.content += delta.content or ""
    for part in delta.tool_calls or ():
        new = {"id": part.id, "type": "function", "function": {"name": "", "arguments": ""}}
        function = answer.calls.setdefault(part.index, new)["function"]
        if part.function is not None:
            function["name"] += part.function.name or ""
            function["arguments"] += part.function.arguments or ""


def _text(choice: _Choice) -> str:
    delta = choice.delta
    if delta is None:
        return choice.text or ""
    called = "".join(part.function.arguments or "" for part in delta.tool_calls or () if part.function is not None)
    return (delta.reasoning_content or delta.reasoning or "") + (delta.content or "") + called


def _checked(url: str) -> str:
    try:
        parts = urlsplit(url)
        valid = parts.scheme in ("http", "https") and parts.hostname and parts.port != 0
        valid = valid and "@" not in parts.netloc and " " not in url
    except ValueError:
        valid = False
    if not valid:
        raise ConfigError(
            f"{url!r} is not a URL: write {f'http://{url}' if ADDRESS.fullmatch(url) else 'http://HOST:PORT'}"
        )
    return url


def _reason(error: Exception) -> str:
    """The reason of a failed connection, in the operating system's words if it has some."""
    if isinstance(error.__cause__, ssl.SSLError):
        return f"{error.__cause__}; LMKIT_CA_FILE names an authority to trust"
    return str(error) or type(error).__name__


def _error_text(status: int, body: bytes) -> str:
    try:
        value = json.loads(body)
        message = _message(value.get("error", value))
    except (ValueError, AttributeError):
        message = "no further message"
    return f"HTTP {status}: {message}"


def _message(error: Any) -> str:
    return str(error.get("message", error) if isinstance(error, dict) else error)


def printable(text: str) -> str:
    return "".join(c for c in text if c.isprintable())
