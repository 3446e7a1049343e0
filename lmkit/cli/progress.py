"""One progress bar for a command's whole work, and durations as text."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Mapping
from typing import Self

LINE_SECONDS = 10.0  # between two lines where there is no terminal
KNOWN = 0.02  # the share of the work after which its speed is known


def duration(seconds: float) -> str:
    """`45 s`, `12 min`, `3 h 20 min`, `2 d 5 h`: rounded to what a reader plans with."""
    if seconds < 99.5:
        return f"{seconds:.0f} s"
    minutes, hours = round(seconds / 60), round(seconds / 3600)
    if minutes < 60:
        return f"{minutes} min"
    large, small, names = (*divmod(minutes, 60), "h min") if minutes < 1440 else (*divmod(hours, 24), "d h")
    parts = zip((large, small), names.split(), strict=True)
    return " ".join(f"{count} {name}" for count, name in parts if count)


class ProgressBar:
    """Shows on stderr how much of the work is done, and the remaining time. It shows nothing if `quiet`.

    `phases` maps the names that `update` gets to their shares of the work, in any unit. Without it, each name is a
    work of its own. A terminal has one bar, and records of the log stand above it. Elsewhere a line comes every
    LINE_SECONDS.
    """

    def __init__(
        self, quiet: bool, phases: Mapping[str, float] | None = None, clock: Callable[[], float] = time.monotonic
    ) -> None:
        from rich.console import Console
        from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

        console = Console(stderr=True)
        self._lines = not quiet and (not console.is_terminal or console.is_dumb_terminal)
        self._progress = Progress(
            TextColumn("{task.description}"),
            BarColumn(bar_width=28),
            TextColumn("{task.percentage:>3.0f} %"),
            TimeElapsedColumn(),
            TextColumn("{task.fields[time]}"),
            console=console,
            disable=quiet or self._lines,
            redirect_stdout=sys.stdout.isatty(),
        )
        self._task = self._progress.add_task("", total=1.0, time="", visible=False)
        self._phases, self._clock = phases or {}, clock
        self._start = self._written = clock()
        self._what = ""
        self._origin: tuple[float, float] | None = None  # the time and the share at the first update of this work

    def update(self, what: str, done: int, total: int) -> None:
        """`done` of `total` units of the phase `what` are done, and all phases before it."""
        if not self._phases and what != self._what:
            self._origin = None
        self._what = what
        self._show(self._share(what, done / max(total, 1)))

    def _share(self, what: str, part: float) -> float:
        """The share of the whole work that is done."""
        if what not in self._phases:
            return part
        names = list(self._phases)
        before = sum(self._phases[name] for name in names[: names.index(what)])
        return (before + part * self._phases[what]) / sum(self._phases.values())

    def _show(self, share: float) -> None:
        now = self._clock()
        self._origin = self._origin or (now, share)
        elapsed, gained = now - self._origin[0], share - self._origin[1]
        left = f"{duration(elapsed / gained * (1 - share))} left" if gained >= KNOWN and share < 1 else ""
        self._progress.update(self._task, description=self._what, completed=share, time=left, visible=True)
        if self._lines and now - self._written >= LINE_SECONDS:
            self._written = now
            self._print(f"{share:.0%}{left and ', '}{left}")

    def _print(self, text: str) -> None:
        print(f"{self._what}: {text}", file=sys.stderr, flush=True)

    def __enter__(self) -> Self:
        self._progress.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, *exception: object) -> None:
        if kind is None and self._what:
            self._progress.update(self._task, description="done", completed=1.0, time="")
            if self._lines and self._written > self._start:
                self._what = "done"
                self._print(duration(self._clock() - self._start))
        self._progress.stop()
