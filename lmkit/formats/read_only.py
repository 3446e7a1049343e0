"""What formats that are not written have in common."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from lmkit.errors import UnsupportedError
from lmkit.formats.checkpoint import CheckpointWriter
from lmkit.formats.names import Activations
from lmkit.qtensor import Linears, QTensor, QuantScheme


class ReadOnlyFormat:
    """The part of base.WeightFormat that refuses to write. Activations are exact."""

    name: str

    def activations(self, config: dict[str, Any]) -> Activations:
        return "none"

    def can_write(self, shape: tuple[int, int], scheme: QuantScheme) -> str | None:
        return f"{self.name} weights are read, and not written"

    def write_linear(
        self, writer: CheckpointWriter, module: str, weight: Tensor | QTensor, *, activations: Activations = "none"
    ) -> None:
        raise UnsupportedError(f"{module}: {self.name} weights are read, and not written")

    def config_entry(
        self, linears: Linears, *, activations: Activations = "none", kv_cache_scheme: dict[str, Any] | None = None
    ) -> dict[str, Any] | None:
        raise UnsupportedError(f"{self.name} weights are read, and not written")
