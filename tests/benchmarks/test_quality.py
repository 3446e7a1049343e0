"""The comparison of quantization tools: what is asked, what is kept, its table, and a tool's process."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import asdict
from pathlib import Path

import pytest
from rich.console import Console

from benchmarks import quality
from benchmarks.quality_peers import report
from benchmarks.quality_peers.catalog import ENTRIES, Entry
from benchmarks.quality_peers.protocol import Job
from benchmarks.quality_peers.results import Results, Row
from lmkit.errors import ConfigError

ROOT = Path(__file__).resolve().parents[2]
SETTINGS = {"num_rows": 8, "seq_len": 512, "eval_tokens": 4096, "threads": 1}


def row(tool: str, recipe: str, outliers: int, kl: float) -> Row:
    return Row(tool, recipe, outliers, kl, 5.7, 5.689, 0.96, 4.156, 42.0, 40.0, 0.74, "1.0", "as it comes")


def test_entries_are_tools_or_recipes() -> None:
    assert quality.parse_entries("lmkit/rtn,gptqmodel") == [
        Entry("lmkit", "rtn"), Entry("gptqmodel", "gptq"), Entry("gptqmodel", "awq"),
    ]  # fmt: skip
    assert quality.parse_entries(None) == list(ENTRIES)
    with pytest.raises(ConfigError, match="no tool hqq; there are lmkit"):
        quality.parse_entries("lmkit,hqq")


def test_outliers_are_factors() -> None:
    assert quality.parse_outliers("30,1") == [30, 1]
    for wrong in ("x8", "0", "1,,2"):
        with pytest.raises(ConfigError, match="--outliers"):
            quality.parse_outliers(wrong)


def test_two_runs_add_to_one_table(tmp_path: Path) -> None:
    path = tmp_path / "results.json"
    first, second = (Results.open(path, SETTINGS, fresh=False) for _ in range(2))
    first.add(row("lmkit", "rtn", 1, 0.01))
    second.add(row("lmkit", "awq", 1, 0.008))
    kept = Results.open(path, SETTINGS, fresh=False)
    assert [found.recipe for found in kept.rows] == ["rtn", "awq"]
    assert kept.has(Entry("lmkit", "awq"), 1)
    assert not kept.has(Entry("lmkit", "awq"), 8)
    assert not Results.open(path, SETTINGS | {"threads": 2}, fresh=False).rows
    assert not Results.open(path, SETTINGS, fresh=True).rows


def test_table_and_plot(tmp_path: Path) -> None:
    results = Results(tmp_path / "results.json", SETTINGS, missing={"autoawq/awq": "not installed"})
    results.rows = [
        row("lmkit", "rtn", 1, 0.01),
        row("lmkit", "rtn", 30, 0.02),
        row("llm-compressor", "gptq", 30, 0.004),
    ]
    console = Console(width=150, record=True)
    console.print(report.table(results))
    lines = {line.split("│")[1].strip(): line for line in console.export_text().splitlines() if "│" in line}
    assert "10.000 (5.700)" in lines["lmkit/rtn"]
    assert "20.000" in lines["lmkit/rtn"]
    assert "4.000" in lines["llm-compressor/gptq"]
    assert "not installed" in lines["autoawq/awq"]
    report.plot(results, tmp_path / "plot.png")
    assert (tmp_path / "plot.png").read_bytes().startswith(b"\x89PNG")


def test_a_tool_reports_what_it_took(tmp_path: Path) -> None:
    """The protocol in a process of its own, with a tool that only writes a file."""
    (tmp_path / "rows.json").write_text("[[1, 2], [3, 4]]")
    job = Job("model", str(tmp_path / "rows.json"), str(tmp_path), "any", 1)
    (tmp_path / "job.json").write_text(json.dumps(asdict(job)))
    code = (
        "from benchmarks.quality_peers.protocol import run\n"
        "def quantize(job):\n"
        "    job.checkpoint.mkdir()\n"
        "    held = bytearray(64 << 20)\n"
        "    return '1.0', f'{len(job.load_rows())} rows'\n"
        "run(quantize, lambda job: job.dense.mkdir() or 3.25)"
    )
    subprocess.run([sys.executable, "-c", code, str(tmp_path / "job.json")], cwd=ROOT, check=True)
    facts = json.loads((tmp_path / "facts.json").read_text())
    assert (facts["version"], facts["settings"]) == ("1.0", "2 rows")
    assert 64 / 1024 < facts["peak_gib"] < 1
    assert facts["seconds"] > 0
    assert facts["bits"] == 3.25
    assert (tmp_path / "dense").is_dir()
