"""PTX as NVRTC writes it, read into entry points and their statements (PTX ISA, "Syntax")."""

from __future__ import annotations

import re
from bisect import bisect_left, bisect_right
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import lru_cache
from operator import itemgetter


class PtxError(Exception):
    """PTX that the translator does not know, with the line that has it."""


@dataclass(frozen=True)
class Instruction:
    """`guard` is "%p1", "!%p1" or empty. An operand is a register, a number, "[address+8]" or "{a, b}"."""

    line: int  # of the text
    guard: str
    opcode: str
    operands: tuple[str, ...]


@dataclass(frozen=True)
class Label:
    name: str


@dataclass(frozen=True)
class Scope:
    """A brace. Registers that are declared behind an opening one end with it."""

    opens: bool


@dataclass(frozen=True)
class Registers:
    """`names` of one PTX type, which stand for their bits."""

    type: str
    names: tuple[str, ...]


Statement = Instruction | Label | Scope | Registers


@dataclass
class Entry:
    """A kernel. `params`: (name, type) of each, in order. `local`: (name, bytes) of its memory of a thread, if any.
    `places`: (line of PTX, lines of the source that it and those behind it come from: its own, and where that is
    inlined)."""

    name: str
    params: list[tuple[str, str]]
    statements: list[Statement] = field(default_factory=list)
    local: tuple[str, int] | None = None
    places: list[tuple[int, tuple[int, ...]]] = field(default_factory=list)

    def source_lines(self, line: int) -> tuple[int, ...]:
        """Of the instruction at a line of PTX, from the innermost function outwards."""
        at = bisect_right(self.places, line, key=itemgetter(0))
        return self.places[at - 1][1] if at else ()


@dataclass(frozen=True)
class Constant:
    """A variable of the text that nothing writes."""

    name: str
    align: int
    values: bytes


@dataclass
class Text:
    entries: dict[str, Entry]
    constants: list[Constant]


_ENTRY = re.compile(r"\.entry (\w+)\((.*?)\)([^{;]*)\{", re.S)
_PARAM = re.compile(r"\.param \.(\w+)(?: \.ptr(?: \.\w+)*(?: \.align \d+)?)? (\w+)")
_ARRAY = re.compile(r"\.(?:const|global) \.align (\d+) \.b8 (\w+)\[(\d+)\](?: = \{([^}]*)\})?;")
_LABEL = re.compile(r"(\$?\w+):")
_GUARD = re.compile(r"@(!?)(%?\w+)\s+")
_MANY = re.compile(r"\.reg \.(\w+)\s+%(\w+)<(\d+)>")
_PLACE = re.compile(r"^[ \t]*\.loc\s+1 (\d+) [^\n]*?(?:inlined_at 1 (\d+) [^\n]*)?$", re.MULTILINE)
_LOCAL = re.compile(r"\.local \.align \d+ \.b8\s+(\w+)\[(\d+)\]")


def parse(text: str) -> Text:
    """The entry points and arrays of a text. Raises PtxError."""
    text = re.sub(r"//[^\n]*", "", text)
    places = [
        (_line(text, found.start(1)), tuple(int(line) for line in found.groups() if line))
        for found in _PLACE.finditer(text)
    ]
    text = re.sub(r"^[ \t]*\.loc\s[^\n]*", "", text, flags=re.MULTILINE)
    if found := re.search(r"\.func\b|\.local [^;]*;\s*\.visible|\.shared (?!.align \d+ .b8 shared_memory)", text):
        raise PtxError(f"line {_line(text, found.start())}: {found[0]!r} is not known")
    entries = {match[1]: _entry(text, match, places) for match in _ENTRY.finditer(text)}
    constants = []
    for match in _ARRAY.finditer(text):
        given = bytes(int(value, 0) & 255 for value in (match[4] or "").split(",") if value.strip())
        constants.append(Constant(match[2], int(match[1]), given.ljust(int(match[3]), b"\0")))
    return Text(entries, constants)


def operands(text: str) -> tuple[str, ...]:
    """The parts of a list between commas, but not those in braces."""
    return tuple(part.strip() for part in re.split(r",(?![^{]*\})", text) if part.strip())


def elements(operand: str) -> tuple[str, ...]:
    """The registers of "{a, b}", or the operand itself."""
    return operands(operand[1:-1]) if operand.startswith("{") else (operand,)


def _entry(text: str, match: re.Match[str], places: list[tuple[int, tuple[int, ...]]]) -> Entry:
    params = []
    for each in filter(None, map(str.strip, match[2].split(","))):
        param = _PARAM.fullmatch(each)
        if param is None:
            raise PtxError(f"line {_line(text, match.start())}: a parameter {each!r} of {match[1]} is not known")
        params.append((param[2], param[1]))
    entry = Entry(match[1], params, places=places)
    for at, piece in _pieces(text, match.end()):
        if found := _LOCAL.fullmatch(piece):
            entry.local = found[1], int(found[2])
        elif not piece.startswith(".pragma"):
            entry.statements.append(_statement(piece, _line(text, at)))
    return entry


def _pieces(text: str, at: int) -> Iterator[tuple[int, str]]:
    """Statements of a body with their places: braces, labels, and what ends with a semicolon."""
    depth = 1
    while True:
        while text[at].isspace() or text[at] == ";":
            at += 1
        if text[at] in "{}":
            depth += 1 if text[at] == "{" else -1
            if not depth:
                return
            yield at, text[at]
            at += 1
        elif label := _LABEL.match(text, at):
            yield at, label[0]
            at = label.end()
        else:
            end = text.index(";", at)
            yield at, text[at:end].strip()
            at = end + 1


def _statement(piece: str, line: int) -> Statement:
    if piece in "{}":
        return Scope(piece == "{")
    if label := _LABEL.fullmatch(piece):
        return Label(label[1])
    if many := _MANY.fullmatch(piece):
        return Registers(many[1], tuple(f"%{many[2]}{i}" for i in range(int(many[3]))))
    if piece.startswith(".reg"):
        _, type_, *names = piece.replace(",", " ").split()
        return Registers(type_[1:], tuple(names))
    guard = _GUARD.match(piece)
    if guard is not None:
        piece = piece[guard.end() :]
    opcode, _, rest = piece.replace("\t", " ").partition(" ")
    if opcode.startswith("."):
        raise PtxError(f"line {line}: the directive {opcode} is not known")
    return Instruction(line, guard[1] + guard[2] if guard else "", opcode, operands(rest))


def _line(text: str, at: int) -> int:
    return bisect_left(_ends(text), at) + 1


@lru_cache(2)
def _ends(text: str) -> list[int]:
    """Where the lines end."""
    return [found.start() for found in re.finditer("\n", text)]
