"""compressed-tensors: weights of several schemes in one checkpoint.

w = (code - zero) * scale; for floats, code * scale. Scales keep the dtype that they have in memory, because the codes
were chosen for them. A module without these tensors is dense. compressed_config.py decides a module's scheme, and
compressed_storages.py has the tensors.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor

from lmkit.codes import FLOAT8
from lmkit.errors import CheckpointError, UnsupportedError
from lmkit.formats import compressed_config
from lmkit.formats.checkpoint import CheckpointReader, CheckpointWriter
from lmkit.formats.compressed_config import read_rules, storage_of
from lmkit.formats.compressed_storages import STORAGES, read_rounded
from lmkit.formats.dense import read_dense
from lmkit.formats.names import Activations
from lmkit.formats.parts import FLOATS
from lmkit.qtensor import Linears, QTensor, QuantScheme

PARTS = ("weight_packed", "weight_shape", "weight_scale")  # a module without these is dense


class CompressedTensorsFormat:
    name = "compressed-tensors"

    def accepts(self, config: dict[str, Any]) -> str | None:
        return compressed_config.problem(config["quantization_config"])

    def activations(self, config: dict[str, Any]) -> Activations:
        return read_rules(config["quantization_config"]).activations

    def read_linear(self, reader: CheckpointReader, module: str) -> Tensor | QTensor:
        rule = read_rules(reader.config["quantization_config"]).of(module)
        if rule is None:
            for part in ("weight_packed", "weight_scale"):
                if reader.has(f"{module}.{part}"):
                    raise CheckpointError(f"{reader.path}: {module} has a {part}, but config.json leaves it dense")
            return read_dense(reader, module)
        if not any(reader.has(f"{module}.{part}") for part in PARTS):
            return read_dense(reader, module)
        if rule.scheme.codes.uniform and _is_float(reader, module):
            return read_rounded(reader, module, rule.scheme)
        return rule.storage.read(reader, module, rule.scheme)

    def can_write(self, shape: tuple[int, int], scheme: QuantScheme) -> str | None:
        size = scheme.group_size
        if scheme.act_order:
            return "activation order, which the format no longer has"
        if scheme.codes != FLOAT8 and size != -1 and shape[1] % size:
            return f"{shape[1]} inputs are not a multiple of the group size {size}"
        if not any(storage.writes(scheme, "none") for storage in STORAGES):
            return f"{scheme.codes.words} with such scales, which it has no packing for"
        return None

    def write_linear(
        self, writer: CheckpointWriter, module: str, weight: Tensor | QTensor, *, activations: Activations = "none"
    ) -> None:
        """Add the weight's tensors. `activations` is as in `config_entry`."""
        if not isinstance(weight, QTensor):
            writer.add(module + ".weight", weight)
            return
        out_features, in_features = weight.codes.shape
        if reason := self.can_write((out_features, in_features), weight.scheme):
            raise UnsupportedError(f"{module}: compressed-tensors cannot store it: {reason}")
        storage_of(weight.scheme, activations).write(writer, module, weight)

    def config_entry(
        self, linears: Linears, *, activations: Activations = "none", kv_cache_scheme: dict[str, Any] | None = None
    ) -> dict[str, Any] | None:
        """The entry.

        `activations` are those of 8-bit weights of the same kind; other weights have exact activations.
        """
        return compressed_config.make_entry(linears, activations, kv_cache_scheme)


def _is_float(reader: CheckpointReader, module: str) -> bool:
    name = module + ".weight"
    return reader.has(name) and reader.info(name).dtype in FLOATS and not reader.has(module + ".weight_packed")
