"""docs/families.md says of each family what its specification says."""

from __future__ import annotations

from tests.models import family_kl, family_table
from tests.test_readme import ROWS


def test_the_table_is_that_of_the_specifications() -> None:
    message = "run `python -m tests.models.family_table`"
    assert family_table.written(family_table.PAGE.read_text()) == family_table.table(), message


def test_every_family_has_a_row_of_what_4_bits_cost() -> None:
    rows = family_table.written(family_table.PAGE.read_text(), family_kl.HEADER).splitlines()[2:]
    message = "run `python -m tests.models.family_kl`"
    assert [row.split(" | ")[0].strip("| ") for row in rows] == [*family_kl.TRAINED, *ROWS], message
