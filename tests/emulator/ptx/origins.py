"""Which lines of the sources a translated kernel comes from, and which of them have run."""

from __future__ import annotations

import re
from collections.abc import Iterable
from functools import cache

from lmkit.kernels.cuda import source
from tests.emulator.ptx.syntax import Entry, Instruction
from tests.emulator.ptx.translation import block_sizes

Place = tuple[str, int]  # a file of csrc and a line of it


@cache
def origins(name: str) -> list[Place]:
    """Of each line of `kernel_source(name)`."""
    seen: set[str] = set()

    def places(file: str) -> Iterable[Place]:
        seen.add(file)
        for number, line in enumerate((source.FOLDER / file).read_text().splitlines(), 1):
            included = re.fullmatch(r'#include "(\S+)"', line)
            if included is None:
                yield file, number
            elif included[1] not in seen:
                yield from places(included[1])

    return list(places(name))


def has_run(entry: Entry, file: str, ran: Iterable[int]) -> set[Place]:
    """The lines of sources that instructions of an entry come from, of basic blocks that have run. `ran`: how many
    instructions of each have."""
    found, blocks, running = set[int](), iter(ran), False
    for each, count in zip(entry.statements, block_sizes(entry.statements), strict=True):
        if count:
            running = next(blocks) > 0
        if running and isinstance(each, Instruction):
            found.update(entry.source_lines(each.line))
    return {origins(file)[line - 1] for line in found}
