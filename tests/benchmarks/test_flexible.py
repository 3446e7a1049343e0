"""The three ways of benchmarks.flexible run the same work."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks import flexible
from benchmarks.random_llama import Shape, make_checkpoint


def test_all_ways_are_measured(tmp_path: Path) -> None:
    make_checkpoint(tmp_path / "model", Shape(64, 96, 1, 4, 2, 16, vocab=2048, max_position=64))
    rows = flexible.measure(tmp_path / "model", 2, 4, 2, 0.0, None, "int8", "float32")
    assert [row["engine"] for row in rows] == ["fast", "flexible", "transformers"]
    assert rows[0]["times_fast"] == rows[2]["times_transformers"] == 1
    assert [row["weights"] for row in rows] == ["int8", "int8", "float32"]
    for row in rows:
        assert row["cpu"] > 0
        assert row["tokens_per_second"] == pytest.approx(4 / row["seconds"])
