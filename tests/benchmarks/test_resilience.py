"""Every attack of `python -m benchmarks.resilience`, at a small size: its limit is kept."""

import itertools
import threading
from pathlib import Path

import pytest

from benchmarks.resilience.__main__ import measured
from benchmarks.resilience.case import Case, NothingHitError, Setting, shared
from benchmarks.resilience.catalog import GROUPS

SHORT = ("budgets",)
BUSY = 20  # times as slow a test's machine may be


@pytest.mark.slow
@pytest.mark.parametrize(
    "group", [name if name in SHORT else pytest.param(name, marks=pytest.mark.exhaustive) for name in GROUPS]
)
def test_limits_are_kept(group: str, tmp_path: Path) -> None:
    """Cases of a group share servers, so one test runs them all."""
    missed = []
    for number, case in enumerate(GROUPS[group]):
        if case.refusal():
            continue
        folder = tmp_path / str(number)
        folder.mkdir()
        allowed = case._replace(limit=BUSY * case.limit) if case.unit == "s" else case
        row = allowed.row(case.figure(Setting(folder, quick=True)))
        missed += [] if row["kept"] else [row]
    assert not missed


def test_rows() -> None:
    def unused(_: Setting) -> float:
        raise AssertionError

    row = measured(Case("x", "", 2, unused), quick=True)
    assert (row["kept"], row["value"], row["error"]) == (False, None, "AssertionError: ")
    endless = measured(Case("x", "", 2, lambda _: float(threading.Event().wait())), quick=True, seconds=0.05)
    assert (endless["kept"], endless["error"]) == (False, "TimeoutError: it did not end within 0.05 s")
    assert Case("x", "s", 2, unused).row(2.0)["kept"]
    assert not Case("x", "s", 2, unused).row(2.1)["kept"]


def test_a_fault_that_hits_nothing_comes_again() -> None:
    found = iter([NothingHitError(), NothingHitError(), 1.0])

    def measure(_: Setting) -> float:
        if isinstance(value := next(found), Exception):
            raise value
        return value

    assert measured(Case("x", "", 2, measure), quick=True)["value"] == 1.0


def test_cases_share_a_run_of_their_turn(tmp_path: Path) -> None:
    numbers = itertools.count(1)

    @shared
    def run(_: Setting) -> int:
        if (number := next(numbers)) == 2:
            raise ValueError(number)
        return number

    assert [run(Setting(tmp_path, quick=True)) for _ in range(3)] == [1, 1, 1]
    for _ in range(2):  # the second case of the group does not repeat what failed
        with pytest.raises(ValueError, match="2"):
            run(Setting(tmp_path, quick=True, turn=2))
    assert run(Setting(tmp_path, quick=True, turn=3)) == 3
