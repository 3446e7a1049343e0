"""Shared parts of benchmarks: interleaved timing, shares of a ceiling, the machine they ran on, and one JSON schema."""

from __future__ import annotations

import datetime
import json
import platform
import statistics
import time
from collections.abc import Callable
from importlib import metadata
from pathlib import Path
from typing import Any, TypeVar

from rich.console import Console
from rich.table import Table

from lmkit.environment import default_num_threads
from lmkit.errors import LMKitError

K = TypeVar("K")
TOLERANCE = 0.05  # of a share: a processor's clock varies by so much between two measurements


def interleaved(
    functions: dict[K, Callable[[], Any]],
    *,
    seconds: float,
    rounds: int = 15,
    pick: Callable[[list[float]], float] = statistics.median,
    clock: Callable[[], float] = time.perf_counter,
) -> dict[K, float]:
    """Seconds of each function by `clock`: the median, or the value that `pick` chooses.

    The functions take turns, so that a busy machine slows all alike. Each is called once to warm up. Then there are at
    least 3 turns, and at most `rounds` or as many as fit in `seconds`.
    """
    for function in functions.values():
        function()
    times: dict[K, list[float]] = {name: [] for name in functions}
    end = time.perf_counter() + seconds
    for turn in range(rounds):
        for name, function in functions.items():
            start = clock()
            function()
            times[name].append(clock() - start)
        if turn >= 2 and time.perf_counter() > end:
            break
    return {name: pick(samples) for name, samples in times.items()}


class AboveCeiling(LMKitError):
    """A figure that the machine cannot reach: the benchmark, or its ceiling, is wrong."""


def share(figure: float, ceiling: float, what: str) -> float:
    """`figure` / `ceiling`. Raises AboveCeiling if this is more than 1 + TOLERANCE."""
    if figure > ceiling * (1 + TOLERANCE):
        raise AboveCeiling(f"{what} is {figure / ceiling:.0%} of what is possible: {figure:.4g} of {ceiling:.4g}")
    return figure / ceiling


def machine() -> dict[str, Any]:
    """The machine and the versions that figures depend on."""
    versions = {name: metadata.version(name) for name in ("torch", "numba", "llvmlite")}
    return {"cpu": _cpu_name(), "threads": default_num_threads(), "python": platform.python_version(), **versions}


def _cpu_name() -> str:
    info = Path("/proc/cpuinfo")
    lines = info.read_text().splitlines() if info.exists() else []
    return next((line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")), platform.machine())


def show(rows: list[dict[str, Any]]) -> None:
    """Print rows with the same keys as a table."""
    table = Table(*rows[0])
    for row in rows:
        table.add_row(*(f"{value:.3g}" if isinstance(value, float) else str(value) for value in row.values()))
    Console().print(table)


def save(path: Path, benchmark: str, rows: list[dict[str, Any]], **extra: Any) -> None:
    """Write one benchmark's rows, with the machine and the date."""
    date = datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")
    document = {"benchmark": benchmark, "date": date, "machine": machine() | extra, "rows": rows}
    path.write_text(json.dumps(document, indent=2) + "\n")
