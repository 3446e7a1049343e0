"""Attacks and loads on real servers and proxies, each with the limit that it must keep.

    python -m benchmarks.resilience [--quick] [--json FILE] [--only NAME ...]

A case that raises, or does not end, is a miss. A case that needs a quiet machine is measured up to three times in the
first eight minutes, and says so. --json is written at the start and after each case. Cases start `lmkit serve` and
`lmkit proxy` on the demo model, offline. --quick runs every case at a small size. The groups `clusters`, `ray`, `soak`
and `streams` take minutes, and run only if they are named.
"""

from __future__ import annotations

import argparse
import contextlib
import signal
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from benchmarks.report import machine, save
from benchmarks.resilience.case import Case, Setting
from benchmarks.resilience.catalog import GROUPS

TRIES = 3
REPEAT_SECONDS = 480.0  # of a run; then nothing is measured again, so that it ends in time
LONG = ("clusters", "ray", "soak", "streams")
CASE_SECONDS, LONG_SECONDS = 400.0, 1500.0  # then a case is given up; one of a long group
console = Console(width=None if sys.stdout.isatty() else 120)


def measured(case: Case, *, quick: bool, turn: int = 1, seconds: float = CASE_SECONDS) -> dict[str, Any]:
    """The row of a case, whatever it raises, and also if it does not end within `seconds`."""
    with tempfile.TemporaryDirectory(prefix="lmkit-resilience-", ignore_cleanup_errors=True) as scratch:
        try:
            with given_up_after(seconds):
                return case.row(case.figure(Setting(Path(scratch), quick, turn)), turns=turn)
        except Exception as error:  # noqa: BLE001 - the other cases go on
            return case.row(None, f"{type(error).__name__}: {error}"[:500], turns=turn)


@contextlib.contextmanager
def given_up_after(seconds: float) -> Iterator[None]:
    """Raise TimeoutError in the block, which must be in the main thread."""

    def give_up(*_: object) -> None:
        raise TimeoutError(f"it did not end within {seconds:g} s")

    handler = signal.signal(signal.SIGALRM, give_up)
    before, _ = signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, before)
        signal.signal(signal.SIGALRM, handler)


def shown(row: dict[str, Any]) -> str:
    return "-" if row["value"] is None else f"{row['value']:g}"


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="small sizes")
    parser.add_argument("--json", type=Path, help="also write the figures here")
    parser.add_argument("--only", nargs="+", choices=GROUPS, metavar="NAME", help="some groups")
    arguments = parser.parse_args()
    names = arguments.only or [name for name in GROUPS if name not in LONG]
    rows: list[dict[str, Any]] = []
    start = time.perf_counter()
    if arguments.json:
        save(arguments.json, "resilience", rows, quick=arguments.quick)
    for group, case in ((name, case) for name in names for case in GROUPS[name]):
        if reason := case.refusal():
            console.print(f"{case.name}: left out, {reason}")
            continue
        begin, seconds = time.perf_counter(), LONG_SECONDS if group in LONG else CASE_SECONDS
        for turn in range(1, TRIES + 1):
            row = measured(case, quick=arguments.quick, turn=turn, seconds=seconds)
            late = time.perf_counter() - start > REPEAT_SECONDS
            if row["kept"] or not case.needs_quiet or turn == TRIES or late:
                break
            console.print(f"{case.name}: {shown(row)} {case.unit}, measured again: it needs a quiet machine")
        rows.append(row | {"seconds": round(time.perf_counter() - begin, 1)})
        state = "kept" if row["kept"] else f"NOT KEPT {row.get('error', '')}".rstrip()
        console.print(f"{case.name}: {shown(row)} {case.unit}, {state}, {time.perf_counter() - begin:.0f} s")
        if arguments.json:
            save(arguments.json, "resilience", rows, quick=arguments.quick)
    table = Table(title=f"attacks and loads, {machine()['cpu']}, {time.perf_counter() - start:.0f} s")
    for column in ("case", "value", "limit", "", ""):
        table.add_column(column, justify="left" if column == "case" else "right")
    for row in rows:
        table.add_row(row["case"], shown(row), f"{row['limit']:g}", row["unit"], "" if row["kept"] else "missed")
    console.print(table)
    if not all(row["kept"] for row in rows):
        sys.exit(1)


if __name__ == "__main__":
    main()
