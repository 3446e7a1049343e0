"""What launches of translated PTX execute and move, as the runtime counts it (traffic.h)."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass


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


@dataclass(frozen=True)
class Traffic:
    """Of launches of one kernel. `instructions`: of all threads. `lines`: by line of the PTX and kind."""

    name: str
    launches: int
    instructions: int
    lines: dict[tuple[int, str], Moved]

    def of(self, kind: str) -> Moved:
        """Of all lines of one of KINDS."""
        return sum((moved for (_, each), moved in self.lines.items() if each == kind), Moved())

    def __str__(self) -> str:
        moved = (f"{kind} {self.of(kind).parts} of {self.of(kind).least}" for kind in KINDS)
        return f"{self.name}: {self.instructions} instructions, {', '.join(moved)}"


def read(name: str, instructions: int, rows: Iterable[Sequence[int]]) -> Traffic:
    """Of one launch. `rows` as lm_traffic writes them."""
    lines = {(place // 4, KINDS[place % 4]): Moved(*rest) for place, *rest in rows}
    return Traffic(name, 1, instructions, lines)


def joined(launches: Iterable[Traffic]) -> dict[str, Traffic]:
    """By kernel. Launches of several compiled variants of a name are added up line by line."""
    found: dict[str, Traffic] = {}
    for each in launches:
        before = found.get(each.name, Traffic(each.name, 0, 0, {}))
        lines = dict(before.lines)
        for key, moved in each.lines.items():
            lines[key] = lines.get(key, Moved()) + moved
        found[each.name] = Traffic(each.name, before.launches + 1, before.instructions + each.instructions, lines)
    return found
