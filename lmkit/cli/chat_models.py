"""What `lmkit chat` talks to: a model in this process, or one of a server's."""

from __future__ import annotations

import itertools
import json
import signal
from collections.abc import Generator
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

from lmkit.errors import ConfigError, LMKitError
from lmkit.web.sse import EventData

if TYPE_CHECKING:
    import httpx

    from lmkit import Pipeline

Messages = list[dict[str, Any]]


class Piece(NamedTuple):
    """A part of an answer as it comes."""

    text: str
    is_thought: bool = False  # the model's reasoning, which is no part of the conversation


class ChatModel(Protocol):
    name: str
    names: list[str]  # of all models that `choose` takes
    options: dict[str, Any]  # fields of a request, by OpenAI's names

    def choose(self, name: str) -> None:
        """Let another model answer. Raises ConfigError."""

    def set(self, options: dict[str, Any]) -> None:
        """Take other options. Raises ConfigError."""

    def answer(self, messages: Messages) -> Generator[Piece, None, None]:
        """Pieces of an answer. Raises LMKitError, or KeyboardInterrupt if Ctrl-C stops it."""


class LocalModel:
    """A pipeline in this process. The conversation is one of its sessions, so a turn computes only its own tokens."""

    def __init__(self, pipe: Pipeline, options: dict[str, Any]) -> None:
        self._pipe, self._session = pipe, pipe.session()
        self.name, self.names = "the model", ["the model"]
        self.set(options)

    def choose(self, name: str) -> None:
        raise ConfigError("a checkpoint is one model; /model chooses among those of a server")

    def set(self, options: dict[str, Any]) -> None:
        from lmkit import GenerationConfig

        names = {"max_tokens": "max_new_tokens"}
        self._config = GenerationConfig(**{names.get(name, name): value for name, value in options.items()})
        self.options = options

    def answer(self, messages: Messages) -> Generator[Piece, None, None]:
        interrupted: list[int] = []  # Ctrl-C waits for the end of an engine step, which it must not cut
        previous = signal.signal(signal.SIGINT, lambda number, frame: interrupted.append(number))
        self._session.history = messages[:-1]
        parts = self._pipe.chat(messages[-1]["content"], self._session, self._config, stream_response=True)
        try:
            for part in parts:
                if part.finish_reason == "error":
                    raise LMKitError(part.error_message or "the engine failed")
                yield Piece(part.text)
                if interrupted:
                    raise KeyboardInterrupt
        finally:
            signal.signal(signal.SIGINT, previous)
            parts.close()


class RemoteModel:
    """One model of an OpenAI server.

    Only OpenAI's fields are sent, and therefore no session_id: a strict server of another kind would refuse it. An
    lmkit server finds the conversation in its prefix cache anyway.
    """

    def __init__(
        self, client: httpx.Client, cards: dict[str, dict[str, Any]], name: str, options: dict[str, Any]
    ) -> None:
        self._client, self._cards, self.name, self.options = client, cards, name, options
        self.names = list(cards)

    @property
    def card(self) -> dict[str, Any]:
        """What the server says of the model in its list."""
        return self._cards[self.name]

    @property
    def url(self) -> str:
        return str(self._client.base_url).rstrip("/")

    @classmethod
    def connect(cls, url: str, model: str | None, api_key: str | None, options: dict[str, Any]) -> RemoteModel:
        """The model of a server.

        Raises LMKitError if no server answers, if it lists other models, or several and `model` is None.
        """
        import httpx

        from lmkit.web.client import client_options

        client = httpx.Client(**client_options(url, api_key, timeout=600))
        try:
            base = str(client.base_url).rstrip("/")
            cards = _models(client, base, model)
            return cls(client, cards, _chosen(list(cards), base, model), options)
        except BaseException:
            client.close()
            raise

    def close(self) -> None:
        self._client.close()

    def choose(self, name: str) -> None:
        self.name = _chosen(self.names, "the server", name)

    def set(self, options: dict[str, Any]) -> None:
        self.options = options

    def answer(self, messages: Messages) -> Generator[Piece, None, None]:
        import httpx

        body = {"model": self.name, "stream": True, **self.options, "messages": messages}
        try:
            with self._client.stream("POST", "/v1/chat/completions", json=body) as response:
                if not response.is_success:
                    response.read()
                    raise LMKitError(_error_text(response))
                events = EventData()
                for data in itertools.chain.from_iterable(map(events.feed, response.iter_bytes())):
                    if data == b"[DONE]":
                        return
                    yield from _pieces(data)
        except httpx.HTTPError as error:
            raise LMKitError(f"the server did not answer: {error or type(error).__name__}") from None
        raise LMKitError("the server broke off in the middle of its answer")


def _models(client: httpx.Client, base: str, model: str | None) -> dict[str, dict[str, Any]]:
    """The cards of a server's models, by name. One that lists none, though it answers, is taken to have `model`."""
    import httpx

    try:
        response = client.get("/v1/models", timeout=15)
    except httpx.HTTPError as error:
        reason = f"{error or type(error).__name__}"
        if "CERTIFICATE_VERIFY_FAILED" in reason:
            raise LMKitError(f"{base}: {reason}; LMKIT_CA_FILE names an authority to trust") from None
        raise LMKitError(f"no server answers at {base}: {reason}; `lmkit serve MODEL` starts one") from None
    if response.status_code in (401, 403):
        raise LMKitError(f"{base}: {_error_text(response)}; give a key with --api-key or LMKIT_API_KEY")
    if not response.is_success and model is None:
        raise LMKitError(f"{base}: {_error_text(response)}")
    try:
        return {str(entry["id"]): dict(entry) for entry in response.json()["data"]}
    except (ValueError, KeyError, TypeError):
        if model is None:
            raise LMKitError(f"{base} does not list models as an OpenAI server does") from None
        return {model: {}}


def _chosen(names: list[str], base: str, model: str | None) -> str:
    """`model`, or the only one of `names`. Raises ConfigError."""
    if model in names or (model is None and len(names) == 1):
        return model or names[0]
    if not names:
        raise ConfigError(f"{base} serves no model at the moment")
    wrong = "" if model is None else f"no model {model}: "
    raise ConfigError(f"{wrong}{base} serves {printable(', '.join(names))}; choose one with --model")


def _pieces(data: bytes) -> list[Piece]:
    """The new text in one chunk. Raises LMKitError for an error event."""
    try:
        chunk = json.loads(data)
        if error := chunk.get("error"):
            raise LMKitError(printable(str(error.get("message", error) if isinstance(error, dict) else error)))
        delta = chunk["choices"][0]["delta"] if chunk["choices"] else {}
        thought = delta.get("reasoning_content") or delta.get("reasoning") or ""
        return [piece for piece in (Piece(thought, True), Piece(delta.get("content") or "")) if piece.text]
    except (ValueError, KeyError, TypeError, AttributeError, IndexError):
        raise LMKitError("the server sent something that is not a chat completion chunk") from None


def _error_text(response: httpx.Response) -> str:
    """The message of an error answer, in OpenAI's envelope or a flat one."""
    try:
        body = response.json()
        error = body.get("error", body)
        message = printable(str(error["message"] if isinstance(error, dict) else error))
    except (ValueError, KeyError, AttributeError):
        message = "no further message"
    return f"HTTP {response.status_code}: {message}"


def printable(text: str) -> str:
    """Text of a server without control characters, which a terminal could take as commands."""
    return "".join(c for c in text if c.isprintable() or c in "\n\t")
