"""A KV cache is calibrated where attention stays dense, and where no weight is quantized at all."""

from __future__ import annotations

from pathlib import Path

import torch
from safetensors.torch import load_file
from typer.testing import CliRunner

from lmkit.cli.main import app
from lmkit.formats.kv_config import load_kv_config
from lmkit.models.source import ModelSource
from lmkit.quant.run import prepare
from tests.cli.commands import mistake
from tests.quant import helpers


def test_attention_that_stays_dense(tmp_path: Path) -> None:
    source = helpers.tiny_checkpoint(tmp_path / "model", "llama")
    recipe = helpers.recipe(kv={"bits": 4}, ignore=["attn.*"])
    prepare(source, recipe).run(tmp_path / "out")
    config = load_kv_config(tmp_path / "out")
    assert config is not None
    for layer in config.layers:
        assert layer.balance is not None
        assert layer.first_key is not None
        assert layer.first_value is not None
        assert layer.values_turned


def test_weights_none(tmp_path: Path) -> None:
    source, out = helpers.tiny_checkpoint(tmp_path / "model", "llama"), tmp_path / "out"
    options = ["--weights", "none", "--kv-bits", "4", "--calibration", "demo", "--num-samples", "4", "--seq-len", "48"]
    result = CliRunner().invoke(app, ["quantize", str(source), "-o", str(out), *options, "--no-eval"])
    assert result.exit_code == 0, result.output
    assert "weights: as they are; KV cache: 4 bits" in result.output
    before, after = (load_file(folder / "model.safetensors") for folder in (source, out))
    changed = {name for name in before if not torch.equal(before[name], after[name])}
    assert before.keys() == after.keys()
    assert {name.split(".")[-2] for name in changed} == {"v_proj", "o_proj"}
    assert "quantization_config" not in ModelSource(out).config
    config = load_kv_config(out)
    assert config is not None
    assert all(layer.balance is not None for layer in config.layers)
    assert "leave out --bits" in mistake("quantize", source, "-o", tmp_path / "b", *options, "--bits", "4")
