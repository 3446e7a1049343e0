"""One attack or load: what is measured, and the limit that it must keep."""

from __future__ import annotations

import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

T = TypeVar("T")


class NothingHitError(RuntimeError):
    """No fault came while there was something to break, so the figure would show nothing."""


class Setting(NamedTuple):
    """What all cases share."""

    workdir: Path  # an empty folder of the case's own
    quick: bool  # sizes at which the case takes seconds, so that the tests run it
    turn: int = 1  # of the measurements of one case


class Case(NamedTuple):
    """`measure` starts real processes, attacks them, ends them and returns the figure."""

    name: str  # "silent connections: worst /health"
    unit: str
    limit: float  # of the figure; more is a miss
    measure: Callable[[Setting], float]
    refusal: Callable[[], str] = str  # why it cannot run here, or an empty text

    def figure(self, setting: Setting) -> float:
        """What is measured; up to three times, until a fault comes while there is something to break."""
        for _ in range(2):
            try:
                return self.measure(setting)
            except NothingHitError:
                continue
        return self.measure(setting)

    @property
    def needs_quiet(self) -> bool:
        """A time is of the machine as well, so a miss is measured again."""
        return self.unit == "s"

    def row(self, value: float | None, error: str = "", turns: int = 1) -> dict[str, Any]:
        """None: it raised `error`, which is a miss. `turns` is how often it was measured."""
        return {
            "case": self.name,
            "value": None if value is None else round(value, 3),
            "limit": self.limit,
            "unit": self.unit,
            "kept": value is not None and value <= self.limit,
            "needs_quiet": self.needs_quiet,
            "turns": turns,
        } | ({"error": error} if error else {})


def shared(run: Callable[[Setting], T]) -> Callable[[Setting], T]:
    """`run` once for all cases that ask for it in the same turn. If it raises, it raises for each of them."""
    results: dict[tuple[bool, int], T] = {}
    failures: dict[tuple[bool, int], Exception] = {}

    @functools.wraps(run)
    def once(setting: Setting) -> T:
        which = setting.quick, setting.turn
        if which in failures:
            raise failures[which]
        if which not in results:
            try:
                results[which] = run(setting)
            except Exception as error:
                failures[which] = error
                raise
        return results[which]

    return once
