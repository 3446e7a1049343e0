"""The KV cache against its goals.

    python -m benchmarks.kv [--quick] [--json FILE] [--only NAME ...] [--threads N] [--workdir DIR]

Models have random weights. Every case compares measurements of one run. All cases take about twelve minutes on two
quiet cores. --quick runs everything at sizes that mean little and takes about one minute.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable
from pathlib import Path

from rich.console import Console
from rich.table import Table

from benchmarks.kv import capacity, chat, history, hit_rate, interference, overhead, planning
from benchmarks.kv.common import Row, Setting
from benchmarks.report import machine, save
from lmkit.environment import default_num_threads
from lmkit.errors import LMKitError
from lmkit.kernels.cpu import threads as kernel_threads

console = Console(width=None if sys.stdout.isatty() else 120)


def attention(setting: Setting) -> list[Row]:
    from benchmarks import kv_attention

    rows = kv_attention.cases(seconds=2 if setting.quick else 20)
    return [Row(row.pop("case"), row.pop("ratio"), row.pop("goal"), row) for row in rows]


CASES: dict[str, Callable[[Setting], list[Row]]] = {
    "capacity": capacity.cases,
    "hit_rate": hit_rate.cases,
    "lookup": overhead.lookups,
    "overhead": overhead.cases,
    "planning": planning.cases,
    "attention": attention,
    "chat": chat.cases,
    "interference": interference.cases,
    "history": history.cases,
}


def table(rows: list[Row]) -> Table:
    out = Table(title=f"KV cache, {machine()['cpu']}")
    for column in ("case", "ratio", "goal", ""):
        out.add_column(column, justify="left" if column == "case" else "right")
    for row in rows:
        out.add_row(row.case, f"{row.ratio:.2f}", f"{row.goal:g}", "reached" if row.reached else "missed")
    return out


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="a smoke run")
    parser.add_argument("--json", type=Path, help="also write the figures here")
    parser.add_argument("--only", nargs="+", choices=CASES, default=list(CASES), metavar="NAME", help="some cases")
    parser.add_argument("--threads", type=int, default=default_num_threads())
    parser.add_argument("--workdir", type=Path, default=Path("build/kv"), help="for models and KV on disk")
    arguments = parser.parse_args()
    setting, rows = Setting(arguments.workdir, arguments.threads, arguments.quick), list[Row]()
    try:
        kernel_threads.configure(arguments.threads)
        for name in arguments.only:
            begin = time.perf_counter()
            rows += CASES[name](setting)
            console.print(f"{name}: {time.perf_counter() - begin:.0f} s")
    except (LMKitError, RuntimeError) as error:
        sys.exit(f"error: {error}")
    console.print(table(rows))
    if arguments.json:
        save(arguments.json, "kv", [row.as_dict() for row in rows], threads=arguments.threads, quick=arguments.quick)


if __name__ == "__main__":
    main()
