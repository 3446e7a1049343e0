"""Quantization on another device gives the files of the same operations on the CPU, and no operand stays behind."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch

from lmkit.errors import ConfigError, UnsupportedError
from lmkit.quant import device as devices
from lmkit.quant.budget import check_device
from lmkit.quant.recipe import Recipe
from lmkit.quant.run import prepare
from tests.quant.helpers import CLIP, SCALE, recipe, tiny_checkpoint
from tests.quant.second_device import NAME, SecondDevice

GPTQ = {"step": "gptq"}
W8A8: dict[str, Any] = {
    "format": "compressed-tensors", "activations": "int8",
    "scheme": {"bits": 8, "group_size": "channel", "symmetric": True},
}  # fmt: skip
CASES: dict[str, tuple[str, Recipe]] = {
    "default": ("llama", recipe(SCALE, CLIP, rounder=GPTQ, kv={"bits": 4})),
    "key means": ("qwen2", recipe(SCALE, rounder=GPTQ, kv={"bits": "auto", "key_mean": True})),
    "smoothquant": ("llama", recipe({"step": "smooth_quant", "grid": 4}, **W8A8)),
    "experts": ("qwen3-moe", recipe(SCALE, CLIP, rounder=GPTQ)),
    "mixed": ("llama", recipe(format="compressed-tensors", average_bits=6.0)),
    "no text": ("llama", recipe(calibration={"dataset": "none"})),
}  # fmt: skip


def files(folder: Path) -> dict[str, torch.Tensor]:
    return {
        name: tensor
        for file in sorted(folder.glob("*.safetensors"))
        for name, tensor in safetensors.torch.load_file(file).items()
    }


@pytest.mark.slow
@pytest.mark.parametrize(
    "name",
    [name if name == "no text" else pytest.param(name, marks=pytest.mark.exhaustive) for name in CASES],
)
def test_a_second_device_gives_the_same_files(name: str, tmp_path: Path) -> None:
    family, chosen = CASES[name]
    source = tiny_checkpoint(tmp_path / "source", family, num_hidden_layers=2 if name == "experts" else 1)
    reports = [prepare(source, chosen, device="torch:cpu").run(tmp_path / "cpu")]
    with SecondDevice() as device:
        reports.append(prepare(source, chosen, device=NAME).run(tmp_path / "second"))
    assert device.num_ops > 0
    one, other = (files(tmp_path / folder) for folder in ("cpu", "second"))
    assert one.keys() == other.keys()
    assert all(torch.equal(tensor, other[tensor_name]) for tensor_name, tensor in one.items())
    assert [layer.error for layer in reports[0].layers] == [layer.error for layer in reports[1].layers]
    kv = [folder / "kv_config.json" for folder in (tmp_path / "cpu", tmp_path / "second")]
    assert kv[0].exists() == kv[1].exists()
    assert not kv[0].exists() or kv[0].read_bytes() == kv[1].read_bytes()


def test_gpus_are_given_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    found = [
        devices.resolve_device(asked, rank) for asked, rank in [("auto", 0), ("cuda", 3), ("cuda:1", 0), ("cpu", 1)]
    ]
    assert found == ["torch:cuda:0", "torch:cuda:1", "torch:cuda:1", "cpu"]
    with pytest.raises(UnsupportedError, match="GPUs here are cuda:0 to cuda:1"):
        devices.resolve_device("cuda:2")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert devices.resolve_device("auto") == "cpu"
    with pytest.raises(UnsupportedError, match="finds no GPU here; use --device cpu"):
        devices.resolve_device("cuda")
    with pytest.raises(ConfigError, match="expected auto, cpu, cuda or cuda:N"):
        devices.resolve_device("tpu")


def test_a_gpu_without_room_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    quantizer = prepare(tiny_checkpoint(tmp_path / "source"), CASES["default"][1])
    monkeypatch.setattr("lmkit.quant.budget.free_memory", lambda device: 1 << 20)
    with pytest.raises(ConfigError, match="of the GPU's memory, 1MiB are free; --max-memory takes smaller steps"):
        check_device(quantizer.source, quantizer.budget, "torch:cuda:0")
    kept = r"cuda:0 has too little memory: .* finished layers are kept: no room"
    with pytest.raises(ConfigError, match=kept), devices.fits("torch:cuda:0"):
        raise torch.OutOfMemoryError("no room. more")
