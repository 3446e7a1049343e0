"""`lmkit chat TARGET`: chat with a server, a proxy, or a checkpoint in this process."""

from __future__ import annotations

import json
import math
import signal
import sys
from collections.abc import Generator, Iterable, Iterator
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Protocol

import typer

from lmkit.errors import ConfigError, LMKitError

if TYPE_CHECKING:
    import httpx

    from lmkit import Pipeline

Messages = list[dict[str, Any]]
HELP = """\
/reset          forget the conversation, keep the system message
/system TEXT    set the system message and start anew; without TEXT, remove it
/help           this list
/exit           leave (also Ctrl-D); Ctrl-C stops an answer"""


def chat(
    target: Annotated[
        str, typer.Argument(help='http://HOST:PORT of a server or proxy, a checkpoint folder, or "demo".')
    ],
    model: Annotated[str | None, typer.Option(help="A model of the server; default the only one it serves.")] = None,
    prompt: Annotated[
        str | None, typer.Option(help="Answer this and exit; text piped to stdin works the same.")
    ] = None,
    system: Annotated[str | None, typer.Option(help="System message.")] = None,
    temperature: Annotated[float | None, typer.Option(min=0, help="0 = greedy; default the model's.")] = None,
    top_p: Annotated[float | None, typer.Option(min=0, max=1, help="Nucleus sampling.")] = None,
    max_tokens: Annotated[int | None, typer.Option(min=1, help="Longest answer, in tokens.")] = None,
    seed: Annotated[int | None, typer.Option(help="Makes sampling repeatable.")] = None,
    api_key: Annotated[str | None, typer.Option(help="For a server; default LMKIT_API_KEY.")] = None,
    generation_config: Annotated[
        str | None, typer.Option(help="Sampling defaults of a folder's model: auto, none, or a path.")
    ] = None,
) -> None:
    """Talk to a model: interactively, or once with --prompt or piped text."""
    options = {"temperature": temperature, "top_p": top_p, "max_tokens": max_tokens, "seed": seed}
    given = {name: value for name, value in options.items() if value is not None}
    if any(not math.isfinite(value) for value in given.values()):
        raise ConfigError("--temperature and --top-p must be finite numbers")
    from lmkit.web.listen import ADDRESS

    if ADDRESS.fullmatch(target) and not Path(target).exists():
        raise ConfigError(f"{target} is not a folder; for a server write http://{target}")
    if target.startswith(("http://", "https://")):
        from lmkit.config import environment

        if generation_config is not None:
            raise ConfigError(f"--generation-config is for a folder; {target} has its own")
        with closing(RemoteModel.connect(target, model, api_key or environment().api_key, given)) as remote:
            _talk(Conversation(remote, system), prompt)
        return
    if model is not None or api_key is not None:
        raise ConfigError(f"--model and --api-key are for a server; {target} is a folder")
    from lmkit.turbo.transport.deferred import quick_start

    with quick_start():
        from lmkit import pipeline

        pipe = pipeline(target, log_level="WARNING", generation_config=generation_config or "auto")
    with pipe:
        _talk(Conversation(LocalModel(pipe, given), system), prompt, pipe.engine.info.sampling.text())


class ChatModel(Protocol):
    def answer(self, messages: Messages) -> Generator[str, None, None]:
        """Pieces of an answer. Raises LMKitError, or KeyboardInterrupt if Ctrl-C stops it."""


class LocalModel:
    """A pipeline in this process. The conversation is one of its sessions, so a turn computes only its own tokens."""

    def __init__(self, pipe: Pipeline, options: dict[str, Any]) -> None:
        from lmkit import GenerationConfig

        names = {"max_tokens": "max_new_tokens"}
        self._pipe, self._session = pipe, pipe.session()
        self._config = GenerationConfig(**{names.get(name, name): value for name, value in options.items()})

    def answer(self, messages: Messages) -> Generator[str, None, None]:
        interrupted: list[int] = []  # Ctrl-C waits for the end of an engine step, which it must not cut
        previous = signal.signal(signal.SIGINT, lambda number, frame: interrupted.append(number))
        self._session.history = messages[:-1]
        parts = self._pipe.chat(messages[-1]["content"], self._session, self._config, stream_response=True)
        try:
            for part in parts:
                if part.finish_reason == "error":
                    raise LMKitError(part.error_message or "the engine failed")
                yield part.text
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

    def __init__(self, client: httpx.Client, model: str, options: dict[str, Any]) -> None:
        self._client = client
        self._body = {"model": model, "stream": True, **options}

    @classmethod
    def connect(cls, url: str, model: str | None, api_key: str | None, options: dict[str, Any]) -> RemoteModel:
        """The model of a server.

        Raises LMKitError if no server answers, if it lists other models, or several and `model` is None.
        """
        import httpx

        from lmkit.web.tls import trusting

        base = url.rstrip("/").removesuffix("/v1")
        headers = {"authorization": f"Bearer {api_key}"} if api_key else {}
        try:
            client = httpx.Client(
                base_url=base,
                headers=headers,
                timeout=httpx.Timeout(600, connect=5),
                trust_env=False,
                verify=trusting(httpx.create_ssl_context(trust_env=False)),
            )
            if not client.base_url.host:
                raise ConfigError(f"{url!r} is not a URL: write http://HOST:PORT")
        except (httpx.InvalidURL, UnicodeError) as error:
            raise ConfigError(f"{url!r} is not a URL: {error}") from None
        try:
            return cls(client, _chosen(_models(client, base, model), base, model), options)
        except BaseException:
            client.close()
            raise

    def close(self) -> None:
        self._client.close()

    def answer(self, messages: Messages) -> Generator[str, None, None]:
        import httpx

        try:
            with self._client.stream(
                "POST", "/v1/chat/completions", json={**self._body, "messages": messages}
            ) as response:
                if not response.is_success:
                    response.read()
                    raise LMKitError(_error_text(response))
                for data in sse_data(response.iter_bytes()):
                    if data == b"[DONE]":
                        return
                    yield _delta(data)
        except httpx.HTTPError as error:
            raise LMKitError(f"the server did not answer: {error or type(error).__name__}") from None
        raise LMKitError("the server broke off in the middle of its answer")


def _models(client: httpx.Client, base: str, model: str | None) -> list[str]:
    """The names that a server lists. A server that lists none, though it answers, is taken to have `model`."""
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
        return [str(entry["id"]) for entry in response.json()["data"]]
    except (ValueError, KeyError, TypeError):
        if model is None:
            raise LMKitError(f"{base} does not list models as an OpenAI server does") from None
        return [model]


def _chosen(names: list[str], base: str, model: str | None) -> str:
    """`model`, or the only one of `names`. Raises ConfigError."""
    if model in names or (model is None and len(names) == 1):
        return model or names[0]
    if not names:
        raise ConfigError(f"{base} serves no model at the moment")
    wrong = "" if model is None else f"no model {model}: "
    raise ConfigError(f"{wrong}{base} serves {_printable(', '.join(names))}; choose one with --model")


def sse_data(pieces: Iterable[bytes]) -> Iterator[bytes]:
    """The data of server-sent events.

    Lines are split as bytes: str.splitlines would also split at U+2028 inside an answer.
    """
    held, data = b"", []
    for piece in pieces:
        *lines, held = (held + piece).split(b"\n")
        for line in lines:
            line = line.removesuffix(b"\r")
            if line.startswith(b"data:"):
                data.append(line[5:].removeprefix(b" "))
            elif not line and data:
                yield b"\n".join(data)
                data = []


def _delta(data: bytes) -> str:
    """The new text in one chunk. Raises LMKitError for an error event."""
    try:
        chunk = json.loads(data)
        if error := chunk.get("error"):
            raise LMKitError(_printable(str(error.get("message", error) if isinstance(error, dict) else error)))
        choices = chunk["choices"]
        return (choices[0]["delta"].get("content") or "") if choices else ""
    except (ValueError, KeyError, TypeError, AttributeError, IndexError):
        raise LMKitError("the server sent something that is not a chat completion chunk") from None


def _error_text(response: httpx.Response) -> str:
    """The message of an error answer, in OpenAI's envelope or a flat one."""
    try:
        body = response.json()
        error = body.get("error", body)
        message = _printable(str(error["message"] if isinstance(error, dict) else error))
    except (ValueError, KeyError, AttributeError):
        message = "no further message"
    return f"HTTP {response.status_code}: {message}"


@dataclass
class Conversation:
    """The messages so far, and the model that answers them."""

    model: ChatModel
    system: str | None = None

    def __post_init__(self) -> None:
        self.reset()

    def reset(self) -> None:
        self.messages: Messages = [] if self.system is None else [{"role": "system", "content": self.system}]

    def ask(self, text: str) -> Generator[str, None, None]:
        """Pieces of the answer. An answer is remembered, even if it was stopped early; a failed turn is not."""
        asked = [*self.messages, {"role": "user", "content": text}]
        answer = ""
        try:
            with closing(self.model.answer(asked)) as pieces:
                for piece in pieces:
                    answer += piece
                    yield piece
        except LMKitError:
            answer = ""
            raise
        finally:
            if answer:
                self.messages = [*asked, {"role": "assistant", "content": answer}]


def _talk(conversation: Conversation, prompt: str | None, note: str = "") -> None:
    if prompt is None and sys.stdin.isatty():
        _repl(conversation, note)
        return
    text = sys.stdin.read() if prompt is None else prompt
    if not text.strip():
        raise ConfigError("the prompt is empty")
    for piece in conversation.ask(text):
        print(shown(piece), end="", flush=True)
    print()


def _repl(conversation: Conversation, note: str) -> None:
    import readline  # noqa: F401 - gives input() line editing and history

    from rich.console import Console

    console = Console(highlight=False)
    if note:
        console.print(note, style="dim", markup=False)
    console.print("[dim]/help lists the commands")
    while True:
        try:
            line = console.input("[bold green]> ").strip()
        except EOFError:
            console.print()
            return
        except KeyboardInterrupt:
            console.print("\n[dim]/exit or Ctrl-D leaves")
            continue
        if line.startswith("/"):
            if line == "/exit":
                return
            console.print(command(conversation, line), markup=False)
        elif line:
            try:
                with closing(conversation.ask(line)) as pieces:
                    for piece in pieces:
                        console.out(shown(piece), end="")
                console.print()
            except KeyboardInterrupt:
                console.print("\n[dim]stopped")
            except LMKitError as error:
                console.print(f"\nlmkit: {error}", style="red", markup=False)


def command(conversation: Conversation, line: str) -> str:
    """Execute a command of the prompt. Returns the text to show."""
    name, _, text = line.partition(" ")
    if name == "/reset" and not text:
        conversation.reset()
        return "forgotten"
    if name == "/system":
        conversation.system = text.strip() or None
        conversation.reset()
        return "the system message is set" if conversation.system else "there is no system message"
    return HELP if line == "/help" else f"{line}: not a command\n{HELP}"


def shown(text: str) -> str:
    """An answer without control characters, which a terminal could take as commands."""
    return _printable(text) if sys.stdout.isatty() else text


def _printable(text: str) -> str:
    return "".join(c for c in text if c.isprintable() or c in "\n\t")
