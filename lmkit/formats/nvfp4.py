"""NVFP4: 16 neighbouring inputs share a float8 scale, and a weight one factor more.

    compressed-tensors (nvfp4-pack-quantized)             ModelOpt (quant_method modelopt)
    module.weight_packed        uint8 [out, in / 2]       module.weight
    module.weight_scale         float8 e4m3 [out, in / 16]     the same
    module.weight_global_scale  float32 [1]: divides      module.weight_scale_2  float32: multiplies
    module.input_global_scale   float32 [1]: that of inputs, if engines round them to NVFP4; it is kept, and not used

Byte i has input 2 i in its low nibble. A nibble is a float4 as in MXFP4. w = nibble * (scale / global scale), or
nibble * (scale * scale_2), in float32. That of compressed-tensors is written. Its weights that are multiplied together
have one global scale, as engines expect.

ModelOpt's other algorithms here have weights in float8: see fp8.py. A module's tensors say which it is.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from lmkit.codes import E2M1
from lmkit.errors import CheckpointError
from lmkit.formats.checkpoint import CheckpointReader, CheckpointWriter
from lmkit.formats.dense import read_dense
from lmkit.formats.fp8 import read_scaled
from lmkit.formats.names import Activations
from lmkit.formats.parts import (
    Fields,
    field_problem,
    matrix_shape,
    read_float8,
    read_scales,
)
from lmkit.formats.read_only import ReadOnlyFormat
from lmkit.qtensor import QTensor, QuantScheme
from lmkit.scales import TwoLevel

GROUP_SIZE = 16
NVFP4 = QuantScheme(E2M1, GROUP_SIZE, scales=TwoLevel(divided=True))  # of compressed-tensors
NVFP4_MODELOPT = QuantScheme(E2M1, GROUP_SIZE, scales=TwoLevel())
_FIELDS: Fields = (
    ("quant_algo", "quant_algo", ("nvfp4", "fp8", "fp8_per_channel_per_token", "fp8_pb_wo", "mixed_precision")),
)


class ModelOptFormat(ReadOnlyFormat):
    name = "modelopt"

    def accepts(self, config: dict[str, Any]) -> str | None:
        return field_problem(config["quantization_config"], _FIELDS)

    def activations(self, config: dict[str, Any]) -> Activations:
        """Those of float8 weights; the inputs of NVFP4 stay exact."""
        return "none" if str(config["quantization_config"].get("quant_algo")).lower() == "nvfp4" else "float8"

    def read_linear(self, reader: CheckpointReader, module: str) -> Tensor | QTensor:
        if reader.has(module + ".pre_quant_scale"):
            raise CheckpointError(f"{reader.path}: {module}.pre_quant_scale: inputs would have to be scaled by it")
        if reader.has(module + ".weight_scale_2"):
            return read_nvfp4(reader, module, "weight", _factor(reader, module + ".weight_scale_2"), NVFP4_MODELOPT)
        return read_scaled(reader, module) if reader.has(module + ".weight_scale") else read_dense(reader, module)


def read_compressed(reader: CheckpointReader, module: str) -> QTensor:
    """A weight [out, in] as compressed-tensors stores it. Raises CheckpointError."""
    factor = _factor(reader, module + ".weight_global_scale")
    if not bool(factor > 0):
        raise CheckpointError(f"{reader.path}: {module}.weight_global_scale is {float(factor)}, expected more than 0")
    weight = read_nvfp4(reader, module, "weight_packed", factor, NVFP4)
    name = module + ".input_global_scale"
    return replace(weight, input_factor=_factor(reader, name)) if reader.has(name) else weight


def write_compressed(writer: CheckpointWriter, module: str, weight: QTensor) -> None:
    """Add the tensors of a weight in NVFP4, as compressed-tensors has them."""
    assert weight.factor is not None
    writer.add(module + ".weight_packed", weight.codes[:, 0::2] | weight.codes[:, 1::2] << 4)
    writer.add(module + ".weight_scale", weight.scales.contiguous())
    writer.add(module + ".weight_global_scale", weight.factor)
    if weight.input_factor is not None:
        writer.add(module + ".input_global_scale", weight.input_factor)


def read_nvfp4(reader: CheckpointReader, module: str, part: str, factor: Tensor, scheme: QuantScheme) -> QTensor:
    """A weight [out, in] of the tensor `part` and its scales. Raises CheckpointError."""
    name = f"{module}.{part}"
    if not reader.has(name):
        raise CheckpointError(f"{reader.path}: tensor {name} is missing")
    rows, width = matrix_shape(reader, name, ("U8",))
    if 2 * width % GROUP_SIZE:
        raise CheckpointError(f"{reader.path}: {name} has {2 * width} inputs, not a multiple of {GROUP_SIZE}")
    scales, packed = read_float8(reader, module + ".weight_scale", (rows, 2 * width // GROUP_SIZE)), reader.tensor(name)
    codes = torch.stack((packed & 15, packed >> 4), dim=-1).flatten(1)
    return QTensor(codes, scales, E2M1.zeros(tuple(scales.shape)), scheme, factor=factor)


def _factor(reader: CheckpointReader, name: str) -> Tensor:
    return read_scales(reader, name, (), (1,), (1, 1), dtypes=("F32",)).reshape(1)
