"""docs/families.md says of each family what its specification says."""

from __future__ import annotations

from tests.models import family_table


def test_the_table_is_that_of_the_specifications() -> None:
    message = "run `python -m tests.models.family_table`"
    assert family_table.written(family_table.PAGE.read_text()) == family_table.table(), message
