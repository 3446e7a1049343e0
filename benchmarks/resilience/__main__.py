"""Attacks and loads on real servers and proxies, each with the limit that it must keep.

    python -m benchmarks.resilience [--quick] [--json FILE] [--only NAME ...]

Cases start `lmkit serve` and `lmkit proxy` on the demo model, offline. --quick runs every case at a small size. The
groups `clusters`, `ray`, `soak` and `streams` take minutes, and run only if they are named.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
from pathlib import Path

from rich.console import Console
from rich.table import Table

from benchmarks.report import machine, save
from benchmarks.resilience.case import Setting
from benchmarks.resilience.catalog import GROUPS

LONG = ("clusters", "ray", "soak", "streams")
console = Console(width=None if sys.stdout.isatty() else 120)


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
        with tempfile.TemporaryDirectory(prefix="lmkit-resilience-") as scratch:
            begin = time.perf_counter()
            rows.append(case.row(case.measure(Setting(Path(scratch), arguments.quick))))
        row = rows[-1]
        state = "kept" if row["kept"] else "NOT KEPT"
        console.print(f"{case.name}: {row['value']:g} {case.unit}, {state}, {time.perf_counter() - begin:.0f} s")
    table = Table(title=f"attacks and loads, {machine()['cpu']}, {time.perf_counter() - start:.0f} s")
    for column in ("case", "value", "limit", "", ""):
        table.add_column(column, justify="left" if column == "case" else "right")
    for row in rows:
        table.add_row(
            row["case"], f"{row['value']:g}", f"{row['limit']:g}", row["unit"], "" if row["kept"] else "missed"
        )
    console.print(table)
    if arguments.json:
        save(arguments.json, "resilience", rows, quick=arguments.quick)
    if not all(row["kept"] for row in rows):
        sys.exit(1)


if __name__ == "__main__":
    main()
