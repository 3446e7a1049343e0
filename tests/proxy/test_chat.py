"""`lmkit chat`: against a node's protocol, with a pipeline's double, and at a terminal."""

from __future__ import annotations

import asyncio
import io
import json
import os
import signal
from collections.abc import Iterator
from typing import Any

import pytest

from lmkit import Session
from lmkit.cli.chat import chat, shown
from lmkit.cli.chat_conversation import Conversation
from lmkit.cli.chat_models import LocalModel, Piece, RemoteModel
from lmkit.errors import ConfigError, LMKitError
from tests.cli.commands import mistake
from tests.cli.terminal import Terminal, answer_by_words
from tests.proxy.fakes import Exchange, FakeNode, nodes, proxy_for

TALK = {"messages": [{"role": "user", "content": "hi"}]}


def body(node: FakeNode, i: int = -1) -> Any:
    return json.loads(node.requests[i].body)


async def run(target: str, capsys: pytest.CaptureFixture[str], **options: Any) -> str:
    """What `lmkit chat` prints, run beside the event loop of the fake node."""
    defaults: dict[str, Any] = dict.fromkeys(
        ("model", "prompt", "system", "temperature", "top_p", "max_tokens", "seed", "api_key")
    )
    defaults["plain"] = False
    await asyncio.to_thread(chat, target=target, **{**defaults, **options})
    return capsys.readouterr().out


@pytest.mark.anyio
async def test_one_answer_through_a_proxy(capsys: pytest.CaptureFixture[str]) -> None:
    async with nodes(FakeNode(script=answer_by_words)) as (node,), proxy_for(node, api_keys=("k",)) as (_, url):
        out = await run(
            url + "/v1/", capsys, prompt="a \u2028 b", system="be brief", temperature=0.5, seed=1, api_key="k"
        )
        assert out == "<a><b>\n"
        assert body(node) == {
            "model": "m",
            "stream": True,
            "temperature": 0.5,
            "seed": 1,
            "messages": [{"role": "system", "content": "be brief"}, {"role": "user", "content": "a \u2028 b"}],
        }
        with pytest.raises(LMKitError, match=r"HTTP 401: .*; give a key with --api-key or LMKIT_API_KEY"):
            await run(url, capsys, prompt="x", api_key="wrong")


@pytest.mark.anyio
async def test_piped_text_and_the_key_from_the_environment(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("LMKIT_API_KEY", "from-env")
    async with nodes(FakeNode(script=answer_by_words)) as (node,):
        monkeypatch.setattr("sys.stdin", io.StringIO("x y\n"))
        assert await run(node.url, capsys) == "<x><y>\n"
        assert node.requests[0].header("authorization") == ["Bearer from-env"]
        monkeypatch.setattr("sys.stdin", io.StringIO(" \n"))
        with pytest.raises(ConfigError, match="empty"):
            await run(node.url, capsys)


@pytest.mark.parametrize(
    ("arguments", "line"),
    [
        ("localhost:8000", "localhost:8000 is not a folder; for a server write http://localhost:8000"),
        ("127.0.0.1:80/v1", "127.0.0.1:80/v1 is not a folder; for a server write http://127.0.0.1:80/v1"),
        ("http://", "'http://' is not a URL: write http://HOST:PORT"),
        ("http://127.0.0.1:9", "no server answers at http://127.0.0.1:9: [Errno 111] Connection refused; `lmkit serve"),
        ("demo --temperature -1", "--temperature '-1': expected a number of at least 0"),
        ("demo --temperature nan", "--temperature 'nan': expected a number of at least 0"),
        ("demo --top-p 2", "--top-p '2': expected a number of at least 0 and at most 1"),
        ("demo --max-tokens 0", "--max-tokens '0': expected an integer of at least 1"),
        ("demo --model m", "--model and --api-key are for a server; demo is a folder"),
        ("demo --url http://x", "chat: no option --url: give http://HOST:PORT as the argument"),
    ],
)
def test_a_mistake_is_one_line(arguments: str, line: str) -> None:
    assert mistake("chat", *arguments.split(), "--prompt", "hi").startswith(line)


@pytest.mark.anyio
async def test_which_model(capsys: pytest.CaptureFixture[str]) -> None:
    async with nodes(FakeNode(models=("m", "n"), script=answer_by_words)) as (node,):
        with pytest.raises(ConfigError, match="serves m, n; choose one with --model"):
            await run(node.url, capsys, prompt="x")
        await run(node.url, capsys, prompt="x", model="n")
        assert body(node)["model"] == "n"
        with pytest.raises(ConfigError, match=r"no model o: http://\S+ serves m, n; choose one with --model"):
            await run(node.url, capsys, prompt="x", model="o")
        node.models = ()
        with pytest.raises(ConfigError, match="serves no model"):
            await run(node.url, capsys, prompt="x")


@pytest.mark.anyio
@pytest.mark.parametrize(
    ("status", "content", "message"),
    [
        (400, b'{"error": {"message": "too long"}}', "HTTP 400: too long"),
        (429, b'{"error": {"message": "\\u001b[2Jred"}}', r"HTTP 429: \[2Jred"),
        (503, b'{"object": "error", "message": "busy"}', "HTTP 503: busy"),
        (500, b"<html>", "HTTP 500: no further message"),
        (500, b'{"error": "plain"}', "HTTP 500: plain"),
        (200, b'data: {"error": {"message": "engine died"}}\n\n', "engine died"),
        (200, b"data: nonsense\n\n", "not a chat completion chunk"),
        (200, b'data: {"choices": [{}]}\n\n', "not a chat completion chunk"),
        (200, b'data: {"choices": []}\n\n', "broke off"),
    ],
)
async def test_errors(capsys: pytest.CaptureFixture[str], status: int, content: bytes, message: str) -> None:
    async def script(exchange: Exchange) -> None:
        await exchange.reply(status, content)

    async with nodes(FakeNode(script=script)) as (node,):
        with pytest.raises(LMKitError, match=message):
            await run(node.url, capsys, prompt="x")


@pytest.mark.anyio
async def test_server_that_breaks_off_or_is_not_there(capsys: pytest.CaptureFixture[str]) -> None:
    async with nodes(FakeNode(script=answer_by_words)) as (node,):
        with pytest.raises(LMKitError, match="did not answer"):
            await run(node.url, capsys, prompt="a break b")
        await node.stop()
        with pytest.raises(LMKitError, match="no server answers at"):
            await run(node.url, capsys, prompt="a")


@pytest.mark.parametrize(
    "options",
    [{"model": "m"}, {"api_key": "k"}, {"temperature": float("nan")}, {"target": "http://h:x", "prompt": "x"}],
)
def test_bad_options(options: dict[str, Any]) -> None:
    names = ("model", "prompt", "system", "temperature", "top_p", "max_tokens", "seed", "api_key")
    with pytest.raises(ConfigError):
        chat(**{"target": "folder", **dict.fromkeys(names), **options})  # type: ignore[arg-type]


class Scripted:
    """A model double: each answer is a list of pieces; an exception among them is raised there."""

    name, names = "m", ["m"]

    def __init__(self, *answers: list[str | BaseException]) -> None:
        self.answers = list(answers)
        self.asked: list[list[str]] = []
        self.options: dict[str, Any] = {}

    def choose(self, name: str) -> None:
        raise ConfigError(name)

    def set(self, options: dict[str, Any]) -> None:
        self.options = options

    def answer(self, messages: list[dict[str, Any]]) -> Any:
        self.asked.append([message["content"] for message in messages])
        for piece in self.answers.pop(0):
            if isinstance(piece, BaseException):
                raise piece
            yield Piece(piece)


def test_conversation_remembers_what_was_said() -> None:
    model = Scripted(["a", "b"], ["part", LMKitError("died")], ["c", KeyboardInterrupt()], [KeyboardInterrupt()], ["d"])
    talk = Conversation(model, "sys")
    assert "".join(piece.text for piece in talk.ask("1")) == "ab"
    with pytest.raises(LMKitError):
        list(talk.ask("2"))  # a failed turn is not remembered
    for turn in ("3", "4"):  # a stopped one is, if it had begun
        with pytest.raises(KeyboardInterrupt):
            list(talk.ask(turn))
    list(talk.ask("5"))
    assert model.asked[-1] == ["sys", "1", "ab", "3", "c", "5"]
    assert [message["role"] for message in talk.messages] == ["system", *["user", "assistant"] * 3]


class Part:
    def __init__(self, text: str, finish_reason: str | None = None, error_message: str | None = None) -> None:
        self.text, self.finish_reason, self.error_message = text, finish_reason, error_message


class Pipe:
    closed = 0

    def session(self) -> Session:
        self.one = Session()
        return self.one

    def chat(self, prompt: str, session: Session, config: Any, *, stream_response: bool) -> Iterator[Part]:
        assert stream_response
        assert session is self.one
        self.config = config
        self.asked = [*session.history, {"role": "user", "content": prompt}]
        try:
            yield Part("a")
            if prompt == "interrupt":
                os.kill(os.getpid(), signal.SIGINT)
                self.step_ended = True
            yield Part("b")
            yield Part("", "error", "engine died") if prompt == "fail" else Part("c", "stop")
        finally:
            self.closed += 1


def test_local_model() -> None:
    pipe: Any = Pipe()
    model = LocalModel(pipe, {"max_tokens": 5, "temperature": 0.5})
    assert list(model.answer(TALK["messages"])) == [Piece("a"), Piece("b"), Piece("c")]
    assert pipe.asked == TALK["messages"]
    assert (pipe.config.max_new_tokens, pipe.config.temperature, pipe.config.top_p) == (5, 0.5, None)
    with pytest.raises(LMKitError, match="engine died"):
        list(model.answer([{"role": "user", "content": "fail"}]))
    before: Any = signal.getsignal(signal.SIGINT)
    got: list[Piece] = []
    pieces = model.answer([{"role": "user", "content": "interrupt"}])
    with pytest.raises(KeyboardInterrupt):
        got.extend(pieces)
    assert [piece.text for piece in got] == ["a", "b"]  # the step that Ctrl-C met was carried out
    assert pipe.step_ended
    assert pipe.closed == 3
    assert signal.getsignal(signal.SIGINT) is before


def test_terminal_gets_no_control_characters(monkeypatch: pytest.MonkeyPatch) -> None:
    text = "a\x1b]0;title\x07\tb\nc\u202e\x9b31m é"
    assert shown(text) == text  # into a pipe or file, as it is
    monkeypatch.setattr("sys.stdout.isatty", lambda: True)
    assert shown(text) == "a]0;title\tb\nc31m é"


@pytest.mark.anyio
async def test_at_a_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TERM", "dumb")
    async with nodes(FakeNode(script=answer_by_words)) as (node,):
        terminal = Terminal(node.url, "--system", "sys")
        try:
            await terminal.until("> ")
            terminal.type("one two\n")
            await terminal.until("<one><two>")
            await terminal.until("> ")
            terminal.type("/help\n")
            await terminal.until("/reset")
            await terminal.until("> ")
            terminal.type("now wait\n")
            await terminal.until("<wait>")
            terminal.type("\x03")  # Ctrl-C stops the answer
            await terminal.until("stopped")
            await asyncio.wait_for(node.left.wait(), 2)
            await terminal.until("> ")
            terminal.type("a break\n")
            await terminal.until("lmkit: the server did not answer")
            await terminal.until("> ")
            terminal.type("\x03")  # at the prompt it only clears the line
            await terminal.until("Ctrl-D leaves")
            await terminal.until("> ")
            terminal.type("last\n")
            await terminal.until("<last>")
            await terminal.until("> ")
            assert [m["content"] for m in body(node)["messages"]] == [
                "sys", "one two", "<one><two>", "now wait", "<now><wait>", "last",
            ]  # fmt: skip
            assert await terminal.leave() == 0
        finally:
            terminal.close()


def test_remote_model_closes_its_client_when_it_cannot_start() -> None:
    with pytest.raises(LMKitError, match="no server answers"):
        RemoteModel.connect("http://127.0.0.1:1", None, None, {})
