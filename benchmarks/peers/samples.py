"""Measurements that are kept on disk during a run, so that an interrupted run can be resumed."""

from __future__ import annotations

import functools
import json
import math
import statistics
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from benchmarks.ceilings import Ceilings
from benchmarks.contention import OTHERS_LIMIT


@dataclass(frozen=True)
class Sample:
    tokens_per_s: float
    others: float  # share of the cores that others used meanwhile
    seconds: float  # duration of the measurement
    possible: float = math.inf  # tokens per second, by the ceilings measured just before and after

    @property
    def clean(self) -> bool:
        return self.others <= OTHERS_LIMIT


@dataclass
class Samples:
    """All measurements of a run (engine -> point -> samples), the facts of each engine, and why an engine has none."""

    path: Path
    settings: dict[str, Any]  # a run is resumed only if these are equal
    taken: dict[str, dict[str, list[Sample]]] = field(default_factory=dict)
    facts: dict[str, dict[str, Any]] = field(default_factory=dict)
    missing: dict[str, str] = field(default_factory=dict)
    ceilings: list[dict[str, float]] = field(default_factory=list)  # each measurement of them

    @classmethod
    def open(cls, path: Path, settings: dict[str, Any], *, fresh: bool) -> Samples:
        """The samples of an earlier run with the same settings, or none."""
        new = cls(path, settings)
        if fresh or not path.exists():
            return new
        stored = json.loads(path.read_text())
        if stored["settings"] == settings:
            new.facts, new.ceilings = stored["facts"], stored["ceilings"]
            new.taken = {
                engine: {point: [Sample(**sample) for sample in samples] for point, samples in points.items()}
                for engine, points in stored["taken"].items()
            }
        return new

    def best_ceilings(self) -> Ceilings:
        """The best rates ever measured."""
        first, *rest = (Ceilings(**each) for each in self.ceilings)
        return functools.reduce(Ceilings.best, rest, first)

    def add(self, engine: str, point: str, sample: Sample) -> None:
        self.of(engine, point).append(sample)
        self.save()

    def save(self) -> None:
        partial = self.path.with_suffix(".partial")
        kept = asdict(self)
        partial.write_text(json.dumps({name: kept[name] for name in ("settings", "taken", "facts", "ceilings")}))
        partial.replace(self.path)

    def of(self, engine: str, point: str) -> list[Sample]:
        return self.taken.setdefault(engine, {}).setdefault(point, [])

    def seconds(self, engine: str, point: str) -> float:
        return sum(sample.seconds for sample in self.of(engine, point))

    def num_clean(self, engine: str, point: str) -> int:
        return sum(sample.clean for sample in self.of(engine, point))

    def rate(self, engine: str, point: str) -> float | None:
        """Median tokens per second of the clean samples. Without any, the rate of the least disturbed sample."""
        samples = self.taken.get(engine, {}).get(point, [])
        if not samples:
            return None
        clean = [sample.tokens_per_s for sample in samples if sample.clean]
        return statistics.median(clean) if clean else min(samples, key=lambda sample: sample.others).tokens_per_s

    def share(self, engine: str, point: str) -> float:
        """The median share of what the ceilings just before and after each measurement allow."""
        samples = self.of(engine, point)
        clean = [sample for sample in samples if sample.clean] or samples
        return statistics.median(sample.tokens_per_s / sample.possible for sample in clean)

    def disturbed(self, engine: str, point: str) -> bool:
        """Whether the figure comes from a measurement that should have been dropped."""
        return self.rate(engine, point) is not None and not self.num_clean(engine, point)

    def num_dropped(self) -> int:
        return sum(
            not sample.clean for points in self.taken.values() for samples in points.values() for sample in samples
        )

    def num_taken(self) -> int:
        return sum(len(samples) for points in self.taken.values() for samples in points.values())
