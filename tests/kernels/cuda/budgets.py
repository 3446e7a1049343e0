"""What each kernel executes and moves on some shape, counted on its PTX for sm_90a: lmkit/kernels/cuda/budgets.toml.

python -m tests.kernels.cuda.budgets [NAME ...]     counts the cases anew, and writes the table
"""

from __future__ import annotations

import argparse
import json
import sys
import tomllib
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path

import torch

from lmkit.kernels.cuda import module
from tests.emulator.backend import PEERS
from tests.emulator.ptx.backend import PtxBackend
from tests.emulator.ptx.traffic import KINDS, Traffic, joined
from tests.kernels.cuda.budget_cases import CASES

TABLE = Path(module.__file__).with_name("budgets.toml")
MARGIN = 0.1  # of what was counted
HEAD = """\
# What kernels execute and move, counted on PTX for sm_90a. Written by `python -m tests.kernels.cuda.budgets`, held by
# tests/kernels/cuda/test_budgets.py. By case and kernel: instructions of all threads; in_flight, the bytes that a block
# has asked for and not used yet; loads and stores, sectors of 32 bytes of global memory, and shared_loads and
# shared_stores, turns of the banks of shared memory, each with the least that the same bytes take.
"""
Pair = tuple[int, int]


@dataclass(frozen=True)
class Budget:
    """A row of the table. Pairs are (parts, the least), as of `Moved`."""

    file: str
    launches: int
    instructions: int
    in_flight: int
    loads: Pair
    stores: Pair
    shared_loads: Pair
    shared_stores: Pair

    @staticmethod
    def of(traffic: Traffic) -> Budget:
        loads, stores, shared_loads, shared_stores = (
            (traffic.of(kind).parts, traffic.of(kind).least) for kind in KINDS
        )
        return Budget(
            traffic.source, traffic.launches, traffic.instructions, traffic.in_flight, loads, stores, shared_loads,
            shared_stores,
        )  # fmt: skip

    def beyond(self, traffic: Traffic) -> list[str]:
        """What differs by more than MARGIN, in words, with the line of PTX that wastes most. Blocks that wait for each
        other execute any number of instructions."""
        now, found = Budget.of(traffic), []
        for kind in KINDS:
            (parts, least), (before, _) = getattr(now, kind), getattr(self, kind)
            if abs(parts - before) > MARGIN * before:
                moved = {line: each for (line, of), each in traffic.lines.items() if of == kind}
                worst = max(moved, key=lambda line: moved[line].waste, default=0)
                found.append(
                    f"{traffic.name}: {kind}: {parts} parts, {before} in the table, {least} are the least; "
                    f"line {worst} wastes most"
                )
        for name in ("in_flight",) if self.file in PEERS else ("instructions", "in_flight"):
            value, before = getattr(now, name), getattr(self, name)
            if abs(value - before) > MARGIN * before:
                found.append(f"{traffic.name}: {name}: {value}, {before} in the table")
        return found


Table = dict[str, dict[str, Budget]]  # by case and kernel


def read() -> Table:
    def pairs(row: dict) -> dict:
        return {name: tuple(value) if isinstance(value, list) else value for name, value in row.items()}

    rows = tomllib.loads(TABLE.read_text()) if TABLE.exists() else {}
    return {case: {name: Budget(**pairs(row)) for name, row in kernels.items()} for case, kernels in rows.items()}


def write(table: Table) -> None:
    lines = [HEAD]
    for case in filter(table.get, CASES):
        lines.append(f'["{case}"]\n')
        lines += (f"{name} = {{ {_fields(budget)} }}\n" for name, budget in sorted(table[case].items()))
        lines.append("\n")
    TABLE.write_text("".join(lines).rstrip("\n") + "\n")


def _fields(budget: Budget) -> str:
    """In TOML, whose arrays and strings are JSON's."""
    return ", ".join(f"{name} = {json.dumps(value)}" for name, value in asdict(budget).items())


@contextmanager
def counting_backend() -> Iterator[PtxBackend]:
    """An emulated H200 that counts."""
    backend = PtxBackend("90a", capability=(9, 0), overlap=False)
    backend.begin(7)
    module.BACKENDS["cpu"] = backend
    try:
        yield backend
    finally:
        module.BACKENDS.pop("cpu")
        module.counters.cache_clear()


def counted(backend: PtxBackend, case: str) -> dict[str, Traffic]:
    """By kernel, all launches of a case."""
    torch.manual_seed(0)
    with backend.counted() as launches:
        CASES[case]()
    return joined(launches)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", metavar="NAME")
    table = read()
    with counting_backend() as backend:
        for case in parser.parse_args().names or CASES:
            found = counted(backend, case)
            table[case] = {name: Budget.of(traffic) for name, traffic in found.items()}
            write(table)
            for traffic in found.values():
                sys.stdout.write(f"{case}: {traffic}, {traffic.in_flight} bytes in flight\n")
                sys.stdout.flush()


if __name__ == "__main__":
    main()
