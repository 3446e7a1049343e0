"""Outlier channels change activations, not what the model computes."""

from __future__ import annotations

from pathlib import Path

import torch
from safetensors.torch import load_file

from benchmarks.outliers import make_outliers
from lmkit.models.source import ModelSource
from lmkit.quant.layer.layer import Geometry
from tests.quant.helpers import tiny_checkpoint


def test_a_model_with_outliers_is_the_same_function(tmp_path: Path) -> None:
    path = tiny_checkpoint(tmp_path / "source")
    make_outliers(path, tmp_path / "outliers", 30.0)
    before, after = (load_file(folder / "model.safetensors") for folder in (path, tmp_path / "outliers"))
    gain = after["model.layers.0.input_layernorm.weight"] / before["model.layers.0.input_layernorm.weight"].float()
    torch.testing.assert_close(gain.sort().values, torch.tensor([1.0] * 63 + [30.0]))
    hidden = torch.randn(48, 64, generator=torch.Generator().manual_seed(0))
    outputs = []
    for folder in (path, tmp_path / "outliers"):
        source = ModelSource(folder)
        geometry, layer = Geometry.of(source.spec.layers[0], 2, 24), source.layer(0, torch.float32)
        delta, residual = layer(hidden.clone(), None, geometry.batch, geometry.rope, geometry.kv)
        outputs.append(delta + residual)
    torch.testing.assert_close(outputs[0], outputs[1], rtol=1e-5, atol=1e-5)
