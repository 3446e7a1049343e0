"""A plain table, for a terminal and for `awk` alike."""

from __future__ import annotations

from collections.abc import Sequence


def print_table(columns: Sequence[str], rows: Sequence[Sequence[str]], *, right: Sequence[str] = ()) -> None:
    """A line for the names of the columns and one for each row. No cell is cut; those in `right` end flush."""
    widths = [max(map(len, cells)) for cells in zip(columns, *rows, strict=True)]
    for row in ([name.upper() for name in columns], *rows):
        cells = [
            cell.rjust(width) if name in right else cell.ljust(width)
            for name, cell, width in zip(columns, row, widths, strict=True)
        ]
        print("  ".join(cells).rstrip())
