"""One attack or load: what is measured, and the limit that it must keep."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple


class Setting(NamedTuple):
    """What all cases share."""

    workdir: Path  # an empty folder of the case's own
    quick: bool  # sizes at which the case takes seconds, so that the tests run it


class Case(NamedTuple):
    """`measure` starts real processes, attacks them, ends them and returns the figure."""

    name: str  # "silent connections: worst /health"
    unit: str
    limit: float  # of the figure; more is a miss
    measure: Callable[[Setting], float]
    refusal: Callable[[], str] = str  # why it cannot run here, or an empty text

    @property
    def needs_quiet(self) -> bool:
        """A time is of the machine as well, so a miss is measured again."""
        return self.unit == "s"

    def row(self, value: float | None, error: str = "") -> dict[str, Any]:
        """None: it raised `error`, which is a miss."""
        return {
            "case": self.name,
            "value": None if value is None else round(value, 3),
            "limit": self.limit,
            "unit": self.unit,
            "kept": value is not None and value <= self.limit,
        } | ({"error": error} if error else {})
