"""What a reader of the documents meets: lines that fit a screen."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
DOCUMENTS = sorted([*ROOT.glob("*.md"), *(ROOT / "docs").glob("*.md"), *(ROOT / "calibration").glob("*.md")])
MOST = 120  # characters of a line; a table's row and a code block's line may have more


def prose(text: str) -> Iterator[tuple[int, str]]:
    """(number, line) of what is neither a table nor in a code block."""
    is_code = False
    for number, line in enumerate(text.splitlines(), 1):
        if line.lstrip().startswith("```"):
            is_code = not is_code
        elif not is_code and not line.startswith("|"):
            yield number, line


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: path.relative_to(ROOT).as_posix())
def test_lines_fit_a_screen(document: Path) -> None:
    long = [f"{number}: {len(line)}" for number, line in prose(document.read_text()) if len(line) > MOST]
    assert not long, f"{document.relative_to(ROOT)}: lines of more than {MOST} characters: {', '.join(long)}"


def test_tables_and_code_may_be_wider() -> None:
    wide = "x" * 200
    assert list(prose(f"a\n| {wide} |\n```\n{wide}\n```\n{wide}\n")) == [(1, "a"), (6, wide)]
