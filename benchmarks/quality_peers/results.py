"""Finished measurements. They are kept on disk during a run."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from benchmarks.quality_peers.catalog import Entry


@dataclass(frozen=True)
class Row:
    """One tool's recipe on one model. KL is in nats a token, from the original; the rest is as in Facts."""

    tool: str
    recipe: str
    outliers: int
    kl: float
    perplexity: float
    reference_perplexity: float
    same_top: float
    bits: float
    seconds: float
    cpu_seconds: float
    peak_gib: float
    version: str
    settings: str


@dataclass
class Results:
    """All rows of the work folder, and why a tool has none."""

    path: Path
    settings: dict[str, Any]  # rows with other settings are not reused
    rows: list[Row] = field(default_factory=list)
    missing: dict[str, str] = field(default_factory=dict)

    @classmethod
    def open(cls, path: Path, settings: dict[str, Any], *, fresh: bool) -> Results:
        new = cls(path, settings)
        if fresh:
            path.unlink(missing_ok=True)
        new.rows = new._stored()
        return new

    def _stored(self) -> list[Row]:
        """The rows of the file that were measured with these settings."""
        if not self.path.exists():
            return []
        stored = json.loads(self.path.read_text())
        return [Row(**row) for row in stored["rows"]] if stored["settings"] == self.settings else []

    def has(self, entry: Entry, factor: int) -> bool:
        return self.get(entry, factor) is not None

    def get(self, entry: Entry, factor: int) -> Row | None:
        keys = (entry.tool, entry.recipe, factor)
        return next((row for row in self.rows if (row.tool, row.recipe, row.outliers) == keys), None)

    def add(self, row: Row) -> None:
        """Keep a row, together with rows that another process has kept since."""
        self.rows = [*self._stored(), row]
        self.path.parent.mkdir(parents=True, exist_ok=True)
        partial = self.path.with_suffix(".partial")
        partial.write_text(json.dumps({"settings": self.settings, "rows": [asdict(row) for row in self.rows]}))
        partial.replace(self.path)
