"""Tables fit 80 columns with large figures in them, and lose none of them."""

from __future__ import annotations

import re

import pytest
from rich.console import Console
from rich.table import Table

from lmkit.bench.metrics import Burst, Distribution, RequestRecord, summarize
from lmkit.bench.report import _offline_notes, latency_table, profile_table
from lmkit.bench.schema import LatencyRun, StepProfile, ThroughputRun
from lmkit.cli.bench import _print_runs

LARGE = Distribution(9, 23456.7, 0.0, 12345.6, 23456.7, 34567.8, 45678.9, 56789.0)
PROFILE = StepProfile(
    step=123.456,
    kernels=101.234,
    inputs_and_sampling=12.345,
    idle=9.876,
    schedule=1.234,
    update=2.345,
    outside_kernels=0.18,
)


def shown(table: Table, width: int = 80) -> list[str]:
    console = Console(width=width, force_terminal=False)
    with console.capture() as capture:
        console.print(table)
    return capture.get().splitlines()


@pytest.mark.parametrize("table", [latency_table, profile_table])
def test_a_table_of_shapes_is_as_in_a_wide_terminal(table: type[Table]) -> None:
    run = LatencyRun(
        batch_size=256, input_len=16384, output_len=2048, repeats=9, prefill_ms=LARGE, prefill_tokens_per_s=123456.0,
        decode_ms_per_token=Distribution(9, 45.67, 0.0, 40.0, 45.67, 50.0, 55.0, 90.0), decode_tokens_per_s=12345.0,
        decode_step_ms=LARGE, total_ms=LARGE, decode_profile=PROFILE,
    )  # fmt: skip
    lines = shown(table("a title", [run]))  # type: ignore[call-arg]
    assert lines == shown(table("a title", [run]), 200)  # type: ignore[call-arg]
    assert max(map(len, lines)) <= 80
    assert "…" not in "".join(lines)


def test_runs_side_by_side_are_as_many_as_fit(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    record = RequestRecord(conversation=0, prompt_tokens=9, requested_tokens=3, scheduled=0, start=0, end=2345.6,
                           bursts=[Burst(1234.5, 1), Burst(2345.6, 2)])  # fmt: skip
    runs = [
        ThroughputRun(concurrency=n, summary=summarize([record]), steps=1, preemptions=1, skipped_turns=0, requests=[])
        for n in (1, 2, 4, 8, 16)
    ]
    _print_runs("demo[/x]", runs)
    text = capsys.readouterr().out
    assert max(map(len, text.splitlines())) <= 80
    assert [int(n) for n in re.findall(r"(\d+) at once", text)] == [1, 2, 4, 8, 16]
    assert text.count("1,234,500 / 1,234,500 / 1,234,500") == len(runs)
    assert text.count("p50 / p90 / p99") == len(runs)
    assert text.count("demo[/x]") > 1  # a user's text is no markup
    assert text.count("preemptions") == 1


@pytest.mark.parametrize(("seconds", "shown"), [(1.25, "saved 1.25 s"), (-0.5, "lost 0.50 s")])
def test_drafts_are_told_with_what_they_saved(seconds: float, shown: str) -> None:
    record = RequestRecord(conversation=0, prompt_tokens=9, requested_tokens=3, scheduled=0, start=0, end=2,
                           bursts=[Burst(1, 1), Burst(2, 2)])  # fmt: skip
    run = ThroughputRun(concurrency=1, summary=summarize([record]), steps=1, preemptions=0, skipped_turns=0,
                        draft_tokens=40, accepted_tokens=30, draft_tokens_per_step=2.5,
                        draft_seconds_saved=seconds)  # fmt: skip
    (line,) = _offline_notes(run)
    assert "30 of 40" in line
    assert "2.50 tokens" in line
    assert line.endswith(shown)
