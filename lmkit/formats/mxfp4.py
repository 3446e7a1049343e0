"""MXFP4 (OCP Microscaling Formats 1.0): 32 neighbouring inputs share a power of two.

    compressed-tensors (mxfp4-pack-quantized)        gpt-oss (quant_method mxfp4, read only)
    module.weight_packed   uint8 [out, in / 2]       module.mxfp4_blocks   [out, groups, 16]
    module.weight_scale    uint8 [out, groups]       module.mxfp4_scales   the same

Byte i has input 2 i in its low nibble, 2 i + 1 in its high one. The scale is 2^(byte - 127); 255 is NaN. The names on
the right are those of lmkit.models.fused; files have `experts.gate_up_proj_blocks` of all experts.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from lmkit.codes import E2M1
from lmkit.errors import CheckpointError
from lmkit.formats.checkpoint import CheckpointReader, CheckpointWriter
from lmkit.formats.dense import read_dense
from lmkit.formats.parts import field_problem, matrix_shape, read_part
from lmkit.formats.read_only import ReadOnlyFormat
from lmkit.qtensor import QTensor, QuantScheme
from lmkit.scales import EXPONENTS

BLOCKS, SCALES = "mxfp4_blocks", "mxfp4_scales"
MXFP4 = QuantScheme(E2M1, 32, scales=EXPONENTS)


class Mxfp4Format(ReadOnlyFormat):
    name = "mxfp4"

    def accepts(self, config: dict[str, Any]) -> str | None:
        return field_problem(config["quantization_config"], ())

    def read_linear(self, reader: CheckpointReader, module: str) -> Tensor | QTensor:
        name = f"{module}.{BLOCKS}"
        if not reader.has(name):
            return read_dense(reader, module)
        shape = reader.info(name).shape
        if len(shape) != 3 or shape[2] != 16:
            raise CheckpointError(f"{reader.path}: {name} is {list(shape)}, expected [outputs, groups, 16]")
        return _decoded(reader, read_part(reader, name, ("U8",), shape).flatten(1), f"{module}.{SCALES}")


def read_compressed(reader: CheckpointReader, module: str) -> QTensor:
    """A weight [out, in] as compressed-tensors stores it. Raises CheckpointError."""
    name = module + ".weight_packed"
    if not reader.has(name):
        raise CheckpointError(f"{reader.path}: tensor {name} is missing")
    _, width = matrix_shape(reader, name, ("U8",))
    if 2 * width % MXFP4.group_size:
        raise CheckpointError(f"{reader.path}: {name} has {2 * width} inputs, not a multiple of {MXFP4.group_size}")
    return _decoded(reader, reader.tensor(name), module + ".weight_scale")


def write_compressed(writer: CheckpointWriter, module: str, weight: QTensor) -> None:
    """Add the tensors of a weight in MXFP4, as compressed-tensors has them."""
    writer.add(module + ".weight_packed", weight.codes[:, 0::2] | weight.codes[:, 1::2] << 4)
    writer.add(module + ".weight_scale", weight.scales.contiguous())


def _decoded(reader: CheckpointReader, packed: Tensor, scales: str) -> QTensor:
    """The weight of bytes [out, in / 2] and the tensor `scales`."""
    rows, width = packed.shape
    exponents = read_part(reader, scales, ("U8",), (rows, 2 * width // MXFP4.group_size))
    if bool((exponents == 255).any()):
        raise CheckpointError(f"{reader.path}: {scales} holds numbers that are not finite")
    nibbles = torch.stack([packed & 15, packed >> 4], dim=-1).flatten(1)
    return QTensor(nibbles, exponents, E2M1.zeros(tuple(exponents.shape)), MXFP4)
