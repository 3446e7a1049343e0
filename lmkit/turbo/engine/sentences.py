"""The modules after the pooling, with their weights, for the front end, which computes them."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from lmkit.errors import CheckpointError, UnsupportedError
from lmkit.formats.safetensors_file import SafetensorsFile
from lmkit.formats.sentences import REMEDY, Module, Sentences
from lmkit.turbo.request import VectorLayer

WEIGHTS = "model.safetensors"
NAMES = {"Dense": ("linear.weight", "linear.bias"), "LayerNorm": ("norm.weight", "norm.bias")}
MAX_BYTES = 64 << 20  # of a module: the front end gets it in a message


def read_layers(folder: Path, sentences: Sentences, hidden_size: int) -> tuple[tuple[VectorLayer, ...], int]:
    """The layers that follow the pooling, and the size of an embedding. Raises CheckpointError and UnsupportedError."""
    size = hidden_size * len(sentences.pooling.split("+"))
    layers = []
    for module in sentences.modules:
        layer = _layer(folder / module.folder, module, size)
        layers.append(layer)
        size = len(layer.bias) // 4 or size
    return tuple(layers), size


def _layer(folder: Path, module: Module, size: int) -> VectorLayer:
    if module.kind == "Normalize":
        return VectorLayer(kind="Normalize")
    path = folder / WEIGHTS
    if not path.exists():
        raise UnsupportedError(f"{path}: no such file; weights are read from safetensors alone. Or {REMEDY}")
    file = SafetensorsFile(path)
    weight_name, bias_name = NAMES[module.kind]
    residual_name = "residual.weight"
    if sum(info.nbytes for info in file.infos.values()) > MAX_BYTES or weight_name not in file.infos:
        raise CheckpointError(f"{path}: expected {weight_name}, and at most {MAX_BYTES >> 20} MiB")
    weight = file.tensor(weight_name).float().numpy()
    bias = file.tensor(bias_name).float().numpy() if bias_name in file.infos else np.zeros(len(weight), np.float32)
    wide = file.tensor(residual_name).float().numpy() if residual_name in file.infos else None
    expected = (size,) if module.kind == "LayerNorm" else (len(weight), size)
    if weight.shape != expected or bias.shape != weight.shape[:1] or (wide is not None and wide.shape != weight.shape):
        raise CheckpointError(f"{path}: {weight_name} is {list(weight.shape)}, expected {list(expected)}")
    if module.residual and wide is None and len(weight) != size:
        raise CheckpointError(f"{path}: {residual_name} is missing")
    return VectorLayer(
        kind=module.kind, weight=weight.tobytes(), bias=bias.tobytes(), activation=module.activation,
        has_residual=module.residual, residual=b"" if wide is None else wide.tobytes(),
    )  # fmt: skip
