"""Two checkouts behind a server each: rounds take turns, and each server is that of its checkout."""

from __future__ import annotations

import asyncio
import math
from pathlib import Path

import pytest

from benchmarks import checkouts
from benchmarks.http_path import Times
from lmkit.errors import ConfigError
from tests.documents import ROOT


def test_the_order_of_turns_changes_and_ratios_are_of_neighbours() -> None:
    calls = []

    def ask_of(name: str, seconds: float) -> checkouts.Ask:
        async def ask(prompt: str) -> Times:
            calls.append(name)
            return Times(seconds, 2 * seconds)

        return ask

    row = asyncio.run(checkouts.compare((ask_of("old", 2.0), ask_of("new", 1.0)), 1, rounds=2))
    assert calls == ["new", "old", "old", "new", "new", "old"]
    assert row["first_token_ratio"] == 2
    assert row["least"] <= row["ratio"] <= row["most"]


def test_another_lmkit_than_that_of_the_folder_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="no checkout of lmkit"):
        checkouts.environment(tmp_path)
    assert checkouts.environment(ROOT)["PYTHONPATH"] == str(ROOT)


@pytest.mark.exhaustive
def test_a_checkout_beside_itself_is_measured() -> None:
    (row,) = asyncio.run(checkouts.measure(ROOT, ROOT, "demo", [2], rounds=1))
    assert all(math.isfinite(value) and value > 0 for value in row.values())
