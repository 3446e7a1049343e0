"""One model in several processes of one thread each, beside one process with as many threads.

    python -m benchmarks.processes MODEL [--ways tp=2,pp=2] [--batch-size 1,8] [--rounds 3] [--json FILE]

A way is options of `lmkit serve` joined by +, for example tp=2+ep=2. In each round each way has a start of its own
(`lmkit bench latency`), and the ways take turns. Figures are medians over the rounds. "of one" is the speed of decoding
divided by that of one process. The bubble is the share of the time of all stages in which they compute nothing.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from benchmarks.report import save

ONE = "one process"
Figures = dict[tuple[str, int], list[dict[str, Any]]]  # (way, batch size) -> a run in each round


def run(model: str, way: str, options: argparse.Namespace) -> list[dict[str, Any]]:
    """The runs of `lmkit bench latency`, one for each batch size."""
    given = [] if way == ONE else [f"--{option}" for option in way.split("+")]
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "run.json"
        command = [sys.executable, "-m", "lmkit", "bench", "latency", model, "--json", str(out), "--repeats", "1"]
        command += ["--batch-size", options.batch_size, "--input-len", str(options.input_len), "--output-len", "64"]
        command += ["--kv-memory", "1G", "--max-model-len", "2048", "--num-threads", str(options.threads), *given]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode:
            raise SystemExit(f"{way}: {done.stderr.strip().splitlines()[-1]}")
        runs: list[dict[str, Any]] = json.loads(out.read_text())["runs"]
        return runs


def rows(figures: Figures) -> Iterable[dict[str, Any]]:
    """The medians of each way and batch size, beside those of one process."""
    for (way, batch), runs in figures.items():
        step, prefill = (statistics.median(one) for one in zip(*map(_speeds, runs), strict=True))
        alone = statistics.median(_speeds(one)[0] for one in figures[ONE, batch])
        bubbles = [one["decode_profile"]["bubble"] for one in runs]
        yield {
            "way": way,
            "batch_size": batch,
            "decode_tokens_per_s": step,
            "prefill_tokens_per_s": prefill,
            "of_one": step / alone,
            "bubble": None if None in bubbles else statistics.median(bubbles),
        }


def _speeds(one: dict[str, Any]) -> tuple[float, float]:
    return one["decode_tokens_per_s"], one["prefill_tokens_per_s"]


def table(found: list[dict[str, Any]], title: str) -> Table:
    shown = Table(title=title, title_justify="left")
    for column in ("way", "batch", "decode tokens/s", "of one", "prefill tokens/s", "bubble"):
        shown.add_column(column, justify="left" if column == "way" else "right")
    for row in sorted(found, key=lambda row: int(row["batch_size"])):
        speeds = f"{row['decode_tokens_per_s']:.1f}", f"{row['of_one']:.2f}", f"{row['prefill_tokens_per_s']:.0f}"
        bubble = "" if row["bubble"] is None else f"{row['bubble']:.0%}"
        shown.add_row(row["way"], str(row["batch_size"]), *speeds, bubble)
    return shown


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("model")
    parser.add_argument("--ways", default="tp=2,pp=2", help="each options joined by +")
    parser.add_argument("--batch-size", default="1,8")
    parser.add_argument("--input-len", type=int, default=64)
    parser.add_argument("--threads", type=int, default=2, help="of all processes together")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--json", type=Path, help="also write the figures here")
    options = parser.parse_args()
    figures: Figures = {}
    for _ in range(options.rounds):
        for way in (ONE, *options.ways.split(",")):
            for one in run(options.model, way, options):
                figures.setdefault((way, one["batch_size"]), []).append(one)
        found = list(rows(figures))  # all so far: a run that is cut short has some
        if options.json:
            save(options.json, "processes", found, threads=options.threads)
    Console(width=None if sys.stdout.isatty() else 120).print(table(found, f"{options.threads} threads in all"))


if __name__ == "__main__":
    main()
