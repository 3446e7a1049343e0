"""`lmkit chat` at a terminal: its commands, and how it reads messages and shows answers."""

from __future__ import annotations

import asyncio
import io
import json
import os
import stat
from collections.abc import Generator
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from lmkit.cli.chat_conversation import COMMANDS, MAX_FILE, Conversation, Reply, execute
from lmkit.cli.chat_models import Messages, Piece
from lmkit.cli.chat_terminal import Answer, finished
from lmkit.errors import ConfigError, LMKitError
from tests.cli.terminal import ESCAPES, Terminal, answer_by_words, event
from tests.proxy.fakes import Exchange, FakeNode, nodes


class Echo:
    """A model that answers with what it was asked, and fails for "fail"."""

    name, names = "m", ["m", "n"]

    def __init__(self) -> None:
        self.options: dict[str, Any] = {}

    def choose(self, name: str) -> None:
        self.name = name

    def set(self, options: dict[str, Any]) -> None:
        self.options = options

    def answer(self, messages: Messages) -> Generator[Piece, None, None]:
        text = messages[-1]["content"]
        yield Piece("hm", is_thought=True)
        if text == "fail":
            raise LMKitError("failed")
        yield Piece(f"{len(messages)}:{text}")


@pytest.fixture
def talk() -> Conversation:
    return Conversation(Echo())


def ask(talk: Conversation, text: str, before: int | None = None) -> str:
    return "".join(piece.text for piece in talk.ask(text, before) if not piece.is_thought)


def say(talk: Conversation, line: str) -> str:
    return execute(talk, line).text


def said(talk: Conversation) -> list[str]:
    return [message["content"] for message in talk.messages]


def test_messages_are_taken_back_and_asked_again(talk: Conversation) -> None:
    ask(talk, "a")
    ask(talk, "b")
    again = execute(talk, "/retry")
    assert again == Reply(ask="b", before=2)
    assert said(talk) == ["a", "1:a", "b", "3:b"]  # until there is another answer
    assert ask(talk, again.ask, again.before) == "3:b"
    assert said(talk) == ["a", "1:a", "b", "3:b"]
    assert say(talk, "/undo") == "taken back: b"
    assert said(talk) == ["a", "1:a"]
    with pytest.raises(LMKitError, match="failed"):
        ask(talk, "fail")
    assert execute(talk, "/retry") == Reply(ask="fail")
    assert said(talk) == ["a", "1:a"]
    assert say(talk, "/reset") == "forgotten"
    for line in ("/undo", "/retry"):
        with pytest.raises(ConfigError, match="no message yet"):
            execute(talk, line)


def test_the_system_message(talk: Conversation) -> None:
    ask(talk, "a")
    assert say(talk, "/system be kind") == "the system message is set"
    assert talk.messages == [{"role": "system", "content": "be kind"}]
    ask(talk, "x")
    say(talk, "/reset")
    assert said(talk) == ["be kind"]
    assert "no system message" in say(talk, "/system")
    assert talk.messages == []


def test_set(talk: Conversation) -> None:
    assert say(talk, "/set") == "all as the model has it"
    assert say(talk, "/set temperature=0.5 seed=7") == "temperature=0.5 seed=7"
    assert say(talk, "/set temperature= top_k=3") == "seed=7 top_k=3"
    assert talk.model.options == {"seed": 7, "top_k": 3}
    for line, message in {
        "/set seed=x": "seed=x: expected an integer", "/set top_p=x": "top_p=x: expected a number",
        "/set heat=1": "heat=1: write NAME=VALUE with one of temperature, ", "/set seed": "seed: write NAME=VALUE",
    }.items():  # fmt: skip
        with pytest.raises(ConfigError, match=message):
            execute(talk, line)
    assert talk.model.options == {"seed": 7, "top_k": 3}


def test_model(talk: Conversation) -> None:
    assert say(talk, "/model") == "* m\n  n"
    assert say(talk, "/model n") == "n answers from now on"
    assert say(talk, "/model") == "  m\n* n"


def test_files_go_with_the_next_message(talk: Conversation, tmp_path: Path) -> None:
    (tmp_path / "a.py").write_text("x = '```'\n")
    (tmp_path / "b.txt").write_text("b")
    assert say(talk, f"/file {tmp_path}/a.py").endswith("a.py goes with the next message (10 characters)")
    say(talk, f"/file {tmp_path}/b.txt")
    with pytest.raises(LMKitError):
        list(Conversation(FailingModel(), files=talk.files).ask("x"))
    ask(talk, "what?")
    assert said(talk)[0] == "a.py:\n````\nx = '```'\n````\n\nb.txt:\n```\nb\n```\n\nwhat?"
    ask(talk, "next")
    assert said(talk)[2] == "next"
    (tmp_path / "c").write_bytes(b"\xff\xfe")
    with pytest.raises(ConfigError, match="not a text in UTF-8"):
        execute(talk, f"/file {tmp_path}/c")
    with (tmp_path / "large").open("wb") as file:
        file.truncate(MAX_FILE + 1)
    with pytest.raises(ConfigError, match="more than 4,194,304"):
        execute(talk, f"/file {tmp_path}/large")
    with pytest.raises(FileNotFoundError):
        execute(talk, f"/file {tmp_path}/none")


class FailingModel(Echo):
    def answer(self, messages: Messages) -> Generator[Piece, None, None]:
        raise LMKitError("failed")
        yield Piece("")


def test_a_conversation_is_saved_and_loaded(talk: Conversation, tmp_path: Path) -> None:
    say(talk, "/system s")
    ask(talk, "é")
    path = tmp_path / "talk.json"
    assert say(talk, f"/save {path}") == f"3 messages are in {path}"
    ask(talk, "b")
    say(talk, f"/save {path}")  # its own file
    other = Conversation(Echo())
    with pytest.raises(ConfigError, match="exists; choose another name"):
        execute(other, f"/save {path}")
    assert say(other, f"/load {path}") == f"5 messages of {path}"
    assert other.messages == talk.messages
    assert ask(other, "c") == "6:c"
    say(other, "/reset")
    assert said(other) == ["s"]
    for text in ("", "[]", '{"messages": 1}', '{"messages": [{"role": "user"}]}', '{"messages": [[]]}', "\x00"):
        path.write_text(text)
        with pytest.raises(ConfigError, match="not a conversation"):
            execute(other, f"/load {path}")
    for message in ({"role": "x", "content": "a"}, {"role": "user", "content": None}):
        path.write_text(json.dumps({"messages": [message]}))
        with pytest.raises(ConfigError, match="a message has no text or no role of system, user"):
            execute(other, f"/load {path}")
    assert said(other) == ["s"]


def test_help_lists_every_command_and_mistakes_name_what_to_write(talk: Conversation) -> None:
    listed = say(talk, "/help")
    assert all(name in listed for name in (*COMMANDS, "/exit"))
    for line, message in {
        "/nope": "/nope is not a command; /help", "/reset now": "/reset stands alone", "/file": "write /file PATH",
        "/save ": "write /save PATH",
    }.items():  # fmt: skip
        with pytest.raises(ConfigError, match=message):
            execute(talk, line)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("one", 0), ("one\n\n", 0), ("one\n\ntwo", 5), ("one\n\n  two", 0), ("- a\n\n  b\n\nc", 10),
        ("a\n\nb\n\nc\nd", 6),
        ("```\na\n\nb", 0), ("```\na\n\nb\n```\n\nc", 14), ("````\n```\n\nb", 0), ("~~~\n```\n\nb\n~~~\n\nc", 16),
    ],
)  # fmt: skip
def test_where_the_last_block_begins(text: str, expected: int) -> None:
    assert finished(text) == expected


def shown(pieces: list[Piece], *, plain: bool = False, width: int = 60) -> str:
    console = Console(file=io.StringIO(), force_terminal=True, width=width, height=20, highlight=False)
    with Answer(console, plain=plain) as answer:
        for piece in pieces:
            answer._settled = 0.0  # draw each time, however fast the pieces come
            answer.add(piece)
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue()


def last_of(output: str) -> str:
    """What stays on the screen: a drawing that is taken back ends with an erased line."""
    return ESCAPES.sub(b"", output.rpartition("\x1b[2K")[2].encode()).decode()


def test_an_answer_is_shown_as_markdown() -> None:
    text = "# Title\n\nSome **bold** `code`\nsecond line\n\n- a\n- b\n\n```python\nx = 1\n```\n\n| h |\n|---|\n| c |\n"
    whole = shown([Piece(text)])
    for part in ("Title", "bold", "code", "second line", " • a", "x = 1", "─"):
        assert part in ESCAPES.sub(b"", whole.encode()).decode()
    assert "**" not in whole
    by_letter = shown([Piece(letter) for letter in text])
    assert last_of(by_letter).strip() in ESCAPES.sub(b"", whole.encode()).decode()


def test_nothing_of_an_answer_vanishes_or_commands_the_terminal() -> None:
    text = "<b>x</b> <script>y</script> ![alt](http://i) [ref]: http://r\x1b]0;title\x07\x1b[2Jend \u202e[red]z[/red]"
    for plain in (True, False):
        made = shown([Piece(text)], plain=plain, width=200)
        seen = ESCAPES.sub(b"", made.encode()).decode()
        for part in ("<b>x</b>", "<script>y</script>", "alt", "http://i", "[ref]: http://r", "end", "[red]z[/red]"):
            assert part in seen
        assert not {"\x07", "\u202e"} & set(made)
        assert "\x1b]0;" not in made
        assert "\x1b[2J" not in made


def test_thoughts_are_dim_and_stand_apart() -> None:
    made = shown([Piece("let me ", True), Piece("think", True), Piece("so")], plain=True)
    assert "\x1b[2;3m" in made
    assert ESCAPES.sub(b"", made.encode()) == b"let me think\nso\n"


@pytest.fixture
def anyio_backend() -> str:
    return "asyncio"


async def answer_markdown(exchange: Exchange) -> None:
    body = json.loads(exchange.request.body)
    if body["messages"][-1]["content"] == "bad":
        await exchange.reply(400, {"error": {"message": "refused"}})
        return
    if "wait" in body["messages"][-1]["content"]:
        await answer_by_words(exchange)
        return
    await exchange.start_events()
    await exchange.chunk(event("hm", "reasoning_content"))
    for word in ("**bold", f"** {body['model']} ", body["messages"][-1]["content"].replace("\n", "|")):
        await exchange.chunk(event(word))
    await exchange.chunk(b"data: [DONE]\n\n")
    await exchange.end()


@pytest.mark.anyio
async def test_at_a_terminal_with_colours(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("TERM", "xterm-256color")
    monkeypatch.setenv("LMKIT_STATE_DIR", str(tmp_path / "state"))
    async with nodes(FakeNode(models=("m", "n"), script=answer_markdown)) as (node,):
        terminal = Terminal(node.url, "--model", "m")
        try:
            await terminal.until("> ")
            for text, shown in {
                "first": "bold m first", "/model n": "n answers", "on \\\ntwo": "bold n on |two",
                '"""a\n\nb"""': "bold n a||b", "/set seed=1": "seed=1", "/retry": "bold n a||b",
                "bad": "HTTP 400: refused",
                "/nope": "lmkit: /nope is not a command", "/file none": "lmkit: none: No such file",
                f"/save {tmp_path}/c.json": "6 messages are in",
            }.items():  # fmt: skip
                terminal.type(text + "\n")
                await terminal.until("\n")
                seen = await terminal.until(shown)
                assert "**" not in seen.partition("hm")[2].split("bold")[-1]
                await terminal.until("> ")
            terminal.type("now wait\n")
            await terminal.until("<wait>")
            terminal.type("\x03")
            await terminal.until("stopped")
            await asyncio.wait_for(node.left.wait(), 5)
            await terminal.until("> ")
            assert await terminal.leave() == 0
        finally:
            terminal.close()
        assert json.loads(node.requests[-1].body)["seed"] == 1
        contents = [m["content"] for m in json.loads((tmp_path / "c.json").read_text())["messages"]]
        assert contents == ["first", "**bold** m first", "on \ntwo", "**bold** n on |two", "a\n\nb", "**bold** n a||b"]
        history = tmp_path / "state" / "chat_history"
        assert stat.S_IMODE(os.stat(history).st_mode) == 0o600
        again = Terminal(node.url, "--model", "m")
        try:
            await again.until("> ")
            again.type("\x1b[A\n")  # arrow up: the last line of the chat before
            await again.until("<wait>")
        finally:
            again.close()
