"""FP8 (`quant_method` fp8 and fbgemm_fp8): float8 e4m3 codes, and one scale for each block, each output or the tensor.

    module.weight            float8 e4m3 [out, in]
    module.weight_scale_inv  float32 [ceil(out / rows), ceil(in / columns)]    w = code * scale, in spite of the name

A scale is also named `weight_scale`. One number is the scale of the whole weight, and [out] or [out, 1] has one for
each output. Otherwise `weight_block_size` is [rows, columns], 128 by 128 if it is not given; the last blocks may be
smaller. DeepSeek defined the layout in blocks, for which engines compute with activations in float8, with a scale for
each token and `columns` inputs. Scales of activations (`input_scale`, `activation_scale`) are not read. Blocks are
written.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from lmkit.codes import FLOAT8
from lmkit.errors import CheckpointError, UnsupportedError
from lmkit.formats.checkpoint import CheckpointReader, CheckpointWriter
from lmkit.formats.dense import read_dense
from lmkit.formats.names import Activations
from lmkit.formats.parts import (
    HEAD,
    MAX_GROUP_SIZE,
    Fields,
    field_problem,
    listed,
    matrix_shape,
    names_problem,
    one_scheme,
    read_float8,
    read_scales,
)
from lmkit.qtensor import Linears, QTensor, QuantScheme, float8_scheme

_FIELDS: Fields = (
    ("fmt", "fmt", ("e4m3", "float8_e4m3fn", None)),
    ("expert_dtype", "expert_dtype", ("fp8", None)),
)
SCALES = ("weight_scale_inv", "weight_scale")  # names of a weight's scales
BLOCK = (128, 128)


class Fp8Format:
    name = "fp8"

    def accepts(self, config: dict[str, Any]) -> str | None:
        entry = config["quantization_config"]
        size = entry.get("weight_block_size")
        if size is not None and not (isinstance(size, list) and len(size) == 2
                and all(type(n) is int and 1 <= n <= MAX_GROUP_SIZE for n in size)):  # fmt: skip
            return f"weight_block_size is {size!r}, expected two sizes such as [128, 128]"
        return (
            field_problem(entry, _FIELDS)
            or names_problem("modules_to_not_convert", entry.get("modules_to_not_convert"))
            or names_problem("ignored_layers", entry.get("ignored_layers"))
        )

    def activations(self, config: dict[str, Any]) -> Activations:
        return "float8"

    def read_linear(self, reader: CheckpointReader, module: str) -> Tensor | QTensor:
        entry = reader.config["quantization_config"]
        if not any(reader.has(f"{module}.{scale}") for scale in SCALES):
            return read_dense(reader, module)
        skipped = [*(entry.get("modules_to_not_convert") or []), *(entry.get("ignored_layers") or [])]
        if name := listed(module, skipped):
            raise CheckpointError(f"{reader.path}: {module} has scales, but {name!r} is listed as not quantized")
        return read_scaled(reader, module, entry.get("weight_block_size"))

    def can_write(self, shape: tuple[int, int], scheme: QuantScheme) -> str | None:
        if scheme.codes != FLOAT8:
            return f"{scheme.codes.words}, fp8 has floats"
        if scheme.rows < 1 or scheme.group_size == -1:
            return "one scale for a whole row or tensor, fp8 has blocks; use compressed-tensors"
        return None

    def write_linear(
        self, writer: CheckpointWriter, module: str, weight: Tensor | QTensor, *, activations: Activations = "none"
    ) -> None:
        if not isinstance(weight, QTensor):
            writer.add(module + ".weight", weight)
            return
        out_features, in_features = weight.codes.shape
        if reason := self.can_write((out_features, in_features), weight.scheme):
            raise UnsupportedError(f"{module}: fp8 cannot store it: {reason}")
        writer.add(module + ".weight", weight.codes)
        writer.add(module + ".weight_scale_inv", weight.scales.float().contiguous())

    def config_entry(
        self, linears: Linears, *, activations: Activations = "none", kv_cache_scheme: dict[str, Any] | None = None
    ) -> dict[str, Any] | None:
        """The entry. Engines that know the format compute with float8 activations, independent of `activations`."""
        if activations == "int8":
            raise UnsupportedError("fp8 has no place for int8 activations; use compressed-tensors")
        if kv_cache_scheme is not None:
            raise UnsupportedError("fp8 has no place for a kv_cache_scheme; use compressed-tensors")
        scheme = one_scheme(linears, "fp8")
        every = {HEAD: None, **linears}
        return {
            "quant_method": "fp8",
            "fmt": "e4m3",
            "activation_scheme": "dynamic",
            "weight_block_size": [scheme.rows, scheme.group_size],
            "modules_to_not_convert": sorted(module for module, scheme in every.items() if scheme is None),
        }


def read_scaled(reader: CheckpointReader, module: str, block: Sequence[int] | None = None) -> QTensor:
    """A weight in float8 with its scales, whose shape tells what shares one. `block` is (outputs, inputs) of a scale
    for each block; None = not stated. Raises CheckpointError."""
    if not reader.has(module + ".weight"):
        raise CheckpointError(f"{reader.path}: tensor {module}.weight is missing")
    out_features, in_features = shape = matrix_shape(reader, module + ".weight", ("F8_E4M3",))
    name = next(name for scale in SCALES if reader.has(name := f"{module}.{scale}"))
    stored = reader.info(name).shape
    rows, columns = block or BLOCK
    blocks = float8_scheme(columns, rows)
    in_blocks = blocks.num_row_groups(out_features), blocks.num_groups(in_features)
    # ModelOpt writes a scale of blocks as [row groups, 1, groups, 1].
    of_blocks = in_blocks, (in_blocks[0], 1, in_blocks[1], 1)
    if math.prod(stored) == 1 and (block is None or stored not in of_blocks):
        scheme = float8_scheme(-1, -1)
    elif stored in ((out_features,), (out_features, 1)) and stored not in of_blocks:
        scheme = float8_scheme()
    else:
        scheme = blocks
    expected = scheme.num_row_groups(out_features), scheme.num_groups(in_features)
    scales = read_scales(reader, name, *(of_blocks if scheme == blocks else (stored,))).reshape(expected)
    codes = read_float8(reader, module + ".weight", shape)
    return QTensor(codes, scales, torch.zeros(0, dtype=torch.uint8), scheme)
