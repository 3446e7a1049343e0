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

    def row(self, value: float) -> dict[str, Any]:
        return {
            "case": self.name,
            "value": round(value, 3),
            "limit": self.limit,
            "unit": self.unit,
            "kept": value <= self.limit,
        }
