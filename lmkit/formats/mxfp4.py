"""MXFP4 (OCP Microscaling Formats 1.0), read only: 32 neighbouring inputs share a power of two.

    <module>.mxfp4_blocks   uint8 [out, groups, 16]: byte i has input 2 i in its low nibble, 2 i + 1 in its high one
    <module>.mxfp4_scales   uint8 [out, groups]: the scale is 2^(byte - 127); 255 is NaN

The names are those of lmkit.models.fused; files have `experts.gate_up_proj_blocks` of all experts.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from lmkit.codes import E2M1
from lmkit.errors import CheckpointError
from lmkit.formats.checkpoint import CheckpointReader
from lmkit.formats.dense import read_dense
from lmkit.formats.parts import field_problem, read_part
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
        blocks = read_part(reader, name, ("U8",), shape)
        exponents = read_part(reader, f"{module}.{SCALES}", ("U8",), shape[:2])
        if bool((exponents == 255).any()):
            raise CheckpointError(f"{reader.path}: {module}.{SCALES} holds numbers that are not finite")
        nibbles = torch.stack([blocks & 15, blocks >> 4], dim=-1).flatten(1)
        return QTensor(nibbles, exponents, E2M1.zeros(exponents.shape), MXFP4)
