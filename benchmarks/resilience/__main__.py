"""Attacks and loads on real servers and proxies, each with the limit that it must keep.

    python -m benchmarks.resilience [--quick] [--json FILE] [--only NAME ...]

A case that raises is a miss. A case that needs a quiet machine is measured up to three times, and says so. --json is
written after each case. Cases start `lmkit serve` and `lmkit proxy` on the demo model, offline. --quick runs every case
at a small size. The groups `clusters`, `ray`, `soak` and `streams` take minutes, and run only if they are named.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from benchmarks.report import machine, save
from benchmarks.resilience.case import Case, Setting
from benchmarks.resilience.catalog import GROUPS

TRIES = 3
LONG = ("clusters", "ray", "soak", "streams")
console = Console(width=None if sys.stdout.isatty() else 120)


def measured(case: Case, *, quick: bool) -> dict[str, Any]:
    """The row of a case, whatever it raises."""
    with tempfile.TemporaryDirectory(prefix="lmkit-resilience-", ignore_cleanup_errors=True) as scratch:
        try:
            return case.row(case.measure(Setting(Path(scratch), quick)))
        except Exception as error:  # noqa: BLE001 - the other cases go on
            return case.row(None, f"{type(error).__name__}: {error}"[:500])


def shown(row: dict[str, Any]) -> str:
    return "-" if row["value"] is None else f"{row['value']:g}"


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="small sizes")
    parser.add_argument("--json", type=Path, help="also write the figures here")
    parser.add_argument("--only", nargs="+", choices=GROUPS, metavar="NAME", help="some groups")
    arguments = parser.parse_args()
    names = arguments.only or [name for name in GROUPS if name not in LONG]
    rows, start = [], time.perf_counter()
    for case in (case for name in names for case in GROUPS[name]):
        if reason := case.refusal():
            console.print(f"{case.name}: left out, {reason}")
            continue
        begin, tries = time.perf_counter(), 0
        while True:
            row, tries = measured(case, quick=arguments.quick), tries + 1
            if row["kept"] or not case.needs_quiet or tries == TRIES:
                break
            console.print(f"{case.name}: {shown(row)} {case.unit}, measured again: it needs a quiet machine")
        rows.append(row)
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
