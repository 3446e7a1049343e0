"""Sparse layers whose experts are held one at a time."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import msgspec
import pytest
import safetensors.torch
import torch

from lmkit.errors import CheckpointError, UnsupportedError
from lmkit.formats.base import get_format
from lmkit.formats.checkpoint import CheckpointWriter
from lmkit.models.loader import load_model
from lmkit.models.source import ModelSource
from lmkit.qtensor import dequantize, float8_scheme, quantize
from lmkit.quant import split
from lmkit.quant.data.workdir import WorkFolder
from lmkit.quant.recipe import load_recipe
from lmkit.quant.report.report import QuantReport
from lmkit.quant.run import prepare
from tests.quant.helpers import CLIP, recipe, tiny_checkpoint
from tests.quant.killed import digest
from tests.quant.layer.test_moe import logits, lonely_checkpoint

GPTQ = {"step": "gptq", "targets": "exact"}
CALIBRATION = {"num_samples": 6, "seq_len": 128}
FAMILIES: dict[str, dict[str, Any]] = {
    "mixtral": {"num_hidden_layers": 1},  # routes by a softmax
    "qwen2-moe": {"num_hidden_layers": 1, "num_experts": 5},  # a router weighs the shared expert
    "deepseek-v3": {"num_key_value_heads": 4, "num_hidden_layers": 2},  # groups, a shared expert, a dense layer
}


@pytest.fixture
def apart(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(split, "WHOLE_BYTES", 0)


def source_of(path: Path, family: str = "mixtral") -> Path:
    return tiny_checkpoint(path, family, **FAMILIES[family])


def run(source: Path, out: Path) -> QuantReport:
    return prepare(source, recipe(CLIP, rounder=GPTQ, calibration=CALIBRATION)).run(out)


def tensors_of(path: Path) -> dict[str, torch.Tensor]:
    return safetensors.torch.load_file(path / "model.safetensors")


@pytest.mark.parametrize("family", FAMILIES)
def test_experts_one_at_a_time_are_as_good_as_together(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, family: str
) -> None:
    source = source_of(tmp_path / "source", family)
    together = run(source, tmp_path / "together")
    monkeypatch.setattr(split, "WHOLE_BYTES", 0)
    report = run(source, tmp_path / "apart")
    row = torch.randint(0, 4096, (100,), generator=torch.Generator().manual_seed(1)).tolist()
    paths = source, tmp_path / "together", tmp_path / "apart"
    exact, theirs, ours = (logits(load_model(path, activations="exact"), [row]) for path in paths)
    assert 0 < float((ours - exact).norm()) < 1.15 * float((theirs - exact).norm())
    last, expected = report.layers[-1], together.layers[-1]
    assert last.experts is not None
    assert expected.experts is not None
    assert last.experts.tokens.keys() == expected.experts.tokens.keys()
    assert sum(last.experts.tokens.values()) == sum(expected.experts.tokens.values())
    assert {linear.module for linear in last.linears} == {linear.module for linear in expected.linears}
    assert tensors_of(paths[1]).keys() == tensors_of(paths[2]).keys()


def test_rounding_to_nearest_gives_the_same_bits(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = source_of(tmp_path / "source", "deepseek-v3")
    plan = load_recipe("rtn_w4a16_g128", {"scheme": {"group_size": 32}})
    prepare(source, plan).run(tmp_path / "together")
    monkeypatch.setattr(split, "WHOLE_BYTES", 0)
    prepare(source, plan).run(tmp_path / "apart")
    expected, found = tensors_of(tmp_path / "together"), tensors_of(tmp_path / "apart")
    assert expected.keys() == found.keys()
    assert all(torch.equal(expected[name], found[name]) for name in expected)


@pytest.mark.usefixtures("apart")
def test_an_expert_that_no_token_met_takes_those_of_the_nearest(tmp_path: Path) -> None:
    report = run(lonely_checkpoint(tmp_path / "source"), tmp_path / "out")
    (layer,) = report.layers
    assert layer.experts is not None
    assert layer.experts.tokens["3"] == 0
    assert layer.experts.borrowed["3"] == "1"  # whose row of the router is the same
    assert layer.experts.without_statistics == ()
    methods = {linear.module: linear.method for linear in layer.linears if ".experts.3." in linear.module}
    assert set(methods.values()) == {"gptq"}
    saved = json.loads((tmp_path / "out" / "report.json").read_text())
    assert saved["layers"][0]["experts"]["borrowed"]["3"] == "1"


class Stopped(Exception):
    pass


@pytest.mark.usefixtures("apart")
def test_a_layer_goes_on_between_its_experts(tmp_path: Path) -> None:
    source, calls = source_of(tmp_path / "source"), []
    plan = recipe(CLIP, rounder=GPTQ, calibration=CALIBRATION)
    prepare(source, plan).run(tmp_path / "whole")

    def stop(what: str, done: int, total: int) -> None:
        calls.append(what)
        if calls.count("layers") == 6:  # four stages before the experts, then one of each expert
            raise Stopped

    with pytest.raises(Stopped):
        prepare(source, plan).run(tmp_path / "out", progress=stop)
    parts = sorted(path.name for path in (WorkFolder.beside(tmp_path / "out").path).glob("layer-00000.parts/*"))
    assert 0 < len(parts) < 4
    prepare(source, plan).run(tmp_path / "out")
    assert digest(tmp_path / "out") == digest(tmp_path / "whole")


@pytest.mark.usefixtures("apart")
def test_a_damaged_expert_is_refused(tmp_path: Path) -> None:
    work = WorkFolder(tmp_path, tmp_path / "out")
    folder = work.part(0, "mlp.experts.0")
    work.keep_part(folder, lambda path: (path / "model.safetensors").write_bytes(b"12"), b"{}")
    assert work.kept_part(folder) == b"{}"
    (folder / "model.safetensors").write_bytes(b"13")
    with pytest.raises(CheckpointError, match="its bytes have changed"):
        work.kept_part(folder)


@pytest.mark.usefixtures("apart")
def test_what_needs_whole_layers_is_left_out_or_refused(tmp_path: Path) -> None:
    source = source_of(tmp_path / "source")
    auto = prepare(source, recipe(rounder=GPTQ | {"loss": "auto"}, calibration=CALIBRATION)).recipe
    assert not auto.needs_curvature
    with pytest.raises(UnsupportedError, match="loss does not go with experts that are held one at a time"):
        prepare(source, recipe(rounder=GPTQ | {"loss": 1}, calibration=CALIBRATION))
    with pytest.raises(UnsupportedError, match="refine does not go with experts that are held one at a time"):
        prepare(source, recipe(GPTQ, {"step": "refine"}, rounder=None, calibration=CALIBRATION))


def test_the_estimate_of_memory_is_that_of_the_largest_part(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source, plan = source_of(tmp_path / "source"), recipe(CLIP, rounder=GPTQ, calibration=CALIBRATION)
    whole = prepare(source, plan)
    monkeypatch.setattr(split, "WHOLE_BYTES", 0)
    parts = prepare(source, plan)
    assert parts.budget.memory_bytes < whole.budget.memory_bytes
    assert parts.plan.seconds["layers"] > 0


def as_float8(source: Path, out: Path) -> Path:
    """The checkpoint with its linears in float8 blocks, as DeepSeek publishes them."""
    model, float8 = ModelSource(source), get_format("fp8")
    out.mkdir()
    writer, linears = CheckpointWriter(out), {}
    for index, layer in enumerate(model.spec.layers):
        linears |= {layer.module_name(index, role): float8_scheme(128, 128) for role in layer.linears}
    for name in model.reader.names():
        module, weight = name.removesuffix(".weight"), model.reader.tensor(name)
        if module in linears:
            float8.write_linear(writer, module, quantize(weight.float(), linears[module]))
        else:
            writer.add(name, weight)
    writer.finish(model.config | {"quantization_config": float8.config_entry(linears)}, source)
    return out


@pytest.mark.usefixtures("apart")
def test_a_checkpoint_in_float8_is_read_as_floats(tmp_path: Path) -> None:
    coded = as_float8(source_of(tmp_path / "source", "deepseek-v3"), tmp_path / "coded")
    opened = ModelSource(coded, floats=True)
    assert opened.format.name == "dense"
    kept = ModelSource(coded)
    module = kept.spec.module_name(1, "mlp.experts.0.up")
    weight = kept.format.read_linear(kept.reader, module)
    expected = dequantize(weight).to(opened.reader.tensor(module + ".weight").dtype)
    assert torch.equal(opened.reader.tensor(module + ".weight"), expected)
    assert not [name for name in opened.reader.names() if "scale_inv" in name]
    report = run(coded, tmp_path / "out")
    assert all(linear.format == "awq" for layer in report.layers for linear in layer.linears if not linear.reason)
    assert not [name for name in tensors_of(tmp_path / "out") if "scale_inv" in name]
    row = [[5, 9, 77, 1000, 3]]
    exact, got = (logits(load_model(path, activations="exact"), row) for path in (coded, tmp_path / "out"))
    assert 0 < float((got - exact).norm() / exact.norm()) < 0.3
    assert msgspec.json.decode((tmp_path / "out" / "config.json").read_bytes())["quantization_config"]
