"""A transformers model as a plain float32 checkpoint."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file


def save_dense(model: Any, source: Path, out: Path) -> None:
    """Write the weights of `model`, whose linears are dense already, to `out`. All other files are those of
    `source`."""
    out.mkdir()
    config = json.loads((source / "config.json").read_text())
    tied = config.get("tie_word_embeddings", False)
    tensors = {
        name: tensor.detach().float().contiguous().clone()
        for name, tensor in model.state_dict().items()
        if name.endswith((".weight", ".bias")) and not (tied and name == "lm_head.weight")
    }
    save_file(tensors, out / "model.safetensors", metadata={"format": "pt"})
    for file in source.iterdir():
        if file.suffix in (".json", ".jinja") and not file.name.startswith("model.safetensors"):
            shutil.copy(file, out / file.name)


def load_float32(path: Path, **options: Any) -> Any:
    """The model of a checkpoint in float32, on the CPU."""
    import transformers

    return transformers.AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32, **options).eval()
