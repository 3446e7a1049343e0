"""Qwen2.5-VL as a language model: older config.json, memory, and a vision tower that quantization leaves alone.
test_families.py holds its logits, test_images.py those of prompts with images."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
import transformers

from lmkit.config import EngineConfig
from lmkit.errors import CheckpointError
from lmkit.formats.checkpoint import CheckpointReader
from lmkit.models import load_spec
from lmkit.models.families.qwen_vl import TOWER, TOWER_3
from lmkit.models.resolved import resolved
from lmkit.models.source import ModelSource
from lmkit.models.tower import load_tower, tower_bytes
from lmkit.qtensor import QTensor, dequantize
from lmkit.quant.run import prepare
from lmkit.turbo.engine.describe import describe_model
from lmkit.turbo.engine.memory import loaded_bytes
from tests.models import tiny
from tests.models.pictures import picture, rows_of
from tests.quant.helpers import recipe, tiny_checkpoint


def config_of(path: Path) -> dict[str, Any]:
    config: dict[str, Any] = json.loads((path / "config.json").read_text())
    return config


def test_config_of_transformers_4(tmp_path: Path) -> None:
    """The language model's numbers at the top, and M-RoPE as a type of its own."""
    tiny.make(tmp_path, "qwen2.5-vl")
    config = config_of(tmp_path)
    text = config.pop("text_config")
    rope = text.pop("rope_parameters")
    scaling = {"type": "mrope", "mrope_section": rope["mrope_section"]}
    old = config | text | {"rope_theta": rope["rope_theta"], "rope_scaling": scaling}
    assert load_spec(old | {"architectures": config["architectures"]}) == load_spec(config_of(tmp_path))
    with pytest.raises(CheckpointError, match="text_config is not an object"):
        load_spec(old | {"text_config": [1]})


def test_the_memory_of_the_tower_is_planned(tmp_path: Path) -> None:
    """With room for encoded images, whatever else is asked for."""
    tiny.make(tmp_path, "qwen2.5-vl")
    config = EngineConfig(image_memory=1 << 20)
    with resolved(tmp_path) as model:
        tower = model.reader.nbytes(TOWER)
        assert tower > 0
        assert tower_bytes(model) == tower
        text = model.reader.nbytes() - tower
        assert model.source.weight_bytes("float32") == text
        assert loaded_bytes(model, config) == text + tower + (1 << 20)
        for other in ({"device": "cuda"}, {"tp": 2}, {"kv_events": "tcp://127.0.0.1:0"}):
            assert loaded_bytes(model, msgspec.structs.replace(config, **other)) == text + tower + (1 << 20)


@pytest.mark.parametrize("name", ["awq", "gptq_v2", "compressed-tensors"])
def test_quantization_leaves_the_tower_as_it_is(tmp_path: Path, name: str) -> None:
    path = tiny_checkpoint(tmp_path / "source", "qwen2.5-vl")
    prepare(path, recipe(format=name, calibration={"num_samples": 1, "seq_len": 48})).run(tmp_path / "out")
    before, after = CheckpointReader(path), CheckpointReader(tmp_path / "out")
    towers = [[x for x in reader.names() if x.startswith(TOWER)] for reader in (before, after)]
    assert towers[0] == towers[1]
    assert all(torch.equal(before.tensor(x), after.tensor(x)) for x in towers[0])
    with resolved(path) as source, resolved(tmp_path / "out") as out:
        weights = describe_model(str(tmp_path / "out"), EngineConfig())["weights"]
        assert weights["vision_tower_bytes"] == tower_bytes(out)
        image = picture(load_tower(source, 1 << 20), 3, 2)
        rows = [rows_of(load_tower(model, 1 << 20), image) for model in (source, out)]
    assert torch.equal(*rows)
    left = json.dumps(config_of(tmp_path / "out")["quantization_config"]).replace("\\", "")
    assert all(module in left for module in ("visual.merger.mlp.0", "visual.merger.mlp.2"))


def test_a_mixture_of_experts_is_quantized_beside_its_tower(tmp_path: Path) -> None:
    path = tiny_checkpoint(tmp_path / "source", "qwen3-vl-moe")
    prepare(path, recipe(calibration={"num_samples": 1, "seq_len": 48})).run(tmp_path / "out")
    before, after = CheckpointReader(path), CheckpointReader(tmp_path / "out")
    tower = [name for name in before.names() if name.startswith(TOWER_3)]
    assert tower
    assert all(torch.equal(before.tensor(name), after.tensor(name)) for name in tower)
    weights = ModelSource(tmp_path / "out").layer_weights(1)
    assert isinstance(weights["mlp.experts.6.gate"], QTensor)
    assert isinstance(weights["mlp.router"], torch.Tensor)


def test_transformers_reads_what_is_quantized(tmp_path: Path) -> None:
    pytest.importorskip("compressed_tensors")
    path = tiny_checkpoint(tmp_path / "source", "qwen2.5-vl")
    asked = recipe(format="compressed-tensors", calibration={"num_samples": 1, "seq_len": 48})
    prepare(path, asked).run(tmp_path / "out")
    options = {"dtype": torch.float32, "quantization_config": transformers.CompressedTensorsConfig(dequantize=True)}
    found = transformers.AutoModelForImageTextToText.from_pretrained(tmp_path / "out", **options).state_dict()
    source = ModelSource(tmp_path / "out")
    for name in source.reader.names():
        if name.startswith(TOWER):
            assert torch.equal(found[f"model.{name}"], source.reader.tensor(name))
    for role, weight in source.layer_weights(1).items():
        name = source.spec.tensor_name(1, role).replace("model.", "model.language_model.", 1)
        plain = dequantize(weight) if isinstance(weight, QTensor) else weight
        torch.testing.assert_close(found[name], plain.float(), rtol=1e-3, atol=1e-6)  # its scales are 16 bits
