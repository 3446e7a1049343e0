"""The demo's table fits 80 characters, and finds its figures in what the commands print."""

from __future__ import annotations

import json

import pytest
from rich.console import Console
from typer.testing import CliRunner

from lmkit.cli.main import app

pytest.importorskip("openai")
from benchmarks.demo import Job, Talk, table


def test_the_table_fits_80_characters() -> None:
    size = json.loads(CliRunner().invoke(app, ["inspect", "demo", "--json"]).stdout)
    quality = {
        "perplexity": 12345.678,
        "divergence": {"reference_perplexity": 12345.678, "kl_mean": 0.12345, "same_top": 0.98765},
    }
    talk, job = Talk("", "", 12345.0, 12345.0), Job()
    models = (job.source, job.quantized)
    console = Console(width=80)
    with console.capture() as capture:
        console.print(table(job, dict.fromkeys(models, size), quality, dict.fromkeys(models, talk)))
    lines = capture.get().splitlines()
    assert max(map(len, lines)) <= 80
    assert "…" not in capture.get()
    rows = {line.split("│")[1].strip(): line.split("│")[2:4] for line in lines if line.startswith("│")}
    assert [cell.strip() for cell in rows["perplexity"]] == ["12345.678", "12345.678"]
    assert [cell.strip() for cell in rows["KL to the original, nats"]] == ["-", "0.1235"]
    assert [cell.strip() for cell in rows["bits of a weight"]] == ["16.00", "16.00"]
