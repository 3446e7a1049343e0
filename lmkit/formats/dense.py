"""Plain floating-point weights, `module.weight` [out, in]."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from lmkit.errors import CheckpointError, UnsupportedError
from lmkit.formats.checkpoint import CheckpointReader, CheckpointWriter
from lmkit.formats.names import Activations
from lmkit.formats.parts import FLOATS
from lmkit.qtensor import Linears, QTensor, QuantScheme


class DenseFormat:
    name = "dense"

    def accepts(self, config: dict[str, Any]) -> str | None:
        if config.get("quantization_config") is not None:
            return "config.json has a quantization_config"
        if "compression_config" in config:
            return "config.json has a compression_config"
        nested = [key for key, value in config.items() if isinstance(value, dict) and value.get("quantization_config")]
        return f"config.json has a quantization_config inside {nested[0]}" if nested else None

    def activations(self, config: dict[str, Any]) -> Activations:
        return "none"

    def read_linear(self, reader: CheckpointReader, module: str) -> Tensor | QTensor:
        return read_dense(reader, module)

    def can_write(self, shape: tuple[int, int], scheme: QuantScheme) -> str | None:
        return "dense weights are not quantized"

    def write_linear(
        self, writer: CheckpointWriter, module: str, weight: Tensor | QTensor, *, activations: Activations = "none"
    ) -> None:
        if isinstance(weight, QTensor):
            raise UnsupportedError(f"{module}: the dense format cannot store a quantized weight")
        writer.add(module + ".weight", weight)

    def config_entry(
        self, linears: Linears, *, activations: Activations = "none", kv_cache_scheme: dict[str, Any] | None = None
    ) -> dict[str, Any] | None:
        return None


def read_dense(reader: CheckpointReader, module: str) -> Tensor:
    """A matrix of floats. Raises CheckpointError if it is missing or has another type or shape."""
    name = module + ".weight"
    if not reader.has(name):
        raise CheckpointError(f"{reader.path}: tensor {name} is missing")
    info = reader.info(name)
    if info.dtype not in FLOATS or len(info.shape) != 2:
        raise CheckpointError(f"{reader.path}: {name} is {info.dtype} {list(info.shape)}, expected a matrix of floats")
    return reader.tensor(name)
