"""The conversation of `lmkit chat`, and the commands that change it."""

from __future__ import annotations

import json
from collections.abc import Callable, Generator
from contextlib import closing
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from lmkit.cli.chat_models import ChatModel, Messages, Piece
from lmkit.errors import ConfigError, LMKitError

MAX_FILE = 4 << 20  # bytes of a file that goes with a message, as many as a server takes by default
ROLES = ("system", "user", "assistant", "tool")
# What /set changes: fields of a request that servers know, and how their values are read.
SETTINGS: dict[str, Callable[[str], Any]] = {
    **dict.fromkeys(("temperature", "top_p", "min_p", "frequency_penalty", "presence_penalty"), float),
    **dict.fromkeys(("top_k", "max_tokens", "seed"), int),
    "repetition_penalty": float,
    "stop": str,
}


@dataclass
class Conversation:
    """The messages so far, and the model that answers them."""

    model: ChatModel
    system: str | None = None
    files: list[str] = field(default_factory=list)  # texts of files, for the next message
    saved: Path | None = None  # the file that holds this conversation
    failed: str = ""  # the last message, if it has no answer

    def __post_init__(self) -> None:
        self.reset()

    def reset(self) -> None:
        self.messages: Messages = [] if self.system is None else [{"role": "system", "content": self.system}]
        self.files, self.failed = [], ""

    def ask(self, text: str, before: int | None = None) -> Generator[Piece, None, None]:
        """Pieces of the answer to the first `before` messages and `text`. The turn takes the place of what came then.

        An answer is remembered, even if it was stopped early; a failed turn changes nothing. The files go with the
        message, and wait for the next one if it fails.
        """
        self.failed = text
        said = [*self.messages[:before], {"role": "user", "content": "\n\n".join([*self.files, text])}]
        answer = ""
        try:
            with closing(self.model.answer(said)) as pieces:
                for piece in pieces:
                    answer += "" if piece.is_thought else piece.text
                    yield piece
        except LMKitError:
            answer = ""
            raise
        finally:
            if answer:
                self.messages = [*said, {"role": "assistant", "content": answer}]
                self.files, self.failed = [], ""

    def last_asked(self) -> int:
        """The place of the user's last message. Raises ConfigError if there is none."""
        for i in range(len(self.messages) - 1, -1, -1):
            if self.messages[i]["role"] == "user":
                return i
        raise ConfigError("there is no message yet")


class Reply(NamedTuple):
    """What a command says, and what is asked next, if anything."""

    text: str = ""
    ask: str = ""
    before: int | None = None  # how many of the messages come before it; None is all


def execute(conversation: Conversation, line: str) -> Reply:
    """Execute a command of the prompt. Raises ConfigError, and OSError for a file."""
    name, _, text = line.partition(" ")
    if name not in COMMANDS:
        raise ConfigError(f"{name} is not a command; /help lists them")
    run, usage, _ = COMMANDS[name]
    text = text.strip()
    if text and not usage:
        raise ConfigError(f"{name} stands alone")
    if not text and usage and not usage.startswith("["):
        raise ConfigError(f"write {name} {usage}")
    return run(conversation, text)


def _help(conversation: Conversation, text: str) -> Reply:
    rows = [(f"{name} {usage}".rstrip(), about) for name, (_, usage, about) in COMMANDS.items()]
    width = max(len(row[0]) for row in rows) + 2
    lines = [f"{left:<{width}}{right}" for left, right in [*rows, ("/exit", "leave (also Ctrl-D)")]]
    notes = (
        'A line that ends with \\ goes on. """ begins and ends a text of several lines.',
        "Ctrl-C stops an answer.",
    )
    return Reply("\n".join([*lines, *notes]))


def _reset(conversation: Conversation, text: str) -> Reply:
    conversation.reset()
    return Reply("forgotten")


def _system(conversation: Conversation, text: str) -> Reply:
    conversation.system = text or None
    conversation.reset()
    return Reply("the system message is set" if text else "there is no system message")


def _retry(conversation: Conversation, text: str) -> Reply:
    if conversation.failed:
        return Reply(ask=conversation.failed)
    i = conversation.last_asked()
    return Reply(ask=str(conversation.messages[i]["content"]), before=i)


def _undo(conversation: Conversation, text: str) -> Reply:
    i = conversation.last_asked()
    said = str(conversation.messages[i]["content"])
    del conversation.messages[i:]
    return Reply(f"taken back: {said if len(said) <= 60 else said[:57] + '...'}")


def _set(conversation: Conversation, text: str) -> Reply:
    options = dict(conversation.model.options)
    for word in text.split():
        name, _, value = word.partition("=")
        if name not in SETTINGS or "=" not in word:
            raise ConfigError(f"{word}: write NAME=VALUE with one of {', '.join(SETTINGS)}")
        options.pop(name, None)
        if value:
            try:
                options[name] = SETTINGS[name](value)
            except ValueError:
                kind = "an integer" if SETTINGS[name] is int else "a number"
                raise ConfigError(f"{name}={value}: expected {kind}") from None
    conversation.model.set(options)
    return Reply(" ".join(f"{name}={value}" for name, value in options.items()) or "all as the model has it")


def _model(conversation: Conversation, text: str) -> Reply:
    model = conversation.model
    if text:
        model.choose(text)
        return Reply(f"{model.name} answers from now on")
    return Reply("\n".join(f"{'*' if name == model.name else ' '} {name}" for name in model.names))


def _file(conversation: Conversation, text: str) -> Reply:
    path = Path(text).expanduser()
    if (size := path.stat().st_size) > MAX_FILE:
        raise ConfigError(f"{path}: {size:,} bytes, more than {MAX_FILE:,}")
    try:
        content = path.read_text("utf-8")
    except UnicodeDecodeError:
        raise ConfigError(f"{path}: not a text in UTF-8") from None
    fence = "```"
    while fence in content:
        fence += "`"
    conversation.files.append(f"{path.name}:\n{fence}\n{content.rstrip()}\n{fence}")
    return Reply(f"{path} goes with the next message ({len(content):,} characters)")


def _save(conversation: Conversation, text: str) -> Reply:
    path = Path(text).expanduser()
    if path.exists() and path != conversation.saved:
        raise ConfigError(f"{path} exists; choose another name")
    held = {"model": conversation.model.name, **conversation.model.options, "messages": conversation.messages}
    path.write_text(json.dumps(held, indent=2, ensure_ascii=False) + "\n", "utf-8")
    conversation.saved = path
    return Reply(f"{len(conversation.messages)} messages are in {path}")


def _load(conversation: Conversation, text: str) -> Reply:
    path = Path(text).expanduser()
    try:
        messages = json.loads(path.read_text("utf-8"))["messages"]
        wrong = [m for m in messages if m["role"] not in ROLES or not isinstance(m["content"], str)]
    except (ValueError, KeyError, TypeError):
        raise ConfigError(f"{path}: not a conversation that /save or the chat page wrote") from None
    if wrong:
        raise ConfigError(f"{path}: a message has no text or no role of {', '.join(ROLES)}")
    conversation.system = next((m["content"] for m in messages if m["role"] == "system"), None)
    conversation.reset()
    conversation.messages, conversation.saved = messages, path
    return Reply(f"{len(messages)} messages of {path}")


# Name: (function, what follows it, what it does). What stands in brackets may be left out.
COMMANDS: dict[str, tuple[Callable[[Conversation, str], Reply], str, str]] = {
    "/help": (_help, "", "this list"),
    "/reset": (_reset, "", "forget the conversation, keep the system message"),
    "/system": (_system, "[TEXT]", "set the system message and start anew; without TEXT, remove it"),
    "/retry": (_retry, "", "ask the last message again"),
    "/undo": (_undo, "", "take the last message and its answer back"),
    "/set": (_set, "[NAME=VALUE ...]", "change temperature, top_p, max_tokens, seed and others; NAME= is the default"),
    "/model": (_model, "[NAME]", "let another model of the server answer; without NAME, list them"),
    "/file": (_file, "PATH", "send a text file with the next message"),
    "/save": (_save, "PATH", "write the conversation to a new file"),
    "/load": (_load, "PATH", "go on with a conversation that was saved"),
}
