"""A layer's finished weights as tensors of the checkpoint, and back."""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Mapping
from pathlib import Path

from torch import Tensor

from lmkit.formats.base import get_format, resolve_format
from lmkit.formats.checkpoint import CheckpointReader, CheckpointWriter
from lmkit.formats.verify import weight_digest
from lmkit.layers.linear import Weights
from lmkit.models.fused import stored_name
from lmkit.models.source import ModelSource
from lmkit.models.spec import ModelSpec
from lmkit.qtensor import QTensor, QuantScheme
from lmkit.quant.recipe import Recipe


def stored_tensors(
    source: ModelSource, recipe: Recipe, linears: Mapping[str, QuantScheme | None], index: int, weights: Weights
) -> dict[str, Tensor]:
    """The tensors of a layer's weights. `linears` are the schemes by module: what was read back has codes of at least 4
    bits."""
    writer = CheckpointWriter(source.reader.path, max_shard_bytes=sys.maxsize)
    for role, weight in weights.items():
        if isinstance(weight, QTensor):
            module = source.spec.module_name(index, role)
            scheme = linears[module]
            assert scheme is not None
            weight = dataclasses.replace(weight, scheme=scheme)
            get_format(recipe.format).write_linear(writer, module, weight, activations=recipe.activations)
        else:
            writer.add(stored_name(source.spec, index, role), source.stored(index, role, weight))
    return writer.take()


def digests_of(spec: ModelSpec, index: int, weights: Weights) -> dict[str, str]:
    """The digests of a layer's quantized linears, by module."""
    return {
        spec.module_name(index, role): weight_digest(weight)
        for role, weight in weights.items()
        if isinstance(weight, QTensor)
    }


def write_alone(
    folder: Path, tensors: Mapping[str, Tensor], recipe: Recipe, linears: Mapping[str, QuantScheme | None]
) -> None:
    """Write tensors of some linears as a checkpoint that holds nothing else."""
    writer = CheckpointWriter(folder, max_shard_bytes=sys.maxsize)
    for name, tensor in tensors.items():
        writer.add(name, tensor)
    config = {}
    if any(linears.values()):
        entry = get_format(recipe.format).config_entry(dict(linears), activations=recipe.activations)
        config = {"quantization_config": entry}
    writer.finish(config, folder)


def read_alone(folder: Path, modules: Mapping[str, str]) -> Weights:
    """The linears and biases of such a checkpoint by role. `modules` are the linears' modules by role."""
    reader, found = CheckpointReader(folder), Weights()
    weight_format = resolve_format(reader.config)
    for role, module in modules.items():
        weight = weight_format.read_linear(reader, module)
        found[role] = weight if isinstance(weight, QTensor) else weight.float()
        if reader.has(module + ".bias"):
            found[role + ".bias"] = reader.tensor(module + ".bias").float()
    return found
