"""Modelled times, against arithmetic by hand."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks.gpu import model
from benchmarks.gpu.datasheets import DATASHEETS, Datasheet
from benchmarks.gpu.roofline import Decode
from lmkit.kernels.cuda.gpus import GPUS

SHEET = Datasheet("round", (9, 0), 1000, 100, 100, 1.0, 50, 80)


@pytest.mark.parametrize(
    ("work", "limit", "microseconds"),
    [
        (model.Work("x", 1e6), "memory", 1),
        (model.Work("x", 1e6, in_flight=900), "memory", 10),  # 100 GB/s: 900 bytes of each of 100 SMs in 900 ns
        (model.Work("x", 1e3, flops=1e8, wgmma=True), "tensor", 1),
        (model.Work("x", 1e3, flops=0.62e8), "tensor", 1),
        (model.Work("x", 1e3, instructions=32 * 400e3), "issue", 1),
        (model.Work("x", 1e3, sectors=100e3 / 1.4), "L2", 1),
    ],
)
def test_the_longest_bound_counts(work: model.Work, limit: str, microseconds: float) -> None:
    bounds = work.bounds(SHEET)
    assert max(bounds, key=bounds.__getitem__) == limit
    assert bounds[limit] == pytest.approx(1e-6 * microseconds)
    assert work.seconds(SHEET) == pytest.approx(bounds[limit] + 0.5e-6)


def test_a_step_is_no_faster_than_its_bytes() -> None:
    for sheet in DATASHEETS:
        assert sheet.capability in GPUS
        for batch in model.BATCHES:
            bound = Decode(model.MODEL, batch, 1024, "int8").tokens_per_s(sheet.peak)
            assert 0.2 * bound < model.tokens_per_s(batch, 1024, sheet) < bound


def test_peaks_are_those_of_the_clock() -> None:
    """Operations of a multiprocessor in a clock, bfloat16 with float32 sums, by the white papers."""
    of_a_clock = {"H100": 4096, "H200": 4096, "A100": 2048, "L4": 1024, "4090": 512, "B200": 8192}
    for sheet in DATASHEETS:
        assert sheet.tflops == pytest.approx(1e-3 * sheet.sms * sheet.ghz * of_a_clock[sheet.name], rel=0.065)


def test_a_launch_takes_what_was_counted_of_its_kernel() -> None:
    """4096 outputs of 4096 inputs are 8 times those that were counted. 200 tokens are two blocks of 128."""
    (work,) = model.product("o", 4096, 4096, 40, next(sheet for sheet in DATASHEETS if sheet.name == "A100"))
    row = model.counted()["product of 64 tokens"]["gemm"]
    assert work.instructions == 8 * row["instructions"]
    assert work.sectors == 8 * (row["loads"][0] + row["stores"][0])
    arrange, wide = model.product("down", 4096, 14336, 200, SHEET)
    row = model.counted()["wide product of 128 tokens"]
    assert arrange.sectors == 2 * 14 * (row["arrange"]["loads"][0] + row["arrange"]["stores"][0])
    assert wide.instructions == 2 * 8 * 14 * row["gemm_wide"]["instructions"]


def test_tables_name_every_product_and_what_does_not_fit() -> None:
    table = model.rates(1024)
    assert all(f"| {sheet.name} |" in table for sheet in DATASHEETS)
    assert table.count("does not fit") == 2
    assert "gate+up: arrange" in model.kernels(1024, DATASHEETS[0])


def test_the_document_shows_what_is_modelled_now() -> None:
    text = (Path(__file__).parents[2] / "docs" / "cuda.md").read_text()
    assert model.rates(1024) in text
    assert model.kernels(1024, next(sheet for sheet in DATASHEETS if sheet.name == "H200")) in text
    assert model.caches(1024, next(sheet for sheet in DATASHEETS if sheet.name == "H200")) in text
