"""CONTRIBUTING.md: its checklists are short, and the places and names in them exist."""

from __future__ import annotations

import re
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
TEXT = (ROOT / "CONTRIBUTING.md").read_text()
LISTS = re.findall(r"^An? (.*):\n\n((?:\d\. .*\n|   .*\n)+)", TEXT, re.MULTILINE)


def test_every_checklist_is_short() -> None:
    names = [name for name, _ in LISTS]
    assert names == [
        "model family",
        "weight format",
        "kind of codes or scales",
        "KV type",
        "quantization step",
        "policy of the proxy",
    ]
    for name, steps in LISTS:
        assert len(re.findall(r"^\d\.", steps, re.MULTILINE)) <= 6, name


def test_every_place_exists() -> None:
    places = re.findall(r"`((?:lmkit|tests|recipes)/[\w./]*)`", TEXT)
    assert len(places) > 20
    assert [place for place in places if not (ROOT / place).exists()] == []


def test_every_table_is_at_its_place() -> None:
    tables = re.findall(r"`(ROWS|STORAGE|STORAGES|PolicyName)` (?:in|of)\s+`([\w./]+)`", TEXT)
    assert len(tables) == 5
    for name, place in tables:
        assert re.search(rf"^{name}\b", (ROOT / place).read_text(), re.MULTILINE), name
