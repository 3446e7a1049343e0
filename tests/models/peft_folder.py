"""Random LoRA adapters in PEFT's files."""

from __future__ import annotations

import json
import math
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

from lmkit.formats.peft import read_adapter
from lmkit.models import load_spec
from lmkit.models.adapters import adaptable

MODULES = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
CONFIG = {
    "peft_type": "LORA", "task_type": "CAUSAL_LM", "r": 4, "lora_alpha": 8, "target_modules": [*MODULES],
    "bias": "none", "base_model_name_or_path": "base", "lora_dropout": 0.1, "inference_mode": True,
    "modules_to_save": None, "use_dora": False, "init_lora_weights": True, "fan_in_fan_out": False,
}  # fmt: skip


def write(
    folder: Path,
    shapes: dict[str, tuple[int, int]],
    seed: int,
    *,
    rank: int = 4,
    size: float = 0.3,
    dtype: torch.dtype = torch.float32,
    **config: Any,
) -> dict[str, Tensor]:
    """Write an adapter for linears [out, in] by module name. Returns what it adds to their weights, float32."""
    generator, folder = torch.Generator().manual_seed(seed), folder
    folder.mkdir(parents=True, exist_ok=True)
    fields = CONFIG | {"r": rank} | config
    scale = fields["lora_alpha"] / (math.sqrt(rank) if fields.get("use_rslora") else rank)
    tensors, added = {}, {}
    for module, (outputs, inputs) in shapes.items():
        a = (torch.randn(rank, inputs, generator=generator) / math.sqrt(inputs)).to(dtype)
        b = (torch.randn(outputs, rank, generator=generator) * size / math.sqrt(rank)).to(dtype)
        tensors |= {f"base_model.model.{module}.lora_A.weight": a, f"base_model.model.{module}.lora_B.weight": b}
        added[module] = scale * b.float() @ a.float()
    save_file(tensors, folder / "adapter_model.safetensors")
    (folder / "adapter_config.json").write_text(json.dumps(fields))
    return added


def linears(model: torch.nn.Module, modules: tuple[str, ...] = MODULES) -> dict[str, tuple[int, int]]:
    """The linears of a model of transformers with these last names."""
    return {
        name: (module.out_features, module.in_features)
        for name, module in model.named_modules()
        if isinstance(module, torch.nn.Linear) and name.rpartition(".")[2] in modules
    }


def linears_of(checkpoint: Path) -> dict[str, tuple[int, int]]:
    """The linears of a checkpoint that may have additions."""
    spec = load_spec(json.loads((checkpoint / "config.json").read_text()))
    return {
        layer.module_name(index, role): shape
        for index, layer in enumerate(spec.layers)
        for role, shape in adaptable(layer).items()
    }


class SlowFiles:
    """Adapters that an engine in this process reads are read when `opened` is set. `begun` says that one is wanted."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.begun, self.opened = threading.Event(), threading.Event()
        monkeypatch.setattr("lmkit.models.adapters.read_adapter", self._read)

    def _read(self, folder: Path) -> Any:
        self.begun.set()
        self.opened.wait()
        return read_adapter(folder)
