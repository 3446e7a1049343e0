"""A quantized checkpoint with its weights dense."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor

from lmkit.errors import ConfigError, UnsupportedError
from lmkit.formats.atomic import copy_file
from lmkit.formats.checkpoint import CheckpointReader, CheckpointWriter, atomic_directory
from lmkit.formats.kv_config import FILE_NAME
from lmkit.formats.parts import FLOATS
from lmkit.models import roles
from lmkit.models.source import ModelSource
from lmkit.qtensor import QTensor, dequantize

Progress = Callable[[int, int], None]  # (modules done, of how many)


def to_dense(model: str | Path, output: str | Path, *, progress: Progress = lambda done, total: None) -> int:
    """Write `model` with dense linears to `output`, completely or not at all. Returns their number.

    Values are those that are read (docs/formats.md), rounded to the dtype that config.json names; float32 holds them
    exactly. Everything else stays unchanged. Raises ConfigError if nothing is quantized, UnsupportedError for a
    kv_cache_scheme, and CheckpointError for a broken checkpoint.
    """
    source = ModelSource(model)
    reader, dtype = source.reader, getattr(torch, source.spec.dtype)
    try:
        if source.format.name == "dense":
            raise ConfigError(f"{reader.path}: is dense already")
        if reader.config.get("quantization_config", {}).get("kv_cache_scheme"):
            raise UnsupportedError(f"{reader.path}: kv_cache_scheme: dense checkpoints have no place for it")
        modules = _quantized(source)
        with atomic_directory(output) as folder:
            writer = CheckpointWriter(folder)
            for done, module in enumerate(modules):
                weight = source.format.read_linear(reader, module)
                values: Tensor = dequantize(weight) if isinstance(weight, QTensor) else weight
                writer.add(module + ".weight", values.to(dtype))
                if reader.has(module + ".bias"):
                    writer.add(module + ".bias", reader.tensor(module + ".bias"))
                reader.release()
                progress(done + 1, len(modules))
            for name in reader.names():
                if name.startswith(source.spec.unread) and reader.info(name).dtype not in FLOATS:
                    raise UnsupportedError(f"{reader.path}: {name} is quantized in a part that stays as it is")
                if not name.startswith(tuple(f"{module}." for module in modules)):
                    writer.add(name, reader.tensor(name))
            writer.finish({k: v for k, v in source.config.items() if k != "quantization_config"}, reader.path)
            if (reader.path / FILE_NAME).is_file():
                copy_file(reader.path / FILE_NAME, folder / FILE_NAME)
    finally:
        source.close()
    return len(modules)


def _quantized(source: ModelSource) -> list[str]:
    """The modules of the model whose weights are no floats."""
    spec, reader = source.spec, source.reader
    modules = [] if spec.tie_embeddings else [roles.LM_HEAD]
    for index, layer in enumerate(spec.layers):
        matrices = [role for role, shape in layer.matrices.items() if len(shape) == 2]
        modules += [spec.module_name(index, role) for role in (*layer.linears, *layer.routers, *matrices)]
    return [module for module in modules if not _is_dense(reader, module)]


def _is_dense(reader: CheckpointReader, module: str) -> bool:
    name = module + ".weight"
    return reader.has(name) and reader.info(name).dtype in FLOATS
