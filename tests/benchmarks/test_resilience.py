"""Every attack of `python -m benchmarks.resilience`, at a small size: its limit is kept."""

from pathlib import Path

import pytest

from benchmarks.resilience.case import Case, Setting
from benchmarks.resilience.catalog import GROUPS


@pytest.mark.parametrize("case", [case for group in GROUPS.values() for case in group], ids=lambda case: case.name)
def test_limit_is_kept(case: Case, tmp_path: Path) -> None:
    row = case.row(case.measure(Setting(tmp_path, quick=True)))
    assert row["kept"], row
