"""What a request's patterns cost before a grammar judges them."""

from __future__ import annotations

import re

import pytest

from lmkit.text import held_schema
from lmkit.text.held_schema import held


def test_few_characters_of_patterns_are_read(monkeypatch: pytest.MonkeyPatch) -> None:
    """Python takes microseconds for each. Those that are not read stay: the grammar's limits of time hold for them."""
    read: list[str] = []
    compile_pattern = re.compile
    monkeypatch.setattr(held_schema.re, "compile", lambda text: (read.append(text), compile_pattern(text))[1])
    texts = {f"p{i}": {"type": "string", "pattern": "(a|b)" * 20 + f"{i}("} for i in range(50)}
    schema = {"type": "object", "properties": texts | {"long": {"type": "string", "pattern": "(" * 1000}}}
    kept, left_out = held(schema)
    assert left_out == ("pattern",)
    assert 0 < sum(map(len, read)) <= 512
    assert sum("pattern" in part for part in kept["properties"].values()) == 51 - len(read)
