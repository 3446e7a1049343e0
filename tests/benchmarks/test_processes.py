"""What the benchmark of several processes makes of its runs."""

from __future__ import annotations

from typing import Any

import pytest

from benchmarks import processes


def one(batch: int, decode: float, bubble: float | None = None) -> dict[str, Any]:
    return {
        "batch_size": batch,
        "decode_tokens_per_s": decode,
        "prefill_tokens_per_s": 10 * decode,
        "decode_profile": {"bubble": bubble},
    }


def test_medians_stand_beside_one_process_of_the_same_batch() -> None:
    figures = {
        (processes.ONE, 1): [one(1, 10.0), one(1, 20.0), one(1, 90.0)],
        (processes.ONE, 8): [one(8, 80.0)],
        ("pp=2", 1): [one(1, 10.0, 0.5), one(1, 12.0, 0.4)],
        ("pp=2", 8): [one(8, 60.0, 0.1)],
    }
    found = {(row["way"], row["batch_size"]): row for row in processes.rows(figures)}
    assert found[processes.ONE, 1]["of_one"] == 1
    assert found["pp=2", 1]["of_one"] == pytest.approx(11 / 20)
    assert found["pp=2", 1]["bubble"] == pytest.approx(0.45)
    assert found["pp=2", 8]["of_one"] == pytest.approx(0.75)
    assert found[processes.ONE, 8]["bubble"] is None
