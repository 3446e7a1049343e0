"""`lmkit chat` at a terminal: reading messages, and showing answers as Markdown while they come."""

from __future__ import annotations

import contextlib
import readline
import time
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

from markdown_it import MarkdownIt
from rich.console import Console
from rich.live import Live
from rich.markdown import Markdown
from rich.segment import Segment, Segments

from lmkit.cli.chat_conversation import COMMANDS, Conversation, execute
from lmkit.cli.chat_models import Piece, printable
from lmkit.environment import environment
from lmkit.errors import LMKitError

HISTORY = "chat_history"  # in the state folder
MAX_HISTORY = 1000  # lines
QUOTES = '"""'
SECONDS_A_FRAME = 0.08
# HTML, images and references would vanish from an answer that is read as Markdown. So they stay text.
PARSER = MarkdownIt("commonmark", {"html": False}).enable(["strikethrough", "table"]).disable(["image", "reference"])


class Terminal:
    """Reads messages and commands until the user leaves."""

    def __init__(self, conversation: Conversation, *, plain: bool = False) -> None:
        self._conversation = conversation
        self._console = Console(highlight=False)
        is_simple = not self._console.is_terminal or self._console.is_dumb_terminal
        self._plain = plain or is_simple
        self._prompts = (
            ("> ", ". ") if is_simple else ("\001\033[1;32m\002> \001\033[0m\002", "\001\033[2m\002. \001\033[0m\002")
        )

    def run(self, note: str = "") -> None:
        """`note` is shown first."""
        for line in (note, "/help lists the commands"):
            if line:
                self._console.print(line, style="dim", markup=False)
        with _line_editing():
            while True:
                try:
                    text = self._read()
                except EOFError:
                    self._console.print()
                    return
                except KeyboardInterrupt:
                    self._console.print("\n/exit or Ctrl-D leaves", style="dim")
                    continue
                if text == "/exit":
                    return
                self._take(text)

    def _read(self) -> str:
        """A message or a command. A line that ends with a backslash goes on, and so does a text in triple quotes."""
        line = input(self._prompts[0]).strip()
        if line.startswith(QUOTES):
            line = line.removeprefix(QUOTES)
            while not line.endswith(QUOTES):
                line += "\n" + input(self._prompts[1])
            return line.removesuffix(QUOTES).strip("\n")
        while line.endswith("\\"):
            line = line[:-1] + "\n" + input(self._prompts[1])
        return line

    def _take(self, text: str) -> None:
        try:
            if text.startswith("/"):
                reply = execute(self._conversation, text)
                if reply.text:
                    self._console.print(printable(reply.text), markup=False)
                self._show(reply.ask, reply.before)
            else:
                self._show(text)
        except KeyboardInterrupt:
            self._console.print("stopped", style="dim")
        except OSError as error:
            self._refuse(f"{error.filename}: {error.strerror}")
        except LMKitError as error:
            self._refuse(str(error))

    def _refuse(self, message: str) -> None:
        self._console.print(f"lmkit: {printable(message)}", style="red", markup=False)

    def _show(self, text: str, before: int | None = None) -> None:
        if not text.strip():
            return
        answer = Answer(self._console, plain=self._plain)
        with answer, closing(self._conversation.ask(text, before)) as pieces:
            for piece in pieces:
                answer.add(piece)


class Answer:
    """Shows one answer while it comes. Its finished blocks are printed, and the last one is drawn anew each time."""

    def __init__(self, console: Console, *, plain: bool) -> None:
        self._console, self._plain = console, plain
        self._text = ""  # what is not printed yet
        self._at_line_start = True
        self._is_first = True  # of the blocks
        self._is_thought = False
        self._live: Live | None = None
        self._settled = 0.0  # when

    def __enter__(self) -> Answer:
        return self

    def __exit__(self, *_: object) -> None:
        self._end_live()
        self._print(self._text)
        self._text = ""
        self._end_line()

    def add(self, piece: Piece) -> None:
        text = printable(piece.text)
        if piece.is_thought != self._is_thought:
            self._is_thought = piece.is_thought
            self._end_line()
            self._is_first = self._is_first and piece.is_thought
        if piece.is_thought or self._plain:
            self._console.out(text, end="", style="dim italic" if piece.is_thought else None)
            self._at_line_start = text.endswith("\n") if text else self._at_line_start
            return
        self._text += text
        if (now := time.monotonic()) - self._settled >= SECONDS_A_FRAME:
            self._settled = now
            self._settle()

    def _settle(self) -> None:
        """Print the blocks that are finished. The rest is drawn by a thread."""
        if end := finished(self._text):
            self._end_live()
            self._print(self._text[:end])
            self._text = self._text[end:]
        if self._live is None:
            rate = 1 / SECONDS_A_FRAME
            self._live = Live(console=self._console, get_renderable=self._tail, refresh_per_second=rate, transient=True)
            self._live.start()

    def _tail(self) -> Segments:
        """The last lines of the rest, as many as the screen has: what has scrolled away cannot be taken back."""
        return _shown(self._lines(self._text)[-max(1, self._console.height - 2) :])

    def _end_live(self) -> None:
        if self._live is not None:
            self._live.stop()
            self._live = None

    def _print(self, text: str) -> None:
        if lines := self._lines(text):
            self._console.print(_shown(lines), end="")
            self._is_first = False

    def _lines(self, text: str) -> list[list[Segment]]:
        """The lines of some blocks, with one empty line before them."""
        lines = self._console.render_lines(_Markdown(text), pad=False)
        written = [i for i, line in enumerate(lines) if any(part.text.strip() for part in line)]
        blank: list[list[Segment]] = [] if self._is_first else [[]]
        return [*blank, *lines[written[0] : written[-1] + 1]] if written else []

    def _end_line(self) -> None:
        if not self._at_line_start:
            self._console.print()
            self._at_line_start = True


def _shown(lines: list[list[Segment]]) -> Segments:
    return Segments([part for line in lines for part in (*line, Segment.line())])


class _Markdown(Markdown):
    """Markdown of a model. Nothing of its text is left out, and its lines stay lines."""

    def __init__(self, text: str) -> None:
        super().__init__("", code_theme="ansi_dark", hyperlinks=False)
        self.markup, self.parsed = text, PARSER.parse(text)
        for token in self.parsed:
            for child in token.children or ():
                if child.type == "softbreak":
                    child.type = "hardbreak"


def finished(text: str) -> int:
    """Where the last block of a Markdown text begins: what stands before it does not change any more."""
    begin = at = 0
    fence, is_blank = "", False
    for line in text.splitlines(keepends=True):
        body = line.lstrip(" ")
        if not fence and is_blank and body.strip() and not line.startswith((" ", "\t")):
            begin = at
        is_blank = not body.strip()
        mark = body[: len(body) - len(body.lstrip(body[:1]))] if body[:1] in ("`", "~") else ""
        if fence:
            fence = "" if mark.startswith(fence) and body.strip() == mark else fence
        elif len(mark) >= 3:
            fence = mark
        at += len(line)
    return begin


@contextlib.contextmanager
def _line_editing() -> Iterator[None]:
    """Line editing, with the history of earlier chats and commands that Tab completes."""
    path = environment().state_dir / HISTORY
    with contextlib.suppress(OSError):
        readline.read_history_file(path)
    readline.set_history_length(MAX_HISTORY)
    readline.set_completer(lambda text, state: next(iter([c for c in COMMANDS if c.startswith(text)][state:]), None))
    readline.set_completer_delims(" \n")
    readline.parse_and_bind("tab: complete")
    try:
        yield
    finally:
        with contextlib.suppress(OSError):
            _write_history(path)


def _write_history(path: Path) -> None:
    """For this user alone: it holds what was asked."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.touch(mode=0o600)
    readline.write_history_file(path)
