"""`lmkit tune`, with a clock of its own: what it measures, keeps and prints."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from torch import Tensor
from typer.testing import CliRunner

from benchmarks.random_llama import make_awq
from lmkit.cli.main import app
from lmkit.errors import ConfigError, UnsupportedError
from lmkit.kernels.cuda import gemm_table, module
from lmkit.models.loader import load_model
from lmkit.turbo.engine.tuning import tunable, tune_model
from lmkit.turbo.runners import device as devices
from tests import emulator
from tests.emulator.device import EmulatedDevice
from tests.models import tiny


@pytest.fixture
def path(tmp_path: Path) -> Path:
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16}
    tiny.make(tmp_path / "dense", "llama", hidden_size=64, intermediate_size=96, num_hidden_layers=2, **heads)
    make_awq(tmp_path / "dense", tmp_path / "w4", group=32)
    return tmp_path / "w4"


@pytest.fixture
def table(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[gemm_table.Table]:
    """An empty table, and a clock by which the last plan of each measurement is the fastest."""
    emulator.install()
    empty = gemm_table.Table(tmp_path / "gemm" / "emulated.json", "emulated")
    monkeypatch.setattr(gemm_table, "table", lambda device: empty)
    times = iter(range(100_000, 0, -1))

    def measure(launch: Callable[[int], Tensor], copies: int) -> float:
        assert copies > 1
        return float(next(times))

    monkeypatch.setattr(gemm_table, "measure_on_device", measure)
    monkeypatch.setattr(gemm_table, "COLD_BYTES", 1 << 16)
    yield empty
    module.BACKENDS.pop("cpu", None)
    module.counters.cache_clear()


def test_a_model_is_tuned_for_each_shape_and_number_of_tokens(path: Path, table: gemm_table.Table) -> None:
    entries, file = tune_model(path, EmulatedDevice(), num_plans=3)
    shapes = {(entry.key.outputs, entry.key.inputs) for entry in entries}
    assert len(shapes) == 4, "q with k and v, o, gate with up, down"
    assert {(64, 96), (192, 64)} <= shapes
    assert len(entries) == 4 * len(gemm_table.BUCKETS)
    assert {entry.plan is None for entry in entries if entry.tokens >= 64} == {True}, "the library was timed last"
    assert None not in {entry.plan for entry in entries if entry.tokens < 64}
    again = gemm_table.Table(file, "emulated")
    assert again.entries == table.entries


def test_engines_use_what_was_measured(path: Path, table: gemm_table.Table) -> None:
    tune_model(path, EmulatedDevice(), num_plans=3)
    decoder = load_model(path, device="cuda")
    for weight in tunable(decoder):
        plans = gemm_table.promising(8, weight, 3)
        assert gemm_table.choose(7, weight, decoder.dtype) == plans[-1] != plans[0]
        assert gemm_table.choose(100, weight, decoder.dtype) is None


def test_the_command(path: Path, table: gemm_table.Table, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(devices, "resolve_device", lambda config: EmulatedDevice())
    result = CliRunner().invoke(app, ["tune", str(path), "--plans", "2"])
    assert result.exit_code == 0, result.output
    assert "192 x 64, 4 bits: up to 1 tokens" in result.output
    assert str(table.path) in result.output.replace("\n", "")


def test_mistakes_are_one_line(path: Path, table: gemm_table.Table, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(UnsupportedError, match="no linear has 4- or 8-bit weights"):
        tune_model(path.parent / "dense", EmulatedDevice(), num_plans=1)
    table.path.parent.write_text("in the way")
    with pytest.raises(ConfigError, match=r"cannot be written: .*; LMKIT_CACHE_DIR sets another"):
        tune_model(path, EmulatedDevice(), num_plans=1)
    if not torch.cuda.is_available():
        result = CliRunner().invoke(app, ["tune", str(path)])
        assert isinstance(result.exception, UnsupportedError)
