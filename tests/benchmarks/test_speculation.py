"""Both ways decode the script's tokens, and draft tokens of a copy are right."""

from __future__ import annotations

import math

import pytest

from benchmarks import speculation
from lmkit.formats.hub import DEMO_FOLDER


@pytest.mark.parametrize(
    "kind",
    ["copy", pytest.param("fresh", marks=pytest.mark.exhaustive), pytest.param("json", marks=pytest.mark.exhaustive)],
)
def test_both_ways_are_measured(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(speculation, "NUM_TOKENS", 40)
    row = speculation.compare(str(DEMO_FOLDER), kind, 2, 1, "ngram")
    assert all(math.isfinite(value) and value > 0 for value in row.values() if isinstance(value, int)), row
    assert row["draft_steps"] <= row["steps"]
    assert math.isfinite(row["ratio"])
