import json
from pathlib import Path

from benchmarks import constrained
from lmkit.text import Tokenizer


def test_counts_of_a_suite(tmp_path: Path) -> None:
    folder = tmp_path / "tests" / "draft2020-12"
    folder.mkdir(parents=True)
    tests = [{"data": 3, "valid": True}, {"data": "x", "valid": False}, {"data": 1.0, "valid": True}]
    groups = [{"schema": {"type": "integer"}, "tests": tests}, {"schema": {"not": {}}, "tests": []}]
    (folder / "type.json").write_text(json.dumps(groups))
    tokenizer = Tokenizer.from_pretrained(constrained.DEMO)
    figures = constrained.measure(tokenizer, tmp_path)
    assert figures["schemas held"] == figures["schemas refused"] == 1
    assert figures["allowed instances let through"] + figures.get("allowed instances kept out", 0) == 2
    assert figures["forbidden instances kept out"] == 1
    assert "forbidden instances let through" not in figures
