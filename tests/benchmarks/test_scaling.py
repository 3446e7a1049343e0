from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from benchmarks import scaling
from benchmarks.ceilings import Ceilings
from benchmarks.random_llama import Shape
from benchmarks.scaling import Setting

TINY = Shape(128, 256, 2, 4, 2, 32, 512, 512)
CEILINGS = Ceilings(bytes_per_s=1e9, int4_ops=1e12, int8_ops=1e12, bfloat16_ops=1e11, float_ops=1e10)
UNREACHABLE = Ceilings(bytes_per_s=1e15, int4_ops=1e18, int8_ops=1e18, bfloat16_ops=1e18, float_ops=1e18)


def test_roofline_of_one_sequence_is_reading() -> None:
    setting = Setting("context", "tiny", "bfloat16", 1, 100)
    kv_bytes = 100 * 2 * 2 * 2 * 32 * 2  # tokens, K and V, layers, heads, head_dim, bytes
    assert scaling.roofline(CEILINGS, TINY, setting, 10_000) == pytest.approx((10_000 + kv_bytes) / 1e9)


def test_roofline_of_a_large_batch_is_arithmetic() -> None:
    setting = Setting("batch", "tiny", "bfloat16", 1000, 1)
    linear = 2 * (128 * (128 + 64 + 64 + 128) + 3 * 128 * 256)
    head, attention = 512 * 128, 2 * 2 * 4 * 32  # multiply-adds of a token: the head; q k and p v of two layers
    seconds = 2000 * linear / 1e12 + (2000 * head + 2000 * attention) / 1e11
    fast_memory = replace(CEILINGS, bytes_per_s=1e15)
    assert scaling.roofline(fast_memory, TINY, setting, 10_000) == pytest.approx(seconds)


def test_settings_cover_every_sweep() -> None:
    for quick in (True, False):
        found = scaling.settings(quick=quick)
        assert {setting.sweep for setting in found} == {"context", "batch", "size"}
        for setting in found:
            assert setting.context + scaling.ROOM <= scaling.SIZES[setting.size].max_position
    assert max(s.batch for s in found) == 256
    assert len(scaling.settings(quick=True)) < len(found)


def test_measured_rows_and_plot(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(scaling.SIZES, "tiny", TINY)
    found = [
        Setting("context", "tiny", "int8", 1, 300),
        Setting("batch", "tiny", "bfloat16", 3, 16),
        Setting("size", "tiny", "bfloat16", 1, 16),
    ]
    rows = list(scaling.measure(found, 2, tmp_path, lambda read_bytes: UNREACHABLE))
    assert [row["x"] for row in rows] == [300, 3, TINY.num_parameters]
    for row in rows:
        assert row["ms_per_token"] == pytest.approx(row["ms_per_step"] / row["batch"])
        assert row["of_roofline"] == pytest.approx(row["roofline_ms_per_step"] / row["ms_per_step"])
    pytest.importorskip("matplotlib")
    scaling.plot(rows, tmp_path / "plot.png")
    assert (tmp_path / "plot.png").read_bytes().startswith(b"\x89PNG")
