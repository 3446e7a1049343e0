"""What launches of translated PTX execute and move, as the runtime counts it (traffic.h)."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from tests.emulator.ptx.syntax import Instruction, Label, Statement, elements

_LOAD = re.compile(r"ld\.(?!shared|local|param|acquire).*[busf](\d+)")


@dataclass(frozen=True)
class Moved:
    """Of loads or stores: `parts` are sectors of 32 bytes, or turns of shared memory's banks, and `least` as few as
    the same bytes take. A request is an access of a warp."""

    requests: int = 0
    parts: int = 0
    least: int = 0
    num_bytes: int = 0

    def __add__(self, other: Moved) -> Moved:
        return Moved(
            self.requests + other.requests,
            self.parts + other.parts,
            self.least + other.least,
            self.num_bytes + other.num_bytes,
        )

    @property
    def waste(self) -> float:
        """How many times the least; 1 if nothing was moved."""
        return self.parts / self.least if self.least else 1.0


KINDS = "loads", "stores", "shared_loads", "shared_stores"


Lines = dict[tuple[int, str], Moved]  # by line of the PTX and kind


@dataclass(frozen=True)
class Traffic:
    """Of launches of one kernel of a file. `instructions`: of all threads. `in_flight`: the most bytes of global memory
    that a block has asked for and not used yet, by copies as they run and by loads as PTX orders them."""

    source: str
    name: str
    launches: int
    instructions: int
    in_flight: int
    lines: Lines

    def of(self, kind: str) -> Moved:
        """Of all lines of one of KINDS."""
        return sum((moved for (_, each), moved in self.lines.items() if each == kind), Moved())

    def __str__(self) -> str:
        moved = (f"{kind} {self.of(kind).parts} of {self.of(kind).least}" for kind in KINDS)
        return f"{self.name}: {self.instructions} instructions, {', '.join(moved)}"


def lines_of(rows: Iterable[Sequence[int]]) -> Lines:
    """`rows` as lm_traffic writes them."""
    return {(place // 4, KINDS[place % 4]): Moved(*rest) for place, *rest in rows}


def loaded_together(statements: Iterable[Statement], lines: Lines) -> int:
    """The most bytes of global memory that a thread loads before it reads a register that one of the loads gives. Of
    loads that have run, without a label or a branch between them."""
    most, pending = 0, dict[str, int]()  # bytes by register
    for each in statements:
        if isinstance(each, Label) or (isinstance(each, Instruction) and each.opcode.startswith(("bra", "bar"))):
            pending = {}
        if not isinstance(each, Instruction) or not each.operands:
            continue
        to, *rest = each.operands
        sources = {name for operand in rest for name in re.findall(r"%\w+", operand)}
        if sources & pending.keys():
            pending = {}
        if (each.line, "loads") in lines and (found := _LOAD.fullmatch(each.opcode)):
            pending |= dict.fromkeys(elements(to), int(found[1]) // 8)
            most = max(most, sum(pending.values()))
    return most


def joined(launches: Iterable[Traffic]) -> dict[str, Traffic]:
    """By kernel. Launches of several compiled variants of a name are added up line by line."""
    found: dict[str, Traffic] = {}
    for each in launches:
        before = found.get(each.name, Traffic(each.source, each.name, 0, 0, 0, {}))
        lines = dict(before.lines)
        for key, moved in each.lines.items():
            lines[key] = lines.get(key, Moved()) + moved
        found[each.name] = Traffic(
            each.source, each.name, before.launches + 1, before.instructions + each.instructions,
            max(before.in_flight, each.in_flight), lines,
        )  # fmt: skip
    return found
