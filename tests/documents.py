"""Markdown documents as a reader sees them: blocks of code, and the commands in them with the output shown."""

from __future__ import annotations

import re
import shlex
import textwrap
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parents[1]
NOT_RUN = re.compile(r"<!-- not run: (.+) -->")


class Block(NamedTuple):
    """Lines of code. `not_run` is the reason of a comment `<!-- not run: REASON -->` before it. `is_next` says that
    only blank lines stand between this block and the one before."""

    language: str
    lines: list[str]
    not_run: str
    is_next: bool


class Command(NamedTuple):
    text: str
    shown: list[str]  # the lines of its output

    @property
    def is_refused(self) -> bool:
        """Whether an error is shown. The command then does not succeed."""
        return any(re.match(r"lmkit: |\w+Error: ", line) for line in self.shown)


def blocks(text: str) -> Iterator[Block]:
    """The fenced blocks of a document, and its lines that are indented by four spaces."""
    end = 0
    for match in re.finditer(r"^```(.*)\n((?:.*\n)*?)```$|(?:(?<=\n\n)|^)((?: {4}.*\n|\n)+)", text, re.MULTILINE):
        language, fenced, indented = match.groups()
        code = fenced if indented is None else textwrap.dedent(indented).strip("\n")
        if code.strip():
            reason = NOT_RUN.search(text[end : match.start()].rstrip().rpartition("\n")[2])
            is_next = not text[end : match.start()].strip()
            yield Block((language or "").strip(), code.splitlines(), reason.group(1) if reason else "", is_next)
            end = match.end()


def is_open(command: str) -> bool:
    """Whether the shell waits for another line: after a backslash, or within quotes."""
    if command.endswith("\\"):
        return True
    try:
        shlex.split(command)
    except ValueError:
        return True
    return False


def commands(block: Block) -> list[Command]:
    """The lines after `$ `, each with the output below it."""
    found: list[Command] = []
    for line in block.lines:
        if found and not found[-1].shown and is_open(found[-1].text):
            found[-1] = Command(f"{found[-1].text}\n{line}", [])
        elif line.startswith("$ "):
            found.append(Command(line[2:], []))
        elif found:
            found[-1].shown.append(line)
    return found


def prose(text: str) -> str:
    """A document without its code."""
    fenced = re.sub(r"^```.*?^```$", "", text, flags=re.MULTILINE | re.DOTALL)
    return re.sub(r"`[^`]*`", "", re.sub(r"^ {4}\S.*$", "", fenced, flags=re.MULTILINE))


def links(text: str) -> list[str]:
    """The targets of a document's links and pictures that are not addresses of the web."""
    found = re.findall(r"\]\(\s*([^)\s]+)\s*\)", prose(text))
    return [target for target in found if not re.match(r"[a-z]+:", target)]


def anchors(text: str) -> set[str]:
    """What a link may name after `#`: the headings, as GitHub and the site write them."""
    code = re.sub(r"^```.*?^```$", "", text, flags=re.MULTILINE | re.DOTALL)
    titles = re.findall(r"^#{1,6} +(.+?) *$", code, re.MULTILINE)
    slugs = [re.sub(r"[^\w\- ]", "", _shown(title).lower()).replace(" ", "-") for title in titles]
    return {slug if not slugs[:i].count(slug) else f"{slug}_{slugs[:i].count(slug)}" for i, slug in enumerate(slugs)}


def _shown(title: str) -> str:
    return re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", title).replace("`", "")
