"""All cases, by group. A group is a module of this folder with a tuple `CASES`."""

from __future__ import annotations

from benchmarks.resilience import engine_faults
from benchmarks.resilience.case import Case

GROUPS: dict[str, tuple[Case, ...]] = {
    "engine_faults": engine_faults.CASES,
}
