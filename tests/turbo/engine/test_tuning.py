"""`lmkit tune`, with a clock of its own: what it measures, keeps and prints."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from typer.testing import CliRunner

from benchmarks.random_llama import make_awq
from lmkit.cli.main import app
from lmkit.errors import ConfigError, UnsupportedError
from lmkit.kernels.cuda import attention, gemm, gemm_experts, gemm_table, module, wide
from lmkit.kernels.cuda.gemm_table import Entry, Key, SplitKey, WideKey
from lmkit.kv_dtype import INT8
from lmkit.layers import latent_cost
from lmkit.layers.blocks.latent import LatentSpec
from lmkit.models.loader import load_model
from lmkit.turbo.engine import tuning
from lmkit.turbo.engine.tuning import (
    AttentionShape,
    attention_shapes,
    decoding,
    tunable,
    tunable_experts,
    tune_model,
    tune_splits,
)
from lmkit.turbo.runners.cuda_device import CudaDevice
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
    for where in (gemm_table, gemm_experts, attention, wide):
        monkeypatch.setattr(where, "table", lambda device: empty)
    times = iter(range(100_000, 0, -1))

    def measure(launch: Callable[[int], Tensor], copies: int) -> float:
        assert copies > 0
        return float(next(times))

    monkeypatch.setattr(gemm_table, "measure_on_device", measure)
    monkeypatch.setattr(gemm_table, "COLD_BYTES", 1 << 16)
    yield empty
    module.BACKENDS.pop("cpu", None)
    module.counters.cache_clear()


def test_a_model_is_tuned_for_each_shape_and_number_of_tokens(
    path: Path, table: gemm_table.Table, monkeypatch: pytest.MonkeyPatch
) -> None:
    measure, copies = gemm_table.measure_on_device, []
    monkeypatch.setattr(gemm_table, "measure_on_device", lambda launch, n: copies.append(n) or measure(launch, n))
    entries, *_, file = tune_model(path, EmulatedDevice(), num_plans=3)
    shapes = {(entry.key.outputs, entry.key.inputs) for entry in entries}
    assert len(shapes) == 4, "q with k and v, o, gate with up, down"
    assert {(64, 96), (192, 64)} <= shapes
    assert len(entries) == 4 * len((*gemm_table.BUCKETS, *gemm_table.PROMPT_BUCKETS))
    assert min(copies) > 1, "weights and KV come from memory"
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


def test_plans_for_prompts_are_used_if_they_were_faster(path: Path, table: gemm_table.Table) -> None:
    decoder = load_model(path, device="cuda")
    weight = next(tunable(decoder))
    assert gemm_table.choose(300, weight, decoder.dtype) is None
    plan = gemm_table.promising(384, weight, 1)[0]
    table.add(Entry(Key.of(weight, decoder.dtype), 384, plan, 1.0))
    assert [gemm_table.choose(tokens, weight, decoder.dtype) for tokens in (300, 385, 1000)] == [plan, None, None]
    launched = set(gemm.kernels_of(weight, plan, decoder.dtype, 384))
    assert launched <= set(gemm_table.kernels(weight, decoder.dtype, 2048))


@pytest.fixture
def experts(tmp_path: Path) -> Path:
    sizes = {"hidden_size": 64, "moe_intermediate_size": 32, "head_dim": 16, "num_hidden_layers": 2}
    tiny.make(tmp_path / "dense", "qwen3-moe", **sizes).half().save_pretrained(tmp_path / "dense")
    make_awq(tmp_path / "dense", tmp_path / "w4", group=32)
    return tmp_path / "w4"


@pytest.mark.parametrize("activations", ["auto", "int8"])
def test_products_of_experts_are_tuned(experts: Path, table: gemm_table.Table, activations: Any) -> None:
    tuned = tune_model(experts, EmulatedDevice(), num_plans=2, activations=activations)
    entries = [entry for entry in tuned.entries if entry.key.experts]
    assert {entry.key.dtype for entry in entries} == {"int8" if activations == "int8" else "float16"}
    decoder = load_model(experts, device="cuda", activations=activations)
    of_experts = list(tunable_experts(decoder))
    assert [each.by_token for each in of_experts] == [True, False]
    for each in of_experts:
        packed, count = each.table.packed, len(each.table.parts)
        mine = [entry for entry in entries if entry.key == Key.of(packed, decoder.dtype, count)]
        assert [entry.tokens for entry in mine] == [gemm_experts.bucket(each.per_token * n) for n in each.tokens]
        assert mine[-1].tokens >= gemm_experts.MAX_ROWS * count
        for places in (8, 64):
            slower, plan = gemm_experts.promising(packed, places, count, 2)
            assert gemm_experts.plan_for(packed, decoder.dtype, places, count)[1] == plan != slower
    again = gemm_table.Table(table.path, "emulated")
    assert again.entries == table.entries


def test_splits_of_attention_are_tuned(path: Path, table: gemm_table.Table, monkeypatch: pytest.MonkeyPatch) -> None:
    """By a clock that likes 3 tiles for 16 bits, and 6 for others."""
    shape, best = AttentionShape(16, 4, 2), {16: 3, 8: 6, 4: 6}
    assert attention_shapes(load_model(path, device="cuda")) == [shape]

    def measure(launch: Callable[[int], Tensor], copies: int) -> float:
        key, tiles = list(table.split_costs.items())[-1]
        return 1.0 + abs(tiles - best[key.bits])

    monkeypatch.setattr(gemm_table, "measure_on_device", measure)
    costs = tune_splits(table, "cpu", torch.float16, shape)
    assert {cost.key: cost.tiles for cost in costs} == {SplitKey(16, 2, bits): tiles for bits, tiles in best.items()}
    table.save()
    assert gemm_table.Table(table.path, "emulated").split_costs == table.split_costs


def test_attention_takes_the_cost_that_was_measured(table: gemm_table.Table, monkeypatch: pytest.MonkeyPatch) -> None:
    costs = []
    monkeypatch.setattr(attention, "num_splits", lambda blocks, tiles, places, cost: costs.append(cost) or 1)
    launch, copies = decoding("cpu", torch.float16, AttentionShape(16, 4, 2), INT8, 1, 128)
    for _ in range(2):
        assert launch(copies - 1).isfinite().all()
        table.split_costs[SplitKey(16, 2, 8)] = 11
    assert costs == [attention.SPLIT_COSTS[8], 11]


def test_latent_attention_is_tuned(tmp_path: Path, table: gemm_table.Table, monkeypatch: pytest.MonkeyPatch) -> None:
    """Blocks of its wide rows, by a clock that likes 4, and prompts over plain heads, which give the same results."""
    changes = {"num_hidden_layers": 1, "first_k_dense_replace": 1, "qk_nope_head_dim": 24, "v_head_dim": 16}
    tiny.make(tmp_path, "deepseek-v2-lite", **changes).half().save_pretrained(tmp_path)
    decoder, results = load_model(tmp_path, device="cuda"), []
    shape = AttentionShape(32, 6, 1, shared=True)
    assert attention_shapes(decoder) == [shape]
    monkeypatch.setattr(tuning, "DECODING", ((1, 128),))

    def blocks(launch: Callable[[int], Tensor], copies: int) -> float:
        return 1.0 + abs(list(table.wide_blocks.values())[-1] - 4)

    monkeypatch.setattr(gemm_table, "measure_on_device", blocks)
    found = tuning.tune_wide(table, "cpu", torch.float16, shape)
    assert [each.key for each in found] == [WideKey(32, 6, bits, True) for bits in (16, 8, 4)]
    assert set(table.wide_blocks.values()) == {4}
    num_ranges, places = wide.num_ranges, []
    monkeypatch.setattr(wide, "num_ranges", lambda *args: places.append(args[-1]) or num_ranges(*args))
    assert decoding("cpu", torch.float16, shape, INT8, 1, 128)[0](0).isfinite().all()
    assert places == [4 * module.backend("cpu").num_sms()]

    monkeypatch.setattr(tuning, "LATENT_CHUNK", (20, 64))
    monkeypatch.setattr(
        gemm_table, "measure_on_device", lambda launch, n: results.append(launch(0)) or 10.0 - 3 * len(results)
    )
    (gain,) = tuning.tune_latent(table, "cpu", decoder)
    torch.testing.assert_close(*results, rtol=0, atol=2e-3 * float(results[0].abs().max()))
    spec = decoder.layers[0].spec.mixer
    assert isinstance(spec, LatentSpec)
    assert gain.factor == pytest.approx(3.0 / latent_cost.gain(20, 64, spec, 6))
    table.save()
    again = gemm_table.Table(table.path, "emulated")
    assert (again.wide_blocks, again.latent_gains) == (table.wide_blocks, table.latent_gains)


def test_the_command(path: Path, table: gemm_table.Table, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(CudaDevice, "opened", EmulatedDevice)
    result = CliRunner().invoke(app, ["tune", str(path), "--plans", "2"])
    assert result.exit_code == 0, result.output
    assert "192 x 64, 4 bits: up to 1 tokens" in result.output
    assert "attention, heads of 16, 2 for each KV head, KV of 8 bits: a split costs" in result.output
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
