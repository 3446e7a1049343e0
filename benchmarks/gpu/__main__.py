"""Everything about one GPU in one command: build, check numbers, measure, compare with the bounds.

    python -m benchmarks.gpu --out DIR [--only gemm,engine] [--quick] [--peers FOLDER] [--minutes 9]

DIR gets a file of rows for each section, results.json, table.txt and pictures, and what is kept in caches: compiled
kernels, measured plans, results of self-tests. DIR.tar.gz has them all after each section. The first
section, `smoke`, compares the engine's tokens with the CPU's: if it fails, nothing else is measured. A section is a
process of its own with a time limit. If a section fails, its rows say so, and the others go on. `--device cpu` is a
rehearsal without a GPU: kernels are emulated on tiny shapes, and its times mean nothing.
"""

from __future__ import annotations

import argparse
import importlib
import os
import shutil
import signal
import subprocess
import sys
import time
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import IO

from rich.console import Console
from rich.table import Table

from benchmarks.gpu.context import Context, Row, read_rows
from benchmarks.gpu.figures import Figure, figures

console = Console(width=None if sys.stdout.isatty() else 160)


PROGRAM = "benchmarks.gpu"  # the module of a section's process
LEAST_SECONDS = 5.0  # a section begins only if so much time is left


@dataclass(frozen=True)
class Section:
    name: str
    module: str
    seconds: float  # at most


SECTIONS = (
    Section("smoke", "smoke", 180),
    Section("machine", "machine", 40),
    Section("build", "build", 90),
    Section("gemm", "gemm", 150),
    Section("attention", "attention", 60),
    Section("small", "small", 30),
    Section("experts", "sparse", 40),
    Section("engine", "engine", 150),
    Section("switches", "switched", 220),
    Section("transformers", "transformers_peer", 60),
    Section("quantize", "quantize", 90),
    Section("numerics", "numerics", 180),
)


def main() -> None:
    arguments = parse()
    if arguments.section is not None:
        run_section(arguments)
        return
    out: Path = arguments.out
    out.mkdir(parents=True, exist_ok=True)
    names = [section.name for section in SECTIONS]
    chosen = arguments.only.split(",") if arguments.only else names
    if unknown := sorted(set(chosen) - set(names)):
        raise SystemExit(f"--only: no section {', '.join(unknown)}; there are {', '.join(names)}")
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # the section's processes end, too
    start, end = time.monotonic(), time.monotonic() + 60 * arguments.minutes
    for section in SECTIONS:
        if section.name in chosen:
            left = end - time.monotonic()
            limit = left if arguments.device == "cpu" else min(section.seconds, left)  # emulated kernels are slow
            failed = run_process(section, arguments, limit)
            archive(out)  # whatever ends this command, what was found so far is there
            if failed and section.name == "smoke":
                console.print("the engine does not work: no other section runs")
                break
    summarize(out, chosen, time.monotonic() - start)


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.gpu", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--out", type=Path, required=True, help="folder for rows, results, table and pictures")
    parser.add_argument(
        "--only", help="sections, with commas between them; others' rows in the folder stay as they are"
    )
    parser.add_argument("--quick", action="store_true", help="fewer shapes, one model")
    parser.add_argument(
        "--peers", type=Path, help="folder with wheels of vllm and turbomind, whose kernels are measured too"
    )
    parser.add_argument("--minutes", type=float, default=8.8, help="for all sections; what does not fit is left out")
    parser.add_argument(
        "--device", choices=("cuda", "cpu"), default="cuda", help="cpu: a rehearsal with emulated kernels"
    )
    parser.add_argument("--section", help=argparse.SUPPRESS)
    parser.add_argument("--seconds", type=float, default=60, help=argparse.SUPPRESS)
    return parser.parse_args()


def run_process(section: Section, arguments: argparse.Namespace, seconds: float) -> int:
    """Run one section within the time that is left. A failure becomes a row. Returns the number of failures."""
    context = Context(arguments.out, name=section.name)
    context.file(section.name).unlink(missing_ok=True)
    if seconds < LEAST_SECONDS:
        context.row(section.name, error="no time left")
        return 1
    console.print(f"{section.name}: at most {seconds:.0f} s", end=" ")
    command = [sys.executable, "-m", PROGRAM, *sys.argv[1:], "--section", section.name, "--seconds", str(seconds)]
    log = arguments.out / f"{section.name}.txt"
    start = time.monotonic()
    with log.open("w") as file:
        code = ended(command, file, seconds, os.environ | caches(arguments.out))
    if code is None:
        context.row(section.name, error=f"stopped after {seconds:.0f} s")
    elif code:
        lines = log.read_text().strip().splitlines()
        context.row(section.name, error=f"exit status {code}: {lines[-1] if lines else ''}"[:500], log=log.name)
    rows = read_rows(context.file(section.name))
    failed = sum("error" in row for row in rows)
    console.print(f"{time.monotonic() - start:.1f} s, {len(rows)} rows, {failed} of them failures")
    return failed


def ended(command: list[str], file: IO[str], seconds: float, env: dict[str, str]) -> int | None:
    """Run a command with its output in `file`. Returns its exit status; None if it has taken longer than `seconds`.

    No process that it has started goes on after it: one that still computes would disturb what is measured next.
    """
    process = subprocess.Popen(command, stdout=file, stderr=subprocess.STDOUT, env=env, start_new_session=True)
    try:
        return process.wait(seconds)
    except subprocess.TimeoutExpired:
        return None
    finally:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def run_section(arguments: argparse.Namespace) -> None:
    """Run a section in its own process."""
    from benchmarks.gpu import machine

    section = next(section for section in SECTIONS if section.name == arguments.section)
    context = Context(
        arguments.out, arguments.device, arguments.quick, arguments.peers, arguments.seconds, section.name
    )
    machine.install(context)
    if (
        section.name not in ("machine", "smoke") and not context.file("machine").exists()
    ):  # all figures are compared with its rows
        machine.run(replace(context, name="machine"))
    importlib.import_module(f"benchmarks.gpu.{section.module}").run(context)


def summarize(out: Path, chosen: list[str], seconds: float) -> None:
    """Write and print the figures of all rows in the folder."""
    from benchmarks.gpu import plots
    from benchmarks.report import save

    rows: list[Row] = [row for section in SECTIONS for row in read_rows(out / f"{section.name}.jsonl")]
    found = figures(rows)
    gpu = next((row for row in rows if row["section"] == "machine" and row["what"] == "GPU"), {})
    extra = {"gpu": gpu, "sections": chosen, "seconds": seconds}
    save(out / "results.json", "gpu", rows, **extra, figures=[asdict(figure) for figure in found])
    text = Console(width=200, record=True, file=(out / "table.txt").open("w"))
    for target in (text, console):
        target.print(table(found, str(gpu.get("name", "an unknown machine"))))
        for row in rows:
            if "error" in row:
                target.print(f"{row['section']}: {row['what']}: {row['error']}", markup=False, style="red")
    pictures = plots.draw(rows, out)
    console.print(f"{seconds:.0f} s; {out / 'results.json'}, {', '.join(path.name for path in pictures)}")
    console.print(f"all of it: {archive(out)}")


def archive(out: Path) -> str:
    """Pack all of the folder. Returns the file."""
    return shutil.make_archive(str(out), "gztar", out.parent, out.name)


def caches(out: Path) -> dict[str, str]:
    """Variables by which compiled kernels, measured plans and results of self-tests are kept in the folder."""
    given = {"LMKIT_CACHE_DIR": out / "cache", "CUPY_CACHE_DIR": out / "cupy"}
    return {name: str(folder.resolve()) for name, folder in given.items() if name not in os.environ}


def table(found: list[Figure], machine: str) -> Table:
    result = Table(title=f"{machine}: what was reached, and what was to be")
    for column in ("figure", "measured", "unit", "bound", "share", "target", "reached"):
        result.add_column(column, justify="left" if column in ("figure", "unit") else "right")
    result.add_column("beside", overflow="fold")
    for figure in found:
        reached = {None: "", True: "yes", False: "no"}[figure.is_reached]
        result.add_row(
            figure.name, _number(figure.value), figure.unit, _number(figure.bound),
            "" if figure.share is None else f"{100 * figure.share:.0f} %", _number(figure.target), reached, figure.note,
        )  # fmt: skip
    return result


def _number(value: float | None) -> str:
    return "" if value is None else f"{value:,.0f}" if 1000 <= value < 1e7 else f"{value:.4g}"


if __name__ == "__main__":
    main()
